"""``CommSpec``: one collective between two sharding specs, with its cost, its action and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from torch import Tensor

from colossalai.mesh import Layout, Prices, RouteStep, price_tensor, redistribute, route, route_seconds
from colossalai.tensor.sharding_spec import ShardingSpec, ShardingSpecException

# Specs know no dtype: costs are those of a tensor in fp32.
_ITEMSIZE = 4

CostDict = dict[str, float]
"""The seconds of ``forward`` and ``backward``, and of both as ``total``."""


class CollectiveCommPattern(Enum):
    """What happens in the forward and in the backward pass."""

    GATHER_FWD_SPLIT_BWD = "gather_fwd_split_bwd"
    ALL2ALL_FWD_ALL2ALL_BWD = "all2all_fwd_all2all_bwd"
    SPLIT_FWD_GATHER_BWD = "split_fwd_gather_bwd"
    ALLREDUCE_FWD_IDENTITY_BWD = "all_reduce_fwd_identity_bwd"
    IDENTITY_FWD_ALLREDUCE_BWD = "identity_fwd_all_reduce_bwd"
    MIXGATHER_FWD_SPLIT_BWD = "mixgather_fwd_split_bwd"
    REDUCESCATTER_FWD_GATHER_BWD = "reduce_scatter_fwd_gather_bwd"


_OF_STEP = {
    "all_gather": CollectiveCommPattern.GATHER_FWD_SPLIT_BWD,
    "all_to_all": CollectiveCommPattern.ALL2ALL_FWD_ALL2ALL_BWD,
    "cut": CollectiveCommPattern.SPLIT_FWD_GATHER_BWD,
    "all_reduce": CollectiveCommPattern.ALLREDUCE_FWD_IDENTITY_BWD,
    "reduce_scatter": CollectiveCommPattern.REDUCESCATTER_FWD_GATHER_BWD,
}


class CommSpec:
    """One collective that starts from ``sharding_spec``.

    Args:
        comm_pattern: what happens.
        sharding_spec: how the tensor lies before; it has a grid of devices.
        gather_dim: the dim whose innermost cut ends (a gather, an all-to-all).
        shard_dim: the dim that gets a cut (a split, an all-to-all, a reduce-scatter).
        logical_process_axis: the axis of the grid; of a mixed gather all the axes of ``gather_dim``.
        forward_only: the backward pass costs nothing, as in inference.
        mix_gather: the pattern is a gather over several axes.
    """

    def __init__(
        self,
        comm_pattern: CollectiveCommPattern,
        sharding_spec: ShardingSpec,
        gather_dim: int | None = None,
        shard_dim: int | None = None,
        logical_process_axis: int | Sequence[int] | None = None,
        forward_only: bool = False,
        mix_gather: bool = False,
    ) -> None:
        self.comm_pattern, self.sharding_spec = comm_pattern, sharding_spec
        self.gather_dim, self.shard_dim = gather_dim, shard_dim
        self.logical_process_axis = logical_process_axis
        self.forward_only = forward_only
        if mix_gather != (comm_pattern is CollectiveCommPattern.MIXGATHER_FWD_SPLIT_BWD):
            raise ShardingSpecException(f"mix_gather={mix_gather} does not fit {comm_pattern.name}")
        self.mix_gather = mix_gather
        if not self._axes:
            raise ShardingSpecException(f"{comm_pattern.name} needs logical_process_axis")
        self.source, self.target = self._ends()

    @classmethod
    def of_step(cls, step: RouteStep, spec: ShardingSpec, forward_only: bool = False) -> CommSpec:
        """The same as a step of a route."""
        gathers, cuts = step.do in ("all_gather", "all_to_all"), step.do in ("cut", "reduce_scatter")
        return cls(
            _OF_STEP[step.do],
            spec,
            gather_dim=step.dim if gathers else None,
            shard_dim=step.dim if cuts else step.to_dim if step.do == "all_to_all" else None,
            logical_process_axis=int(step.axis),
            forward_only=forward_only,
        )

    @property
    def _axes(self) -> tuple[str, ...]:
        axes = self.logical_process_axis
        return () if axes is None else (str(axes),) if isinstance(axes, int) else tuple(map(str, axes))

    def _ends(self) -> tuple[Layout, Layout]:
        """The layouts before and after."""
        pattern, before, axes = CollectiveCommPattern, self.sharding_spec.layout, self._axes
        if self.comm_pattern is pattern.IDENTITY_FWD_ALLREDUCE_BWD:
            return before, replace(before, spread=frozenset(axes))
        if self.comm_pattern in (pattern.ALLREDUCE_FWD_IDENTITY_BWD, pattern.REDUCESCATTER_FWD_GATHER_BWD):
            before = replace(before, partial=before.partial | {*axes})
        dims, partial = list(before.dims), before.partial - {*axes}
        if self.gather_dim is not None:
            left = dims[self.gather_dim]
            if left[len(left) - len(axes) :] != axes:
                raise ShardingSpecException(
                    f"{self.comm_pattern.name}: the innermost cuts of dim {self.gather_dim} in"
                    f" {self.sharding_spec} are not those of axis {', '.join(axes)}"
                )
            dims[self.gather_dim] = left[: len(left) - len(axes)]
        if self.shard_dim is not None:
            dims[self.shard_dim] += axes
        return before, replace(before, dims=tuple(dims), partial=partial)

    def get_sharding_spec_after(self) -> ShardingSpec:
        """How the tensor lies after the collective."""
        return self.sharding_spec.with_layout(replace(self.target, spread=frozenset()))

    def get_comm_cost(self) -> CostDict:
        """The seconds of both passes, by the alpha and beta of the grid, for a tensor in fp32."""
        prices = spec_prices(self.sharding_spec)
        return cost_of_passes(self.source, self.target, prices, self.forward_only, cheapest=False)

    def covert_spec_to_action(self, tensor: Tensor) -> Tensor:
        """Run the collective on this rank's piece; the result has the gradient that the pattern says."""
        mesh, _ = self.sharding_spec.on_mesh()
        return redistribute(tensor, self.source, self.target, mesh.mesh)

    def __repr__(self) -> str:
        dims = f"gather_dim={self.gather_dim}, shard_dim={self.shard_dim}"
        axis = f"logical_process_axis={self.logical_process_axis}"
        return f"CommSpec({self.comm_pattern.name}, {self.sharding_spec}, {dims}, {axis})"


def spec_prices(spec: ShardingSpec) -> Prices:
    """The prices of moves of the tensor that ``spec`` describes."""
    mesh, shape = spec.on_mesh()
    return price_tensor(mesh.links, shape, _ITEMSIZE)


def cost_of_passes(
    source: Layout, target: Layout, prices: Prices, forward_only: bool, *, cheapest: bool
) -> CostDict:
    """The seconds of a move and of its gradient's, by the cheapest routes or by those of ``redistribute``
    without links.
    """

    def seconds(begin: Layout, end: Layout) -> float:
        return route_seconds(begin, route(begin, end, prices if cheapest else None), prices)

    forward = seconds(source, target)
    backward = 0.0 if forward_only else seconds(target.dual(), source.dual())
    return {"forward": forward, "backward": backward, "total": forward + backward}
