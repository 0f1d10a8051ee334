"""The documented functions over the one ``SeedManager`` of this process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch.distributed as dist
from torch import Tensor

from colossalai.context.parallel_mode import ParallelMode
from colossalai.context.random.seed_manager import SeedManager

P = ParamSpec("P")
T = TypeVar("T")

_MANAGER = SeedManager()


def get_seeds() -> dict[ParallelMode, int]:
    """The seed each stream was started from."""
    return _MANAGER.seeds


def get_states(copy: bool = False) -> dict[ParallelMode, Tensor]:
    """The generator state of each stream; with ``copy`` as clones that later draws cannot change."""
    states = _MANAGER.seed_states
    return {mode: state.clone() for mode, state in states.items()} if copy else states


def get_current_mode() -> ParallelMode | None:
    """The mode whose stream is drawn from, or None where none was set."""
    return _MANAGER.current_mode


def add_seed(parallel_mode: ParallelMode, seed: int, overwrite: bool = False) -> None:
    """Start a stream for ``parallel_mode``."""
    _MANAGER.add_seed(parallel_mode, seed, overwrite)


def set_mode(parallel_mode: ParallelMode) -> None:
    """Draw from the stream of ``parallel_mode`` from now on."""
    _MANAGER.set_mode(parallel_mode)


def set_seed_states(parallel_mode: ParallelMode, state: Tensor) -> None:
    """Put a stream back to a state that ``get_states`` gave."""
    _MANAGER.set_state(parallel_mode, state)


def sync_states() -> None:
    """Note how far the current stream has been drawn."""
    _MANAGER.sync()


@contextmanager
def seed(parallel_mode: ParallelMode) -> Iterator[None]:
    """Draw from the stream of ``parallel_mode`` inside the block, and from the former one after it."""
    before = _MANAGER.current_mode
    _MANAGER.set_mode(parallel_mode)
    try:
        yield
    finally:
        _MANAGER.set_mode(before)


def with_seed(func: Callable[P, T], parallel_mode: ParallelMode) -> Callable[P, T]:
    """``func`` that always draws from the stream of ``parallel_mode``."""

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        with seed(parallel_mode):
            return func(*args, **kwargs)

    return wrapper


def moe_set_seed(seed: int) -> None:
    """Give every process its own TENSOR stream, so that experts on different processes start different."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    add_seed(ParallelMode.TENSOR, seed + rank, overwrite=True)


def reset_seeds() -> None:
    """Forget all streams."""
    _MANAGER.reset()
