"""Random numbers of the ranks of one model: alike where they hold the same activations, each rank's own where
they hold pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from colossalai.mesh import Axes, Mesh, random_key


class RandomStreams:
    """The random numbers inside one ``own_numbers``: a stream of this rank's own, and one that all ranks
    share.

    The generator runs in one of both; the state of the other waits.  ``rows`` is this rank's place on axes
    that cut the tokens of both.
    """

    def __init__(self, key: int, coords: tuple[int, ...], switches: bool, rows: tuple[int, ...] = ()) -> None:
        self.key, self.coords, self.switches, self.rows = key, coords, switches, rows
        self.is_own = False
        self.taken = 0
        self._waiting: tuple[Tensor, Tensor | None] | None = None

    def switch(self, own: bool) -> None:
        if own is self.is_own:
            return
        waiting, self._waiting, self.is_own = self._waiting, _state(), own
        if waiting is not None:
            _set_state(waiting)
        else:
            self.seed()

    def seed(self) -> None:
        names: tuple[str | int, ...] = ("own", *self.coords) if self.is_own else ("whole",)
        seed(random_key(self.key, *names, *self.rows))


active: list[RandomStreams] = []


@contextmanager
def own_numbers(
    axes: Axes, mesh: Mesh, *, switches: bool = False, own: bool = True, rows: Axes = ()
) -> Iterator[None]:
    """Random numbers that differ between ranks which hold different pieces along ``axes``.

    They start from one number of the generator that all ranks share, which goes on as if only this had been
    drawn.  So ranks stay in step, and torch's activation checkpointing, which resets that generator, repeats
    the same numbers.

    With ``switches``, ranks draw their own behind an expanding layer, until a contracting one has made the
    activations whole again; there all draw alike, but for ``rows``: axes that cut the sequence.  ``own`` says
    how it begins.
    """
    key = int(torch.randint(1 << 62, (), device="cpu"))
    coords, places = (tuple(mesh.coord[axis] for axis in some) for some in (axes, rows))
    numbers = RandomStreams(key, coords, switches, places)
    numbers.is_own = own
    with forked():
        numbers.seed()
        active.append(numbers)
        try:
            yield
        finally:
            active.pop()


def switch_numbers(*, own: bool) -> None:
    """A layer has made activations of which each rank holds a piece (``own``), or made them whole."""
    if active and active[-1].switches:
        active[-1].switch(own)


def draws_own() -> bool:
    """Whether random numbers are now this rank's own."""
    return bool(active) and active[-1].is_own


def _on_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def forked() -> AbstractContextManager[None]:
    return torch.random.fork_rng(devices=[torch.cuda.current_device()] if _on_cuda() else [])


def seed(key: int) -> None:
    torch.default_generator.manual_seed(key % (1 << 63))
    if _on_cuda():
        torch.cuda.manual_seed(key % (1 << 63))


def _state() -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if _on_cuda() else None


def _set_state(state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
