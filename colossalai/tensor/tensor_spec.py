"""``ColoTensorSpec``: everything that a ColoTensor knows beyond a tensor."""

from __future__ import annotations

from dataclasses import dataclass, field

from colossalai.tensor.compute_spec import ComputeSpec
from colossalai.tensor.distspec import DistSpec, ReplicaSpec
from colossalai.tensor.process_group import ProcessGroup


@dataclass
class ColoTensorSpec:
    """The ranks that share a tensor, how it lies among them, and how it is used in computations."""

    pg: ProcessGroup
    dist_attr: DistSpec = field(default_factory=ReplicaSpec)
    compute_attr: ComputeSpec | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pg, ProcessGroup):
            raise TypeError(f"ColoTensorSpec takes a ProcessGroup, got {type(self.pg).__name__} {self.pg!r}")
        if self.compute_attr is not None and not isinstance(self.compute_attr, ComputeSpec):
            raise TypeError(
                "ColoTensorSpec takes a ComputeSpec or None as compute_attr, got"
                f" {type(self.compute_attr).__name__}"
            )
