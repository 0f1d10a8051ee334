"""The disk tier of an optimizer, and states that are loaded into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from colossalai.nn.optimizer.nvme_optimizer import NVMeOptimizer
from colossalai.zero.gemini.ddp import ZeroDDP
from colossalai.zero.gemini.resting import Resting
from colossalai.zero.gemini.second import Second, options_of, second_hold
from colossalai.zero.gemini.stepping import Members
from colossalai.zero.pieces import Piece
from colossalai.zero.sharded import needs_masters


def share_on_disk(optim: Optimizer, module: ZeroDDP) -> float | None:
    """``nvme_offload_fraction`` of the user's optimizer: from here on the disk tier does what it asked for."""
    fraction, directory = optim.give_up_offload() if isinstance(optim, NVMeOptimizer) else (0.0, None)
    chunks = module.chunk_manager
    if not fraction:
        return None
    if chunks.shelf is not None:
        raise ValueError(
            f"{type(optim).__name__} has nvme_offload_fraction={fraction}, and the model has disk_dir={chunks.shelf.store.directory!r};"
            " give one of them: the disk tier takes the optimizer states too"
        )
    chunks.add_disk(directory)
    module.gradients.spilled.reserve(module.gradients.host.largest)
    return fraction


def make_resting(module: ZeroDDP, second: Second, members: Members, share: float | None) -> Resting | None:
    """What the optimizer needs for the disk tier of ``module``; None if it has none."""
    optim = second.optim
    if module.chunk_manager.shelf is None:
        return None
    if needs_masters(optim, module.dtype):
        raise ValueError(
            f"the disk tier has no place for the float32 weights that {type(optim).__name__} needs to train in {module.dtype}; use one of"
            " our optimizers (HybridAdam, FusedSGD), or float32"
        )
    return Resting(module.chunk_manager, second, members.pieces, share)


def install_states(optim: Optimizer, states: Mapping[Piece, Mapping[str, Any]]) -> None:
    """Load ``states`` of some pieces as ``optim.load_state_dict`` would, and leave those of the others as they are."""
    if not states:
        return
    hold = second_hold(optim)
    of = {id(piece.value): state for piece, state in states.items()}
    own = [[p for p in group["params"] if id(p) in of] for group in optim.param_groups]
    options = options_of(optim)
    hold.param_groups = [{**o, "params": params} for o, params in zip(options, own, strict=True)]
    numbers = {id(p): n for n, p in enumerate(p for params in own for p in params)}
    hold.load_state_dict(
        {
            "state": {numbers[key]: dict(state) for key, state in of.items()},
            "param_groups": [
                {**o, "params": [numbers[id(p)] for p in ps]} for o, ps in zip(options, own, strict=True)
            ],
        }
    )
    optim.state.update(hold.state)
