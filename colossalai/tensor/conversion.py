"""From one sharding spec to another: the cheapest way, and the greedy heuristic.

``ShapeConsistencyManager`` and ``LayoutConverter`` are its two fronts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from torch import Tensor

from colossalai.mesh import one_steps, redistribute, route
from colossalai.tensor.comm_spec import CollectiveCommPattern, CommSpec, CostDict, cost_of_passes, spec_prices
from colossalai.tensor.sharding_spec import ShardingSpec, ShardingSpecException

Search = Literal["shortest", "greedy"]
SpecStep = tuple[ShardingSpec, CommSpec]


@dataclass(frozen=True)
class Conversion:
    """The way from one spec to another."""

    path: tuple[ShardingSpec, ...]
    """From the source to the target, both included."""
    actions: tuple[CommSpec, ...]
    """The collectives between them."""
    search: Search
    forward_only: bool = False

    def cost(self) -> CostDict:
        """The seconds of both passes."""
        if self.search == "shortest":  # then the gradient, too, goes the cheapest way
            ends = self.path[0].layout, self.path[-1].layout
            return cost_of_passes(*ends, spec_prices(self.path[0]), self.forward_only, cheapest=True)
        costs = [action.get_comm_cost() for action in self.actions]
        return {key: sum(cost[key] for cost in costs) for key in ("forward", "backward", "total")}

    def apply(self, tensor: Tensor) -> Tensor:
        """Move this rank's piece of a tensor from the source to the target, with its gradient."""
        source, target = self.path[0], self.path[-1]
        if tuple(tensor.shape) != source.get_sharded_shape_per_device():
            raise ShardingSpecException(
                f"a piece of shape {tuple(tensor.shape)} does not lie as {source}: pieces of a tensor of"
                f" shape {source.entire_shape} have the shape {source.get_sharded_shape_per_device()} there"
            )
        if self.search == "shortest":
            mesh, _ = source.on_mesh()
            return redistribute(tensor, source.layout, target.layout, mesh.mesh, None, mesh.links)
        for action in self.actions:
            tensor = action.covert_spec_to_action(tensor)
        return tensor


def one_step_specs(
    source: ShardingSpec, kinds: Collection[CollectiveCommPattern], forward_only: bool = False
) -> list[SpecStep]:
    """Every spec that one collective of ``kinds`` leads to."""
    prices = spec_prices(source)
    found = []
    for step, layout in one_steps(source.layout, list(prices.link), prices.divides):
        action = CommSpec.of_step(step, source, forward_only)
        if action.comm_pattern in kinds:
            found.append((source.with_layout(layout), action))
    return found


def mix_gather_specs(source: ShardingSpec, forward_only: bool = False) -> list[SpecStep]:
    """Every spec in which a dim that two or more axes cut is whole; the axes are gathered one after the
    other, the innermost first.
    """
    actions = [
        CommSpec(
            CollectiveCommPattern.MIXGATHER_FWD_SPLIT_BWD,
            source,
            gather_dim=dim,
            logical_process_axis=axes,
            forward_only=forward_only,
            mix_gather=True,
        )
        for dim, axes in source.dim_partition_dict.items()
        if len(axes) > 1
    ]
    return [(action.get_sharding_spec_after(), action) for action in actions]


@lru_cache(maxsize=4096)
def convert(
    source: ShardingSpec, target: ShardingSpec, search: Search = "shortest", forward_only: bool = False
) -> Conversion:
    """The way from ``source`` to ``target``: by default the cheapest; ``greedy`` is the heuristic of the
    documents, which always takes the step that brings the spec closest to the target.
    """
    if source.on_mesh()[0] is not target.on_mesh()[0] or source.entire_shape != target.entire_shape:
        raise ShardingSpecException(
            f"{source} of a tensor of shape {source.entire_shape} and {target} of shape {target.entire_shape}"
            " must describe the same tensor on the same grid"
        )
    if search == "greedy":
        steps = _greedy(source, target, forward_only)
    elif search == "shortest":
        steps = _shortest(source, target, forward_only)
    else:
        raise ShardingSpecException(f"search={search!r} is unknown; choose 'shortest' or 'greedy'")
    path = (source, *(spec for spec, _ in steps))
    return Conversion(path, tuple(action for _, action in steps), search, forward_only)


def _shortest(source: ShardingSpec, target: ShardingSpec, forward_only: bool) -> list[SpecStep]:
    found: list[SpecStep] = []
    spec = source
    for step in route(source.layout, target.layout, spec_prices(source)):
        action = CommSpec.of_step(step, spec, forward_only)
        spec = action.get_sharding_spec_after()
        found.append((spec, action))
    return found


def _greedy(source: ShardingSpec, target: ShardingSpec, forward_only: bool) -> list[SpecStep]:
    route(source.layout, target.layout)  # refuses ends between which no way leads
    spec, found, seen = source, list[SpecStep](), {source}
    while spec != target:
        steps = one_step_specs(spec, [*CollectiveCommPattern], forward_only)
        steps = [step for step in steps if step[0] not in seen and {*target.partial} <= {*step[0].partial}]
        if not steps:
            raise ShardingSpecException(
                f"the greedy search from {source} to {target} has come to {spec} and finds no way on; use"
                " search='shortest'"
            )
        # a sum that is not complete is the furthest from the target
        spec, action = min(
            steps, key=lambda step: (len(step[0].partial), step[0].sharding_sequence_difference(target))
        )
        seen.add(spec)
        found.append((spec, action))
    return found
