"""Random numbers per parallel mode: a stream that is equal on all ranks (DATA) and one that differs (TENSOR).

``SeedManager`` holds several random streams that take turns in torch's one default generator: each mode owns
a generator state; ``set_mode`` stores the state of the mode that leaves and loads that of the mode that
enters, so each stream goes on where it stopped.  The functions act on the one ``SeedManager`` of this
process, which ``colossalai.launch`` fills.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from colossalai.context.parallel_mode import ParallelMode


class SeedManager:
    """Streams of the CUDA generator of the current device, or of the CPU generator on a machine without
    CUDA.
    """

    def __init__(self) -> None:
        self._seeds: dict[ParallelMode, int] = {}
        self._current: ParallelMode | None = None
        # The key None holds the generator as it was before any mode was set.
        self._states: dict[ParallelMode | None, Tensor] = {}

    @property
    def current_mode(self) -> ParallelMode | None:
        return self._current

    @property
    def seeds(self) -> dict[ParallelMode, int]:
        return dict(self._seeds)

    @property
    def seed_states(self) -> dict[ParallelMode, Tensor]:
        """The state of every stream, that of the current one as it is now."""
        self.sync()
        return {mode: state for mode, state in self._states.items() if mode is not None}

    def add_seed(self, parallel_mode: ParallelMode, seed: int, overwrite: bool = False) -> None:
        """Start a stream from ``seed``; ``overwrite`` allows to start it anew."""
        if not isinstance(parallel_mode, ParallelMode):
            raise TypeError(f"a random stream belongs to a ParallelMode, got {parallel_mode!r}")
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
            raise ValueError(
                f"the seed of {parallel_mode} must be an integer that is not negative, got {seed!r}"
            )
        if parallel_mode in self._seeds and not overwrite:
            raise ValueError(
                f"{parallel_mode} already has the seed {self._seeds[parallel_mode]}; pass overwrite=True to"
                " replace it"
            )
        before = _get_state()
        _manual_seed(seed)
        self._seeds[parallel_mode] = seed
        self._states[parallel_mode] = _get_state()
        if parallel_mode is not self._current:
            _set_state(before)

    def set_mode(self, parallel_mode: ParallelMode | None) -> None:
        """Continue with the stream of ``parallel_mode``; None is the generator as it was before any mode."""
        if parallel_mode is not None:
            self._check(parallel_mode)
        elif None not in self._states and self._current is not None:
            raise ValueError(
                f"the generator has been in {self._current} from the start; there is nothing to go back to"
            )
        self.sync()
        self._current = parallel_mode
        _set_state(self._states[parallel_mode])

    def set_state(self, parallel_mode: ParallelMode, state: Tensor) -> None:
        """Put the stream of ``parallel_mode`` to ``state``, at once where it is the current one."""
        self._check(parallel_mode)
        self._states[parallel_mode] = state
        if parallel_mode is self._current:
            _set_state(state)

    def sync(self) -> None:
        """Note the state of the current stream."""
        self._states[self._current] = _get_state()

    def reset(self) -> None:
        """Forget all streams; the generator keeps its present state."""
        self.__init__()  # type: ignore[misc]

    def _check(self, parallel_mode: ParallelMode) -> None:
        if parallel_mode not in self._seeds:
            known = ", ".join(map(str, self._seeds)) or "none; colossalai.launch adds DATA and TENSOR"
            raise ValueError(f"{parallel_mode} has no seed; call add_seed first. Modes with a seed: {known}")


def _get_state() -> Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_state(state: Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def _manual_seed(seed: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    else:
        torch.manual_seed(seed)


# ---- The documented functions over the one ``SeedManager`` of this process ----

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
    """Give ranks that hold different experts different TENSOR streams.

    Experts of ``colossalai.nn`` start with the same values under every plan, and do not draw from it.
    """
    add_seed(ParallelMode.TENSOR, seed + _expert_place(), overwrite=True)


def _expert_place() -> int:
    """This rank's place among those that share the experts out."""
    from colossalai.context.parallel_context import global_context as gpc  # which imports this module

    return gpc.get_local_rank(ParallelMode.MOE_MODEL) if gpc.is_initialized(ParallelMode.MOE_MODEL) else 0


def reset_seeds() -> None:
    """Forget all streams."""
    _MANAGER.reset()
