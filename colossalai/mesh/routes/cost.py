"""Prices of communication: what each collective of a route moves, and how long it takes.

The model is the usual one: a collective among p ranks takes ``alpha`` seconds, and ``beta`` seconds for each
byte that a rank sends with the ring algorithm, which :class:`colossalai.mesh.collectives.Transfer` counts.
``alpha`` and ``beta`` belong to a mesh axis; :mod:`colossalai.device` measures them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from colossalai._numeric import ceil_div, round_up
from colossalai.mesh.collectives import Kind, Transfer
from colossalai.mesh.layout import Layout
from colossalai.mesh.routes.steps import RouteStep, layout_after


@dataclass(frozen=True)
class AxisLink:
    """The connection of the ranks of one mesh axis."""

    ranks: int
    alpha: float
    """Seconds that a collective takes however little it carries."""
    beta: float
    """Seconds for each byte that a rank sends."""
    exchange_beta: float | None = None
    """The same of an all-to-all, where it differs: its messages do not go round a ring."""

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"a link joins at least 1 rank, got ranks={self.ranks}")
        for name in ("alpha", "beta", "exchange_beta"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} must be a number of seconds, at least 0 and finite")

    def seconds(self, kind: Kind, nbytes: int) -> float:
        """How long a collective takes whose whole tensor (see ``Transfer.bytes``) has ``nbytes``."""
        if self.ranks == 1:
            return 0.0
        exchanged = kind == "all_to_all" and self.exchange_beta is not None
        beta = self.exchange_beta if exchanged else self.beta
        assert beta is not None
        return self.alpha + beta * Transfer(kind, "", self.ranks, nbytes).sent


Links = Mapping[str, AxisLink]


@dataclass(frozen=True)
class Prices:
    """What moves of one tensor cost on a mesh; made by :func:`price_tensor`."""

    links: tuple[tuple[str, AxisLink], ...]
    shape: tuple[int, ...]
    """Of the whole tensor."""
    itemsize: int

    @cached_property
    def link(self) -> dict[str, AxisLink]:
        return dict(self.links)

    @cached_property
    def _hash(self) -> int:
        return hash((self.links, self.shape, self.itemsize))

    def __hash__(self) -> int:
        return self._hash

    def divides(self, layout: Layout, dim: int) -> bool:
        """Whether all pieces of a dim are equally long."""
        parts = math.prod(self.link[axis].ranks for axis in layout.dims[dim])
        return self.shape[dim] % (layout.blocks(dim) * parts) == 0

    def local_shape(self, layout: Layout) -> tuple[int, ...]:
        """The shape of the largest piece, which the first rank holds."""
        return tuple(self._local(layout, dim) for dim in range(len(self.shape)))

    def _local(self, layout: Layout, dim: int) -> int:
        blocks = layout.blocks(dim)
        length = self.shape[dim] // blocks
        for axis in layout.dims[dim]:
            length = ceil_div(length, self.link[axis].ranks)
        return length * blocks

    def transfer(self, step: RouteStep, layout: Layout) -> Transfer | None:
        """What ``count_communication`` will note for ``step`` on the first rank; None if nothing is sent."""
        ranks = self.link[step.axis].ranks
        if step.do == "cut" or ranks == 1:
            return None
        local = list(self.local_shape(layout))
        if step.do == "all_gather":
            local[step.dim] *= ranks
        elif step.do in ("reduce_scatter", "all_to_all"):  # pieces travel padded to the longest
            taken, blocks = (
                (step.to_dim, step.to_blocks) if step.do == "all_to_all" else (step.dim, step.blocks)
            )
            local[taken] = blocks * round_up(local[taken] // blocks, ranks)
        return Transfer(step.do, step.axis, ranks, math.prod(local) * self.itemsize)

    def seconds(self, step: RouteStep, layout: Layout) -> float:
        """How long ``step`` takes from ``layout``."""
        transfer = self.transfer(step, layout)
        return 0.0 if transfer is None else self.link[step.axis].seconds(transfer.kind, transfer.bytes)


def price_tensor(links: Links, shape: Iterable[int], itemsize: int) -> Prices:
    """The prices of a tensor of ``shape`` with ``itemsize`` bytes per element, on axes with these links."""
    return Prices(tuple(sorted(links.items())), tuple(shape), itemsize)


def route_transfers(src: Layout, steps: Iterable[RouteStep], prices: Prices) -> list[Transfer]:
    """What ``count_communication`` will note for a route on the first rank."""
    return [t for step, layout in _along(src, steps) if (t := prices.transfer(step, layout)) is not None]


def route_seconds(src: Layout, steps: Iterable[RouteStep], prices: Prices) -> float:
    """How long a route takes."""
    return sum(prices.seconds(step, layout) for step, layout in _along(src, steps))


def _along(layout: Layout, steps: Iterable[RouteStep]) -> Iterable[tuple[RouteStep, Layout]]:
    for step in steps:
        yield step, layout
        dim = step.to_dim if step.do == "all_to_all" else step.dim
        dealt = step.to_zigzag if step.do == "all_to_all" else step.zigzag
        layout = layout_after(layout, step, {(dim, step.axis)} if dealt else ())
