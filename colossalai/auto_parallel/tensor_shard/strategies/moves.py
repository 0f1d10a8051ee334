"""What it costs to bring tensors from one layout to another, in both passes; asked many times, found once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import inf, prod

import numpy as np

from colossalai.auto_parallel.tensor_shard.gradient_sums import BUCKET_BYTES, sum_axes, sum_transfers
from colossalai.auto_parallel.tensor_shard.solver.strategy_graph import Floats
from colossalai.mesh import Layout, Links, Prices, price_tensor, route, route_seconds, route_transfers
from colossalai.mesh.collectives import Transfer
from colossalai.mesh.routes.cheapest import cheapest_seconds
from colossalai.tensor.letters.table import Shape

Layouts = tuple[Layout, ...]


class MoveCosts:
    """Seconds and transfers of moves on axes with these links; a forward-only plan has no backward moves."""

    def __init__(self, links: Links, forward_only: bool = False) -> None:
        self.links, self.forward_only = links, forward_only
        self._tables: dict[object, Floats] = {}

    def table(
        self,
        shape: Shape,
        itemsize: int,
        sources: Layouts,
        targets: Layouts,
        learns: bool,
        parameter: bool = False,
        twice: bool = False,
    ) -> Floats:
        """Seconds from each of ``sources`` (rows) to each of ``targets`` (columns); inf where none leads.

        Args:
            learns: whether the gradient goes back.
            parameter: whether it is a parameter, whose gradient may wait for others.
            twice: whether the backward pass needs the moved tensor, which is not kept, but moved once more.
        """
        learns, twice = learns and not self.forward_only, twice and not self.forward_only
        key = shape, itemsize, sources, targets, learns, parameter, twice
        if key not in self._tables:
            prices = price_tensor(self.links, shape, itemsize)
            rows, columns = tuple(dict.fromkeys(sources)), tuple(dict.fromkeys(targets))
            few = np.array([[_seconds(s, t, prices, learns) for t in columns] for s in rows])
            if parameter and learns:
                for (i, s), (j, t) in product(enumerate(rows), enumerate(columns)):
                    if sum_axes(s, t) is not None:
                        few[i, j] = self.time(self._gradient(s, t, prices))
            if twice:
                few += np.array([[_seconds(s, t, prices, False) for t in columns] for s in rows])
            row, column = ({x: i for i, x in enumerate(side)} for side in (rows, columns))
            self._tables[key] = few[np.ix_([row[s] for s in sources], [column[t] for t in targets])]
        return self._tables[key]

    def time(self, transfers: Iterable[Transfer]) -> float:
        """Seconds of collectives, one after the other; gradients share the latency of their bucket."""
        seconds = 0.0
        for t in transfers:
            link = self.links[t.axis]
            seconds += link.seconds(t.kind, t.bytes)
            if t.in_bucket and link.ranks > 1:
                seconds -= link.alpha * (1 - min(1.0, t.bytes / BUCKET_BYTES))
        return seconds

    def transfers(
        self,
        shape: Shape,
        itemsize: int,
        source: Layout,
        target: Layout,
        learns: bool,
        parameter: bool = False,
        twice: bool = False,
    ) -> tuple[list[Transfer], list[Transfer]]:
        """What ``count_communication`` will note for it: in the forward pass, and in the backward pass."""
        prices = price_tensor(self.links, shape, itemsize)
        forward = route_transfers(source, route(source, target, prices), prices)
        if self.forward_only:
            return forward, []
        again = forward if twice else []
        if not learns:
            return forward, [*again]
        if parameter and sum_axes(source, target) is not None:
            return forward, [*again, *self._gradient(source, target, prices)]
        begin, end = target.dual(), source.dual()
        return forward, [*again, *route_transfers(begin, route(begin, end, prices), prices)]

    def _gradient(self, rest: Layout, used: Layout, prices: Prices) -> list[Transfer]:
        """Of the gradient of a parameter that ranks use for other elements: it travels in a bucket."""
        axes = sum_axes(rest, used)
        assert axes is not None
        return sum_transfers(prod(prices.local_shape(used)), prices.itemsize, axes, self.links)


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
