"""``ShapeConsistencyManager``: brings a tensor to the sharding spec that the next operation wants."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from colossalai.tensor.comm_spec import CollectiveCommPattern, CommSpec, CostDict
from colossalai.tensor.conversion import (
    Conversion,
    Search,
    SpecStep,
    convert,
    mix_gather_specs,
    one_step_specs,
)
from colossalai.tensor.sharding_spec import ShardingSpec, ShardingSpecException

StepDict = dict[ShardingSpec, tuple[CommSpec, CostDict]]
_ITEMSIZE = 4  # as costs, bytes are those of a tensor in fp32


@dataclass(frozen=True)
class ShapeConsistencyOptions:
    """How the manager searches: ``shortest`` is the cheapest way, ``greedy`` the documented heuristic."""

    search: Search = "shortest"

    def __post_init__(self) -> None:
        if self.search not in ("shortest", "greedy"):
            raise ValueError(f"search={self.search!r} is unknown; choose 'shortest' or 'greedy'")


class ShapeConsistencyManager:
    """The one manager of this process (``ShapeConsistencyManager() is ShapeConsistencyManager()``)."""

    _instance: ShapeConsistencyManager | None = None
    options: ShapeConsistencyOptions
    forward_only: bool
    """Whether costs leave the backward pass out."""
    cached_spec_pairs_transform_path: dict[tuple[Any, ...], Conversion]
    """The ways that were found, by source, target, search and ``forward_only``."""

    def __new__(cls) -> ShapeConsistencyManager:
        if cls._instance is None:
            made = cls._instance = super().__new__(cls)
            made.options, made.forward_only = ShapeConsistencyOptions(), False
            made.cached_spec_pairs_transform_path = {}
        return cls._instance

    def get_all_all_gather_spec(self, source_spec: ShardingSpec, orig_cost_dict: CostDict) -> StepDict:
        """Every spec that an all-gather leads to, with the collective and all costs up to there."""
        kinds = [CollectiveCommPattern.GATHER_FWD_SPLIT_BWD]
        return _with_costs(one_step_specs(source_spec, kinds, self.forward_only), orig_cost_dict)

    def get_all_all_to_all_spec(self, source_spec: ShardingSpec, orig_cost_dict: CostDict) -> StepDict:
        """The same of an all-to-all."""
        kinds = [CollectiveCommPattern.ALL2ALL_FWD_ALL2ALL_BWD]
        return _with_costs(one_step_specs(source_spec, kinds, self.forward_only), orig_cost_dict)

    def get_all_shard_spec(self, source_spec: ShardingSpec, orig_cost_dict: CostDict) -> StepDict:
        """The same of a cut of what is whole."""
        kinds = [CollectiveCommPattern.SPLIT_FWD_GATHER_BWD]
        return _with_costs(one_step_specs(source_spec, kinds, self.forward_only), orig_cost_dict)

    def get_all_mix_gather_spec(self, source_spec: ShardingSpec, orig_cost_dict: CostDict) -> StepDict:
        """The same of a gather over all axes that cut a dim."""
        return _with_costs(mix_gather_specs(source_spec, self.forward_only), orig_cost_dict)

    def get_all_one_step_transform_spec(
        self, source_spec: ShardingSpec, orig_cost_dict: CostDict
    ) -> StepDict:
        """Every spec that one collective leads to, also one that completes a partial sum."""
        return _with_costs(
            one_step_specs(source_spec, [*CollectiveCommPattern], self.forward_only), orig_cost_dict
        )

    def shape_consistency(
        self, source_spec: ShardingSpec, target_spec: ShardingSpec
    ) -> tuple[list[ShardingSpec], list[CommSpec], CostDict]:
        """The specs on the way, both ends included, the collectives between them, and their cost."""
        found = self._convert(source_spec, target_spec)
        return list(found.path), list(found.actions), found.cost()

    def mem_cost(self, comm_action_sequence: Iterable[CommSpec]) -> CostDict:
        """The most bytes that a step of the way needs on a rank, for its input and its output, in fp32."""
        most = 0
        for action in comm_action_sequence:
            ends = action.sharding_spec, action.get_sharding_spec_after()
            most = max(most, sum(math.prod(spec.get_sharded_shape_per_device()) for spec in ends) * _ITEMSIZE)
        backward = 0 if self.forward_only else most
        return {"forward": most, "backward": backward, "total": max(most, backward)}

    def apply(self, tensor_with_sharding_spec: Tensor, target_spec: ShardingSpec) -> Tensor:
        """Bring a tensor from the spec in its attribute ``sharding_spec`` to ``target_spec``, which the
        result has there; differentiable.
        """
        source = getattr(tensor_with_sharding_spec, "sharding_spec", None)
        if not isinstance(source, ShardingSpec):
            raise ShardingSpecException(
                "the tensor has no attribute sharding_spec: set it, or use apply_for_autoparallel_runtime"
            )
        moved = self.apply_for_autoparallel_runtime(tensor_with_sharding_spec, source, target_spec)
        if moved is tensor_with_sharding_spec:
            moved = moved.view_as(moved)  # the spec of the input stays its own
        moved.sharding_spec = target_spec  # type: ignore[attr-defined]
        return moved

    def apply_for_autoparallel_runtime(
        self, tensor: Tensor, source_spec: ShardingSpec, target_spec: ShardingSpec
    ) -> Tensor:
        """Bring this rank's piece from one spec to the other; differentiable."""
        return self._convert(source_spec, target_spec).apply(tensor)

    def _convert(self, source: ShardingSpec, target: ShardingSpec) -> Conversion:
        key = source, target, self.options.search, self.forward_only
        if key not in self.cached_spec_pairs_transform_path:
            self.cached_spec_pairs_transform_path[key] = convert(*key)
        return self.cached_spec_pairs_transform_path[key]


def _with_costs(steps: list[SpecStep], before: CostDict) -> StepDict:
    """The steps with their costs, added to those of the way so far."""
    found: StepDict = {}
    for spec, action in steps:
        cost = action.get_comm_cost()
        found[spec] = action, {key: before.get(key, 0.0) + cost[key] for key in cost}
    return found


def set_shape_consistency_options(options: ShapeConsistencyOptions) -> None:
    """Set the options of the manager of this process."""
    if not isinstance(options, ShapeConsistencyOptions):
        raise TypeError(f"options must be ShapeConsistencyOptions, got {type(options).__name__}")
    ShapeConsistencyManager().options = options


def to_global(distributed_tensor: Tensor, sharding_spec: ShardingSpec) -> Tensor:
    """The whole tensor on every rank, from this rank's piece; differentiable."""
    mesh, shape = sharding_spec.on_mesh()
    return convert(sharding_spec, ShardingSpec(mesh, shape)).apply(distributed_tensor)
