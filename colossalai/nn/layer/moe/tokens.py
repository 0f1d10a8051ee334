"""The order of the tokens of a micro-batch: that of the serial model, over all ranks that hold some of them.

Ranks of data and experts hold samples one rank after the other.  Where sequences are cut, ranks hold *runs*
of each sample: one, or two in zig-zag order.  To know how many tokens of the serial order come before those
of a run, ranks tell each other how many they count in each of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

import colossalai.mesh.collectives as collectives
from colossalai.mesh import Axes, Layout, Mesh, local_slices, redistribute, replicated
from colossalai.mesh.mesh import DATA_AXES
from colossalai.nn.sequence import SequenceParallel, scaled_gradient


@dataclass(frozen=True)
class TokenOrder:
    """Where the tokens of this rank, ``shape`` (samples, tokens of each), stand among all."""

    shape: tuple[int, int]
    device: torch.device
    mesh: Mesh | None = None
    sequence: SequenceParallel | None = None

    @cached_property
    def data(self) -> Axes:
        """The axes whose ranks hold other samples."""
        return (
            ()
            if self.mesh is None
            else tuple(a for a, n in self.mesh.size.items() if n > 1 and a in DATA_AXES)
        )

    @property
    def rows(self) -> Axes:
        """The axes whose ranks hold other tokens."""
        return self.data + (() if self.sequence is None else self.sequence.axes)

    @cached_property
    def _starts(self) -> Tensor:
        """Where each run of a sample begins."""
        if self.sequence is None:
            return torch.zeros(1, dtype=torch.int64, device=self.device)
        (ranges,) = local_slices(
            (self.shape[1] * self.sequence.size,), self.sequence.layout(1, 0), self.sequence.mesh
        )
        return torch.tensor([start for start, _ in ranges], device=self.device)

    @cached_property
    def runs(self) -> Tensor:
        """For each token the number of its run; without cut sequences all are in one."""
        samples, length = self.shape
        if self.sequence is None:
            return torch.zeros(samples * length, dtype=torch.int64, device=self.device)
        parts = len(self._starts)
        part = torch.arange(length, device=self.device) // max(length // parts, 1)
        return (torch.arange(samples, device=self.device)[:, None] * parts + part).flatten()

    @property
    def number_of_runs(self) -> int:
        return 1 if self.sequence is None else self.shape[0] * len(self._starts)

    def before(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """For each run what all runs before it count together, and what all of them count.

        ``counts`` (runs, ...) are those of this rank.
        """
        earlier = torch.zeros_like(counts)
        total = counts.sum(0)
        if self.sequence is not None:
            earlier, total = self._before_in_samples(counts)
        if self.data:
            assert self.mesh is not None
            each = gather_over(total[None], self.mesh, self.data)
            own = self.mesh.ranks(*self.data).index(self.mesh.rank)
            earlier, total = earlier + each[:own].sum(0), each.sum(0)
        return earlier, total

    def _before_in_samples(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        assert self.sequence is not None
        samples, parts, rest = self.shape[0], len(self._starts), counts.shape[1:]
        own = counts.view(samples, parts, -1).transpose(0, 1).flatten(1)  # (parts, samples * ...)
        told = torch.cat([own, self._starts[:, None]], 1)
        every = gather_over(told, self.sequence.mesh, self.sequence.axes)
        starts, order = every[:, -1].sort()
        every = every[order, :-1].view(len(order), samples, -1).transpose(0, 1).flatten(0, 1)
        earlier = (every.cumsum(0) - every).view(samples, len(order), -1)
        places = torch.searchsorted(starts, self._starts)
        return earlier[:, places].reshape(samples * parts, *rest), every.sum(0).view(rest)

    @cached_property
    def index(self) -> Tensor:
        """For each token a number that tells its place in the serial order, however long sequences are padded
        to: 2**32 times its sample, plus its place there.
        """
        samples, length = self.shape
        here = torch.full((1, 1), samples, dtype=torch.int64, device=self.device)
        earlier = TokenOrder((samples, 1), self.device, self.mesh).before(here)[0] if self.data else 0 * here
        sample = earlier.view(()) + torch.arange(samples, device=self.device)
        run = length // len(self._starts)
        token = (self._starts[:, None] + torch.arange(run, device=self.device)).flatten()
        return (sample[:, None] * 2**32 + token).flatten()

    def gather(self, x: Tensor, fill: int) -> Tensor:
        """The rows (tokens, ...) of all ranks that hold other tokens, in no order; without a gradient.

        Ranks may hold different numbers: what is missing to the longest is ``fill``.
        """
        if not self.rows:
            return x
        assert self.mesh is not None
        longest = int(gather_over(torch.tensor([len(x)], device=x.device), self.mesh, self.rows).max())
        filled = x.new_full((longest, *x.shape[1:]), fill)
        filled[: len(x)] = x
        return gather_over(filled, self.mesh, self.rows)

    def total(self, x: Tensor) -> Tensor:
        """The sum over all ranks that hold other tokens, on each of them.

        Gradients are averaged over these ranks, so each hands back as many times its part of the gradient.
        """
        axes = self.rows
        if not axes:
            return x
        assert self.mesh is not None
        x = scaled_gradient(x, self.mesh.group_size(*axes))
        return redistribute(x, Layout(((),) * x.ndim, partial=frozenset(axes)), replicated(x.ndim), self.mesh)


def gather_over(x: Tensor, mesh: Mesh, axes: Axes) -> Tensor:
    """What the ranks of ``axes`` hold, joined along the first dim in their order, major axis first."""
    for axis in reversed(axes):
        x = collectives.all_gather(x, mesh, axis, 0)
    return x
