"""``LayoutConverter``: brings a tensor from one layout on a grid of devices to another."""

from __future__ import annotations

from typing import get_args

from torch import Tensor

from colossalai.tensor.comm_spec import CollectiveCommPattern, CommSpec, CostDict
from colossalai.tensor.conversion import Conversion, Search, convert, one_step_specs
from colossalai.tensor.d_tensor.layout import DeviceLayout
from colossalai.tensor.sharding_spec import ShardingSpecException

LayoutSteps = dict[DeviceLayout, CommSpec]


class LayoutConverter:
    """Finds the way between two layouts, and goes it.

    Args:
        search: ``shortest`` is the cheapest way by the costs of the grid, ``greedy`` the heuristic of the
            documents.
        forward_only: leave the backward pass out of costs.
    """

    def __init__(self, search: Search = "shortest", forward_only: bool = False) -> None:
        if search not in get_args(Search):
            raise ShardingSpecException(f"search={search!r} is unknown; choose 'shortest' or 'greedy'")
        self.search: Search = search
        self.forward_only = forward_only

    def all_gather_transform_layouts(self, source_layout: DeviceLayout) -> LayoutSteps:
        """Every layout that an all-gather leads to."""
        return self._steps(source_layout, CollectiveCommPattern.GATHER_FWD_SPLIT_BWD)

    def all_to_all_transform_layout(self, source_layout: DeviceLayout) -> LayoutSteps:
        """Every layout that an all-to-all leads to."""
        return self._steps(source_layout, CollectiveCommPattern.ALL2ALL_FWD_ALL2ALL_BWD)

    def shard_transform_layout(self, source_layout: DeviceLayout) -> LayoutSteps:
        """Every layout that a cut leads to."""
        return self._steps(source_layout, CollectiveCommPattern.SPLIT_FWD_GATHER_BWD)

    def get_all_one_step_transform_spec(self, source_layout: DeviceLayout) -> LayoutSteps:
        """Every layout that one collective leads to."""
        return self._steps(source_layout, *CollectiveCommPattern)

    def layout_converting(
        self, source_layout: DeviceLayout, target_layout: DeviceLayout
    ) -> tuple[list[DeviceLayout], list[CommSpec]]:
        """The layouts on the way, both ends included, and the collectives between them."""
        found = self._convert(source_layout, target_layout)
        return [source_layout.with_spec(spec) for spec in found.path], list(found.actions)

    def get_total_comm_cost(self, source_layout: DeviceLayout, target_layout: DeviceLayout) -> CostDict:
        """The seconds of both passes."""
        return self._convert(source_layout, target_layout).cost()

    def apply(self, tensor: Tensor, source_layout: DeviceLayout, target_layout: DeviceLayout) -> Tensor:
        """Bring this rank's piece from one layout to the other; differentiable."""
        return self._convert(source_layout, target_layout).apply(tensor)

    def _steps(self, source: DeviceLayout, *kinds: CollectiveCommPattern) -> LayoutSteps:
        steps = one_step_specs(source.sharding_spec, kinds, self.forward_only)
        return {source.with_spec(spec): action for spec, action in steps}

    def _convert(self, source: DeviceLayout, target: DeviceLayout) -> Conversion:
        if source.device_type != target.device_type:
            raise ShardingSpecException(f"{source} and {target} lie on different devices")
        return convert(source.sharding_spec, target.sharding_spec, self.search, self.forward_only)
