"""The cheapest routes between all pairs of layouts on two and three axes, executed for all ranks at once.

A tensor of all ranks is one array, whose first dims are the axes of the mesh.  A route is walked by the code
that walks it on a rank; only the collectives are those of this array.  That each collective by itself does
the same among processes is shown by ``test_every_single_step_is_executed``.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from colossalai.mesh import AxisLink, Layout, collectives, movement, one_steps, price_tensor, route, shard
from colossalai.mesh.mesh import mesh_coordinates
from tests.mesh.test_cheapest_route import layouts_of
from tests.mesh.test_movement import allowed

SIZES = {2: {"0": 2, "1": 3}, 3: {"0": 2, "1": 2, "2": 2}}
# prices so unlike that most routes differ from the fixed one
BETAS = {"0": 1e-9, "1": 1e-7, "2": 1e-8}


class AllRanks:
    """A mesh whose every collective acts on the array of all ranks."""

    def __init__(self, size: dict[str, int]) -> None:
        self.size = size
        self.axes = tuple(size)

    def pieces(self, full: Tensor, layout: Layout, summed: frozenset[str] = frozenset()) -> Tensor:
        """What the ranks hold of ``full``.  On a partial axis rank i holds i + 1 times the tensor, so what is
        ``summed`` over an axis of n ranks is n (n + 1) / 2 times the tensor.
        """
        whole = math.prod(n * (n + 1) // 2 for axis, n in self.size.items() if axis in summed)
        held = []
        for rank in range(math.prod(self.size.values())):
            coord = mesh_coordinates(self.size, rank)
            mesh: Any = SimpleNamespace(size=self.size, coord=coord, group_size=self.group_size)
            factor = whole * math.prod(coord[axis] + 1 for axis in layout.partial)
            held.append(shard(full, layout, mesh) * factor)
        return torch.stack(held).unflatten(0, tuple(self.size.values()))

    def group_size(self, *axes: str) -> int:
        return math.prod(self.size[axis] for axis in axes)

    def place(self, axis: str, dim: int) -> tuple[int, int]:
        return self.axes.index(axis), len(self.axes) + dim

    def all_gather(self, x: Tensor, mesh: Any, axis: str, dim: int, length: int | None = None) -> Tensor:
        here, there = self.place(axis, dim)
        joined = torch.cat(x.unbind(here), there - 1)
        return torch.stack([joined] * self.size[axis], here)

    def cut(self, x: Tensor, mesh: Any, axis: str, dim: int, *, uneven: bool = False) -> Tensor:
        here, there = self.place(axis, dim)
        parts = x.chunk(self.size[axis], there)
        return torch.stack([part.select(here, i) for i, part in enumerate(parts)], here)

    def all_to_all(
        self, x: Tensor, mesh: Any, axis: str, uncut: int, cut: int, length: int | None = None
    ) -> Tensor:
        return self.cut(self.all_gather(x, mesh, axis, uncut), mesh, axis, cut)

    def all_reduce(self, x: Tensor, mesh: Any, axis: str) -> Tensor:
        here = self.axes.index(axis)
        return x.sum(here, keepdim=True, dtype=x.dtype).expand(x.shape)

    def reduce_scatter(self, x: Tensor, mesh: Any, axis: str, dim: int, *, uneven: bool = False) -> Tensor:
        return self.cut(self.all_reduce(x, mesh, axis), mesh, axis, dim)


@pytest.fixture
def _played(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("all_gather", "cut", "all_to_all", "all_reduce", "reduce_scatter"):

        def act(x: Tensor, mesh: Any, *args: Any, name: str = name, **options: Any) -> Tensor:
            return getattr(mesh, name)(x, mesh, *args, **options)

        monkeypatch.setattr(collectives, name, act)


def grid(naxes: int, ndim: int) -> tuple[AllRanks, Tensor, Any]:
    ranks = AllRanks(SIZES[naxes])
    length = math.prod(ranks.size.values())  # all axes may cut one dim
    full = torch.arange(length**ndim, dtype=torch.int32).reshape((length,) * ndim)
    links = {axis: AxisLink(n, 1e-6, BETAS[axis]) for axis, n in ranks.size.items()}
    return ranks, full, price_tensor(links, tuple(full.shape), 4)


def spread(total: int, wanted: int) -> range:
    """Numbers below ``total`` with a step that is no multiple of a small one."""
    return range(0, total, max(1, total // wanted | 1))


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize("wanted", [300, pytest.param(10**9, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize(("naxes", "ndim"), list(itertools.product(SIZES, (2, 3, 4))))
def test_all_pairs_are_executed_bit_for_bit(naxes: int, ndim: int, sums: bool, wanted: int) -> None:
    ranks, full, prices = grid(naxes, ndim)
    mesh: Any = ranks
    layouts = layouts_of(ranks.axes, ndim, sums)
    held: dict[Any, Tensor] = {}

    def pieces(layout: Layout, summed: frozenset[str]) -> Tensor:
        if (layout, summed) not in held:
            held[layout, summed] = ranks.pieces(full, layout, summed)
        return held[layout, summed]

    other = count = 0
    for number in spread(len(layouts) ** 2, wanted):
        src, dst = layouts[number // len(layouts)], layouts[number % len(layouts)]
        if sums and (not src.partial or not allowed(src, dst)):
            continue  # without sums they are among the others
        steps = route(src, dst, prices)
        x = pieces(src, frozenset())
        for step in steps:
            x = movement._apply(x, step, mesh, None)
        assert torch.equal(x, pieces(dst, src.partial - dst.partial)), f"{src} to {dst}: {steps}"
        other += steps != route(src, dst)
        count += 1
    assert other > 0
    assert count >= min(wanted, len(layouts)) // (8 if sums else 1)


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize(("naxes", "ndim"), list(itertools.product(SIZES, (2, 3))))
def test_each_step_is_what_it_is_among_processes(naxes: int, ndim: int) -> None:
    """All edges of the graph; the same statement as for processes in ``test_cheapest_route``."""
    ranks, full, _ = grid(naxes, ndim)
    mesh: Any = ranks
    for before in layouts_of(ranks.axes, ndim, sums=True)[:: 1 if naxes == 2 else 5]:
        x = ranks.pieces(full, before)
        for step, after in one_steps(before, ranks.axes):
            want = ranks.pieces(full, after, before.partial - after.partial)
            assert torch.equal(movement._apply(x, step, mesh, None), want), f"{before}: {step}"


@pytest.mark.usefixtures("_played")
def test_a_wrong_step_is_seen() -> None:
    ranks, full, prices = grid(2, 2)
    mesh: Any = ranks
    src, dst = Layout((("0", "1"), ())), Layout((("1",), ("0",)))
    x = ranks.pieces(full, src)
    for step in route(src, dst, prices)[:-1]:
        x = movement._apply(x, step, mesh, None)
    assert not torch.equal(x, ranks.pieces(full, dst))
