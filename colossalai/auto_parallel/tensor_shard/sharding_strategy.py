"""``ShardingStrategy``: one way to run an operation on a mesh, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar

import torch
from torch.fx import Node

from colossalai.tensor.comm_spec import CommSpec
from colossalai.tensor.sharding_spec import ShardingSpec

_T = TypeVar("_T")


class OperationDataType(Enum):
    """What a tensor is to its operation."""

    INPUT = "input"
    ARG = "arg"
    PARAM = "param"
    BUFFER = "buffer"
    OUTPUT = "output"


@dataclass(eq=False)
class OperationData:
    """A tensor of an operation; two are the same if their names and kinds are.

    Args:
        name: of the node, or of the parameter within its module.
        data: the tensor, often on the meta device, or whatever the operation takes.
        logical_shape: the shape that the strategies speak of, if it is not that of the tensor: a linear layer
            sees its input as a matrix.
    """

    name: str
    type: OperationDataType
    data: Any
    logical_shape: torch.Size | None = None

    def __post_init__(self) -> None:
        if self.logical_shape is None and isinstance(self.data, torch.Tensor):
            self.logical_shape = self.data.shape

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OperationData) and (self.name, self.type) == (other.name, other.type)

    def __hash__(self) -> int:
        return hash((self.name, self.type))


@dataclass
class TrainCycleItem(Generic[_T]):
    """Something of the forward pass, of the backward pass, and of both."""

    fwd: _T
    bwd: _T
    total: _T


@dataclass
class MemoryCost:
    """The bytes of an operation on one rank.

    Args:
        activation: what stays until the backward pass.
        parameter: parameters with all that belongs to them.
        temp: what lives only while the operation runs.
        buffer: buffers of the module.
    """

    activation: float = 0
    parameter: float = 0
    temp: float = 0
    buffer: float = 0

    @property
    def lasting(self) -> float:
        """What adds up over the operations of a model: all but the temporaries."""
        return self.activation + self.parameter + self.buffer


class CommType(Enum):
    """When a collective runs."""

    BEFORE = "before"
    AFTER = "after"
    HOOK = "hook"
    """When the gradient of a parameter is there."""
    IMPLICIT = "implicit"
    """Within the operation, as in a batch norm over ranks."""


@dataclass
class CommAction:
    """A collective that a strategy needs, and the argument that it is for."""

    comm_spec: CommSpec
    comm_type: CommType
    arg_index: int = -1
    key_for_kwarg: str | None = None


@dataclass
class ShardingStrategy:
    """One way to run an operation on a mesh.

    Args:
        name: layouts of the output and of the operands, such as ``S0R = S0R x RR``.
        sharding_specs: how each tensor lies.
        compute_cost: seconds of the operation.
        communication_cost: seconds of its collectives.
        memory_cost: bytes.
        communication_actions: the collectives.
        resharding_costs: for each predecessor and each of its strategies, the seconds of the conversion.
    """

    name: str
    sharding_specs: dict[OperationData, ShardingSpec] = field(default_factory=dict)
    compute_cost: TrainCycleItem[float] | None = None
    communication_cost: TrainCycleItem[float] | None = None
    memory_cost: TrainCycleItem[MemoryCost] | None = None
    communication_actions: dict[OperationData, CommAction] = field(default_factory=dict)
    resharding_costs: dict[Node, list[TrainCycleItem[float]]] = field(default_factory=dict)

    def get_op_data_by_name(self, name: str) -> OperationData:
        """The tensor of this name."""
        for data in self.sharding_specs:
            if data.name == name:
                return data
        known = ", ".join(data.name for data in self.sharding_specs)
        raise KeyError(f"strategy {self.name!r} has no tensor {name!r}; it has {known or 'none'}")

    def get_sharding_spec_by_name(self, name: str) -> ShardingSpec:
        """How the tensor of this name lies."""
        return self.sharding_specs[self.get_op_data_by_name(name)]


class StrategiesVector(list[ShardingStrategy]):
    """The strategies of one node of a graph."""

    def __init__(self, node: Node, strategies: Iterable[ShardingStrategy] = ()) -> None:
        super().__init__(strategies)
        self.node = node

    @property
    def predecessor_nodes(self) -> list[Node]:
        """The nodes whose outputs it takes."""
        return list(self.node.all_input_nodes)

    @property
    def successor_nodes(self) -> list[Node]:
        """The nodes that take its output."""
        return list(self.node.users)
