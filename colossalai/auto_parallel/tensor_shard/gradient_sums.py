"""How gradients are summed over several axes: as pieces over the slowest one.

A gradient of which every rank has a part is reduce-scattered over the faster axes, the pieces are summed over
the slowest axis, and gathered again.  So over a network between nodes travels what one device of a node
holds, where a sum of the whole over each axis would send all of it.  Gradients travel in buckets; each is
padded, so that what is sent does not depend on which gradients share a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from colossalai._numeric import round_up
from colossalai.mesh import Layout, Links, route
from colossalai.mesh.collectives import Kind, Transfer
from colossalai.mesh.mesh import Axes

BUCKET_BYTES = 25 * 2**20
"""With so many a bucket is full, and its sum begins."""


def sum_axes(rest: Layout, used: Layout) -> Axes | None:
    """The axes over which a parameter's gradient is summed, if nothing else is done to it on either way; None
    if it also moves.
    """
    if rest.dims != used.dims or rest.fused != used.fused or rest.partial or used.partial or rest.spread:
        return None
    steps = route(used.dual(), rest.dual())
    if not steps or any(step.do != "all_reduce" for step in steps):
        return None
    return tuple(step.axis for step in steps)


def slowest_last(axes: Iterable[str], links: Links) -> Axes:
    """The axes in the order in which gradients are summed over them."""
    return tuple(sorted(axes, key=lambda axis: (links[axis].beta, axis)))


def padded_length(numel: int, axes: Axes, links: Links) -> int:
    """The elements that a gradient takes in its bucket: a multiple of the ranks that share it as pieces."""
    parts = 1
    for axis in slowest_last(axes, links)[:-1]:
        parts *= links[axis].ranks
    return round_up(numel, parts)


def sum_transfers(numel: int, itemsize: int, axes: Axes, links: Links) -> list[Transfer]:
    """What the sum of one gradient sends, as ``count_communication`` notes it."""
    ordered = slowest_last((axis for axis in axes if links[axis].ranks > 1), links)
    if not ordered:
        return []
    nbytes = padded_length(numel, ordered, links) * itemsize

    def transfer(kind: Kind, axis: str) -> Transfer:
        return Transfer(kind, axis, links[axis].ranks, nbytes, in_bucket=True)

    scattered: list[Transfer] = []
    for axis in ordered[:-1]:
        scattered.append(transfer("reduce_scatter", axis))
        nbytes //= links[axis].ranks
    total = transfer("all_reduce", ordered[-1])
    gathered = [replace(t, kind="all_gather") for t in reversed(scattered)]
    return [*scattered, total, *gathered]
