"""Where a sequence that is cut over ranks begins and ends.

The ranks of a sequence get the same batch. The model keeps this rank's tokens (``cut``), everything that
works on single tokens runs as it is, attention asks the other ranks for their keys
(:mod:`colossalai.nn.attention`), and what the model returns is gathered, or summed over the ranks.

The axes of a sequence are row axes, as data is: gradients of weights are averaged over them. So between
``cut`` and ``gather`` every gradient is ``size`` times the true one, and the mean over the ranks is the sum
of what their tokens contribute. A weight that works on whole tensors gets its true gradient on every rank,
and so does their mean: both may stand side by side in one model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from colossalai._numeric import round_up
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.mesh import Axes, Layout, Mesh, local_slices, redistribute, replicated
from colossalai.nn.same_tokens import check_same_tokens


@dataclass(frozen=True)
class SequenceParallel:
    """The ranks over which the sequences of one model are cut, and how attention reaches across them."""

    mesh: Mesh
    ring: str | None = None
    """The axis around which attention passes keys and values; each rank holds two chunks (zig-zag)."""
    heads: str | None = None
    """The axis over which attention exchanges the sequence for heads (Ulysses)."""

    @property
    def axes(self) -> Axes:
        """The axes that cut the sequence, major first."""
        return tuple(axis for axis in (self.ring, self.heads) if axis is not None)

    @property
    def size(self) -> int:
        return self.mesh.group_size(*self.axes)

    def padded(self, length: int) -> int:
        """The length that ``length`` tokens are padded to, so that every rank has equally many."""
        zigzag = self.ring is not None and self.mesh.size[self.ring] > 1
        step = self.size * (2 if zigzag else 1)
        padded = round_up(max(length, 1), step)
        # not as many on each rank as there are in all: a loss tells labels of whole sequences by their number
        return padded + step if padded == length * self.size else padded

    def layout(self, ndim: int, dim: int = 1) -> Layout:
        """The layout of a tensor whose ``dim`` is the sequence."""
        return self.cutting(replicated(ndim), dim)

    def cutting(self, layout: Layout, dim: int = 1) -> Layout:
        """``layout``, in which nothing else cuts ``dim``, with that dim cut as the sequence."""
        zigzag = frozenset(() if self.ring is None or self.mesh.size[self.ring] == 1 else (self.ring,))
        dims = tuple(self.axes if d == dim % len(layout.dims) else axes for d, axes in enumerate(layout.dims))
        return replace(layout, dims=dims, zigzag=zigzag)

    def cut(self, x: Tensor, dim: int = 1, *, value: float = 0) -> Tensor:
        """This rank's tokens of ``x``, which all ranks hold; what is missing to equal parts is ``value``.

        Ranks that hold different ``x`` are refused, see :mod:`colossalai.nn.same_tokens`.
        """
        _note_length(self.padded(x.size(dim)), x.size(dim))
        return self._piece(x, dim, value)

    def cut_labels(self, labels: Tensor, ignored: int) -> Tensor:
        """The labels (batch, length) of this rank's tokens; what pads a sequence gets the label ``ignored``.

        Labels of a length that no model has cut are refused, though they may be padded to as many: the others
        would be ignored, or would teach what pads the tokens.
        """
        length = labels.size(1)
        known = _lengths.get(self.padded(length), [length])
        if length not in known:
            raise ValueError(
                f"labels of {length} tokens do not fit sequences of {' or '.join(map(str, sorted(known)))},"
                f" which are padded to {self.padded(length)} as they would be; give every token of the whole"
                f" sequences a label, or {ignored} where there is none"
            )
        return self._piece(labels, 1, ignored)

    def _piece(self, x: Tensor, dim: int, value: float) -> Tensor:
        check_same_tokens("a sequence", x, self.mesh)
        missing = self.padded(x.size(dim)) - x.size(dim)
        if missing:
            x = pad(x, (*(0, 0) * (x.ndim - 1 - dim % x.ndim), 0, missing), value=value)
        mine = redistribute(x, replicated(x.ndim), self.layout(x.ndim, dim), self.mesh)
        return scaled_gradient(mine, 1 / self.size)

    def gather(self, x: Tensor, length: int, dim: int = 1) -> Tensor:
        """The ``length`` tokens of the whole sequence, on every rank, from the tokens of each."""
        whole = redistribute(
            scaled_gradient(x, self.size), self.layout(x.ndim, dim), replicated(x.ndim), self.mesh
        )
        return whole.narrow(dim, 0, length)

    def total(self, x: Tensor) -> Tensor:
        """The sum over the ranks of what each made of its tokens, on every rank."""
        partial = Layout(((),) * x.ndim, partial=frozenset(self.axes))
        return redistribute(scaled_gradient(x, self.size), partial, replicated(x.ndim), self.mesh)

    def positions(self, length: int, device: torch.device | None = None, *, padding: int = 0) -> Tensor:
        """The places of this rank's tokens in a sequence of ``length``.

        What pads it is at place ``padding``: for 0, a table of ``length`` positions has them all.
        """
        ((ranges),) = local_slices((self.padded(length),), self.layout(1, 0), self.mesh)
        places = torch.cat([torch.arange(start, start + n, device=device) for start, n in ranges])
        return places.masked_fill(places >= length, padding)

    def are_tokens(self, length: int, device: torch.device | None = None) -> Tensor:
        """Which of this rank's tokens are those of a sequence of ``length``, and not what pads it."""
        return self.positions(length, device, padding=-1) >= 0

    def is_piece(self, rows: int, length: int) -> bool:
        """Whether ``rows`` is how many tokens each rank has of a sequence of ``length``."""
        return rows * self.size == self.padded(length)

    def documents(self, real: Tensor, *, causal: bool) -> Tensor:
        """What :func:`colossalai.nn.attention.sequence_attention` calls documents, for ``real`` (batch,
        length): True at tokens, False at padding.

        Padding looks at the tokens and is seen by none.  Where attention is causal, padding before the first
        token has none to look at, and each looks at itself.
        """
        check_same_tokens("a mask", real, self.mesh)
        numbers = torch.where(real, 1, -1)
        if causal:
            alone = torch.arange(2, 2 + real.size(1), device=real.device)
            numbers = torch.where(real.cumsum(-1) == 0, alone, numbers)
        return pad(numbers, (0, self.padded(real.size(1)) - real.size(1)), value=-1)


# The lengths of the sequences that models have padded to each length, the last one last: of a token alone no
# layer can tell whether it is padding.
_lengths: dict[int, list[int]] = {}


def _note_length(padded: int, length: int) -> None:
    lengths = _lengths.setdefault(padded, [])
    if length in lengths:
        lengths.remove(length)
    lengths.append(length)


def length_before_padding(padded: int) -> int | None:
    """The length of the sequences that ``SequenceParallel.cut`` has last padded to ``padded``; None if there
    were none.
    """
    return _lengths.get(padded, [None])[-1]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """``x``, whose gradient is multiplied by ``factor``."""
    return _Scaled.apply(x, factor) if x.requires_grad and factor != 1 else x


def current_sequence() -> SequenceParallel | None:
    """How the launched job cuts its sequences; None if it does not."""
    if not gpc.is_initialized(ParallelMode.SEQUENCE) or gpc.get_world_size(ParallelMode.SEQUENCE) == 1:
        return None
    return SequenceParallel(gpc.mesh, gpc.plan.ring_axis, gpc.plan.heads_axis)
