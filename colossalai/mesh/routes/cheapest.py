"""The cheapest route between two layouts: Dijkstra's algorithm over all layouts that one step leads to.

Values are the same on all ranks of an axis in state I or R, so on the way such an axis may cut the tensor and
be gathered again: over a slow axis then only a part of the bytes travels.  A cut is free, and of routes that
cost the same the one with fewer steps is taken.
"""

from __future__ import annotations

import heapq
import threading
from dataclasses import dataclass, replace
from functools import lru_cache

from colossalai.mesh.layout import Layout
from colossalai.mesh.mesh import Axes
from colossalai.mesh.routes.cost import Prices
from colossalai.mesh.routes.steps import RouteStep, one_steps

Cuts = frozenset[tuple[int, Axes]]
Dealt = frozenset[tuple[int, str]]


def cheapest_steps(src: Layout, dst: Layout, prices: Prices) -> tuple[RouteStep, ...]:
    """The cheapest steps from ``src`` to ``dst``, between which a move must be allowed."""
    begin, end = _end(src, prices), _end(dst, prices)
    search = _search(begin.layout, begin.axes | end.axes, begin.uneven | end.uneven, end.dealt, prices)
    return search.steps_to(end.layout)


def cheapest_seconds(src: Layout, dst: Layout, prices: Prices) -> float:
    """How long the cheapest route takes, without making its steps: for tables over many layouts."""
    begin, end = _end(src, prices), _end(dst, prices)
    search = _search(begin.layout, begin.axes | end.axes, begin.uneven | end.uneven, end.dealt, prices)
    return search.seconds_to(end.layout)


@dataclass(frozen=True)
class _End:
    """What a search must know of one end of a route."""

    layout: Layout  # without state R: its values are those of state I
    axes: frozenset[str]
    uneven: Cuts
    dealt: Dealt


@lru_cache(maxsize=1024)
def _end(layout: Layout, prices: Prices) -> _End:
    _check_prices(layout, prices)
    linked = (axis for axis, link in prices.links if link.ranks > 1)
    return _End(
        layout=replace(layout, spread=frozenset()),
        axes=frozenset({*linked, *layout.sharded, *layout.partial}),
        uneven=frozenset(
            (dim, axes[: n + 1])
            for dim, axes in enumerate(layout.dims)
            if not prices.divides(layout, dim)
            for n in range(len(axes))
        ),
        dealt=frozenset(
            (dim, axes[0]) for dim, axes in enumerate(layout.dims) if {*axes[:1]} & layout.zigzag
        ),
    )


def _check_prices(layout: Layout, prices: Prices) -> None:
    if len(prices.shape) != len(layout.dims):
        raise ValueError(
            f"the prices are those of a tensor of shape {prices.shape}, the layout {layout} describes"
            f" {len(layout.dims)} dims"
        )
    for axis in sorted({*layout.sharded, *layout.partial}):
        if axis not in prices.link:
            raise ValueError(
                f"there is no price for axis {axis!r} of the layout {layout}; there are prices for"
                f" {', '.join(prices.link) or 'no axis'}"
            )


class _Graph:
    """Layouts as numbers, with the steps between them; it grows as it is walked."""

    def __init__(self, axes: frozenset[str], uneven: Cuts, dealt: Dealt, prices: Prices) -> None:
        self._axes, self._uneven, self._dealt, self._prices = sorted(axes), uneven, dealt, prices
        self.lock = threading.Lock()  # the backward pass looks routes up in a thread of its own
        self._number: dict[Layout, int] = {}
        self._layouts: list[Layout] = []
        self._edges: list[list[tuple[int, float, RouteStep]] | None] = []

    def number(self, layout: Layout) -> int:
        found = self._number.setdefault(layout, len(self._layouts))
        if found == len(self._layouts):
            self._layouts.append(layout)
            self._edges.append(None)
        return found

    def edges(self, number: int) -> list[tuple[int, float, RouteStep]]:
        edges = self._edges[number]
        if edges is None:
            layout = self._layouts[number]
            steps = one_steps(layout, self._axes, self._fits, self._dealt)
            edges = [(self.number(to), self._prices.seconds(step, layout), step) for step, to in steps]
            self._edges[number] = edges
        return edges

    def _fits(self, layout: Layout, dim: int) -> bool:
        # uneven pieces only where the ends have them: no caller has asked for others
        return self._prices.divides(layout, dim) or (dim, layout.dims[dim]) in self._uneven


class _Search:
    """The shortest paths from one layout, which are followed only as far as was asked for."""

    def __init__(self, src: Layout, graph: _Graph) -> None:
        self._graph = graph
        start = graph.number(src)
        self._best: dict[int, tuple[float, int]] = {start: (0.0, 0)}
        self._came: dict[int, tuple[int, RouteStep]] = {}
        self._heap: list[tuple[float, int, int]] = [(0.0, 0, start)]
        self._settled: set[int] = set()

    def steps_to(self, dst: Layout) -> tuple[RouteStep, ...]:
        with self._graph.lock:
            place = self._reach(dst)
            steps = []
            while place in self._came:
                place, step = self._came[place]
                steps.append(step)
            return tuple(reversed(steps))

    def seconds_to(self, dst: Layout) -> float:
        with self._graph.lock:
            return self._best[self._reach(dst)][0]

    def _reach(self, dst: Layout) -> int:
        place = self._graph.number(dst)
        while place not in self._settled:
            self._settle_next()
        return place

    def _settle_next(self) -> None:
        cost, count, here = heapq.heappop(self._heap)
        if here in self._settled:
            return
        self._settled.add(here)
        for there, price, step in self._graph.edges(here):
            reached = cost + price, count + 1
            if there not in self._best or reached < self._best[there]:
                self._best[there] = reached
                self._came[there] = here, step
                heapq.heappush(self._heap, (*reached, there))


_graph = lru_cache(maxsize=64)(_Graph)


@lru_cache(maxsize=1024)
def _search(src: Layout, axes: frozenset[str], uneven: Cuts, dealt: Dealt, prices: Prices) -> _Search:
    return _Search(src, _graph(axes, uneven, dealt, prices))
