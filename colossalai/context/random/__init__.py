"""Random numbers per parallel mode: a stream that is equal on all ranks (DATA) and one that differs (TENSOR).

The functions act on the one ``SeedManager`` of this process, which ``colossalai.launch`` fills.
"""

from colossalai.context.random.seed_manager import (
    SeedManager,
    add_seed,
    get_current_mode,
    get_seeds,
    get_states,
    moe_set_seed,
    reset_seeds,
    seed,
    set_mode,
    set_seed_states,
    sync_states,
    with_seed,
)

__all__ = [
    "SeedManager",
    "add_seed",
    "get_current_mode",
    "get_seeds",
    "get_states",
    "moe_set_seed",
    "reset_seeds",
    "seed",
    "set_mode",
    "set_seed_states",
    "sync_states",
    "with_seed",
]
