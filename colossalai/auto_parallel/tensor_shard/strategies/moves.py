"""What it costs to bring tensors from one layout to another, in both passes; asked many times, found once."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import inf

import numpy as np

from colossalai.auto_parallel.tensor_shard.solver.strategy_graph import Floats
from colossalai.mesh import Layout, Links, Prices, price_tensor, route, route_seconds, route_transfers
from colossalai.mesh.cheapest import cheapest_seconds
from colossalai.mesh.collectives import Transfer
from colossalai.tensor.letters.table import Shape

Layouts = tuple[Layout, ...]


class MoveCosts:
    """Seconds and transfers of moves on axes with these links; a forward-only plan has no backward moves."""

    def __init__(self, links: Links, forward_only: bool = False) -> None:
        self.links, self.forward_only = links, forward_only
        self._tables: dict[object, Floats] = {}

    def table(self, shape: Shape, itemsize: int, sources: Layouts, targets: Layouts, learns: bool) -> Floats:
        """Seconds from each of ``sources`` (rows) to each of ``targets`` (columns); inf where none leads.

        ``learns`` says whether the gradient goes back.
        """
        learns = learns and not self.forward_only
        key = shape, itemsize, sources, targets, learns
        if key not in self._tables:
            prices = price_tensor(self.links, shape, itemsize)
            rows, columns = tuple(dict.fromkeys(sources)), tuple(dict.fromkeys(targets))
            few = np.array([[_seconds(s, t, prices, learns) for t in columns] for s in rows])
            row, column = ({x: i for i, x in enumerate(side)} for side in (rows, columns))
            self._tables[key] = few[np.ix_([row[s] for s in sources], [column[t] for t in targets])]
        return self._tables[key]

    def seconds(self, shape: Shape, itemsize: int, source: Layout, target: Layout, learns: bool) -> float:
        """Of one move and its gradient's."""
        return _seconds(
            source, target, price_tensor(self.links, shape, itemsize), learns and not self.forward_only
        )

    def transfers(
        self, shape: Shape, itemsize: int, source: Layout, target: Layout, learns: bool
    ) -> tuple[list[Transfer], list[Transfer]]:
        """What ``count_communication`` will note for it: in the forward pass, and in the backward pass."""
        prices = price_tensor(self.links, shape, itemsize)
        forward = route_transfers(source, route(source, target, prices), prices)
        if not learns or self.forward_only:
            return forward, []
        begin, end = target.dual(), source.dual()
        return forward, route_transfers(begin, route(begin, end, prices), prices)


@lru_cache(maxsize=1 << 18)
def _seconds(source: Layout, target: Layout, prices: Prices, learns: bool) -> float:
    if source == target:
        return 0.0
    if source.spread - target.spread:
        return inf  # what ranks use differently cannot be used alike again
    forward = _one_way(replace(source, spread=frozenset()), target, prices)
    return forward + (_one_way(target.dual(), source.dual(), prices) if learns else 0.0)


def _one_way(source: Layout, target: Layout, prices: Prices) -> float:
    if source.fused != target.fused:
        return route_seconds(source, route(source, target, prices), prices)
    return cheapest_seconds(source, target, prices)
