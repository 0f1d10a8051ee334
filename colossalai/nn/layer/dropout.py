"""Dropout whose mask is equal where the tensor is identical and independent where it is cut.

Normally the masks come from torch's generators: as they are for a tensor that every rank holds whole, which
all ranks draw alike; for a tensor that is cut, keyed by the rank's place on the axes that cut it
(``nn.random_streams``), so that they may differ over a cut sequence and be alike over tensor ranks.  Inside
``plan_independent_dropout(seed)`` they come from a counter instead (:class:`colossalai.mesh.RandomStream`),
which gives every plan, the serial model included, the same masks; this is slower and for comparing plans.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.nn.functional as F
from torch import Tensor, nn

from colossalai.context import ParallelMode
from colossalai.context.random import get_seeds, seed
from colossalai.mesh import PIPELINE_AXIS, Axes, Layout, Mesh, RandomStream, dropout_mask
from colossalai.nn.layer.base import ParallelLayer
from colossalai.nn.modes import TensorParallel, Where, at_rank, stream_position
from colossalai.nn.random_streams import own_numbers
from colossalai.nn.sequence import current_sequence
from colossalai.utils import register_random_state

_exact: list[RandomStream] = []
# the stream of this launch's seed, for what ranks with different pieces must agree on
_launched: dict[int, RandomStream] = {}


@contextmanager
def plan_independent_dropout(seed: int) -> Iterator[RandomStream]:
    """Draw the same masks under every plan: each dropout takes the next key of one counted stream.

    The backward pass may run outside: a checkpointed function goes back into the block that it ran in.
    """
    _remember_in_checkpoints()
    _exact.append(RandomStream(seed, "dropout"))
    try:
        yield _exact[-1]
    finally:
        _exact.pop()


@functools.cache
def _remember_in_checkpoints() -> None:
    def back_to(streams: list[RandomStream]) -> None:
        _exact[:] = streams

    register_random_state(_exact.copy, back_to)


def exact_stream() -> RandomStream | None:
    """The stream of the innermost ``plan_independent_dropout``, if there is one."""
    return _exact[-1] if _exact else None


def _launched_stream() -> RandomStream:
    seed = get_seeds().get(ParallelMode.DATA, 0)
    return _launched.setdefault(seed, RandomStream(seed, "drop path"))


class Dropout(ParallelLayer):
    """``torch.nn.Dropout``.

    ``at`` says where its input rests; by default where the last Linear left the stream.

    ``layout`` gives another place, such as that of attention's scores (``tp.heads``).  Where the launched job
    cuts sequences, the input is this rank's tokens.
    """

    def __init__(
        self,
        p: float = 0.5,
        inplace: bool = False,
        *,
        at: Where | None = None,
        layout: Layout | None = None,
        tp: TensorParallel | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(tp, mesh)
        if not 0 <= p <= 1:
            raise ValueError(f"{type(self).__name__}: p is a probability, got {p}")
        self.p, self.inplace = p, inplace
        if layout is None:
            layout = self.tp.rest(at or ("hidden" if self.plain else stream_position(self.mesh)))
            if tp is None and (sequence := current_sequence()) is not None:
                layout = sequence.cutting(layout)
        self.layout = layout

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        stream = exact_stream()
        if stream is not None and self.p < 1:
            if not self._cut:
                return stream.dropout(x, self.p)
            return stream.dropout(x, self.p, self.mesh, self._at(x.ndim))
        with self.own_stream():
            return F.dropout(x, self.p, True, self.inplace)

    def own_stream(self) -> AbstractContextManager[None]:
        """Draw the numbers that belong to where the input lies: alike on ranks that hold the same of it."""
        if not self._cut or not self.training or self.p == 0:
            return nullcontext()
        # stages hold different layers
        stage = (PIPELINE_AXIS,) if PIPELINE_AXIS in self.mesh.size else ()
        return own_numbers((*self._cut, *stage), self.mesh)

    @property
    def _cut(self) -> Axes:
        mesh = self._mesh
        return () if mesh is None else tuple(a for a in self.layout.sharded if mesh.size.get(a, 1) > 1)

    def _at(self, ndim: int) -> Layout:
        return self.layout if len(self.layout.dims) == ndim else at_rank(self.layout, ndim)

    def extra_repr(self) -> str:
        return f"p={self.p}, inplace={self.inplace}"


class WrappedDropout(nn.Module):
    """``torch.nn.Dropout`` that draws from the stream of one parallel mode; with None from the current
    one.
    """

    def __init__(self, p: float = 0.5, inplace: bool = False, mode: ParallelMode | None = None) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"WrappedDropout: p is a probability, got {p}")
        self.p, self.inplace, self.mode = p, inplace, mode

    def forward(self, x: Tensor) -> Tensor:
        with nullcontext() if self.mode is None else seed(self.mode):
            return F.dropout(x, self.p, self.training, self.inplace)


class DropPath(ParallelLayer):
    """Stochastic depth: in training, zero a whole sample with probability ``drop_prob`` and scale the others
    up.

    Ranks that hold pieces of one sample agree on its fate.
    """

    def __init__(
        self,
        drop_prob: float | None = None,
        *,
        tp: TensorParallel | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(tp, mesh)
        self.drop_prob = drop_prob or 0.0
        if not 0 <= self.drop_prob < 1:
            raise ValueError(f"drop_path must be at least 0 and less than 1, got {drop_prob}")

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.drop_prob == 0:
            return x
        kept = self._kept(x)
        return x * kept.view(-1, *[1] * (x.dim() - 1)) / (1 - self.drop_prob)

    def _kept(self, x: Tensor) -> Tensor:
        stream = exact_stream()
        if stream is None and self.plain:
            return x.new_empty(len(x)).bernoulli_(1 - self.drop_prob)
        key = (stream or _launched_stream()).next_key()
        batch, mesh = Layout((self.tp.hidden.dims[0],)), None if self.plain else self.mesh
        samples = len(x) if mesh is None else len(x) * mesh.group_size(*batch.dims[0])
        return dropout_mask(key, self.drop_prob, (samples,), batch, mesh, x.device).to(x.dtype)

    def extra_repr(self) -> str:
        return f"drop_prob={self.drop_prob}"


class WrappedDropPath(DropPath):
    """``DropPath`` that draws from the stream of one parallel mode; with None as ``DropPath`` does."""

    def __init__(self, p: float = 0.0, mode: ParallelMode | None = None) -> None:
        super().__init__(p)
        self.seed_mode = mode

    def _kept(self, x: Tensor) -> Tensor:
        if self.seed_mode is None:
            return super()._kept(x)
        with seed(self.seed_mode):
            return x.new_empty(len(x)).bernoulli_(1 - self.drop_prob)
