"""``Layout`` of distributed tensors: a spec with the grid and the tensor that it is for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from colossalai.device import DeviceMesh
from colossalai.tensor.sharding_spec import ShardingSpec


class DeviceLayout:
    """How a tensor of a shape lies on a grid of devices; ``Layout`` is its documented name.

    Args:
        device_mesh: the grid.
        device_type: the device of each rank's piece.
        sharding_spec: how the dims are cut.
        entire_shape: the shape of the whole tensor.
    """

    def __init__(
        self,
        device_mesh: DeviceMesh,
        device_type: torch.device | str,
        sharding_spec: ShardingSpec,
        entire_shape: Sequence[int],
    ) -> None:
        self.device_mesh = device_mesh
        self.device_type = torch.device(device_type)
        self.entire_shape = tuple(entire_shape)
        self.sharding_spec = ShardingSpec(
            device_mesh,
            self.entire_shape,
            sharding_sequence=sharding_spec.sharding_sequence,
            partial=sharding_spec.partial,
        )

    def with_spec(self, sharding_spec: ShardingSpec) -> DeviceLayout:
        """The layout of the same tensor with another spec."""
        return DeviceLayout(self.device_mesh, self.device_type, sharding_spec, self.entire_shape)

    def get_sharded_shape_per_device(self) -> tuple[int, ...]:
        """The shape of the piece of a rank."""
        return self.sharding_spec.get_sharded_shape_per_device()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, DeviceLayout)
            and self.device_type == other.device_type
            and self.sharding_spec == other.sharding_spec
        )

    def __hash__(self) -> int:
        return hash((self.device_type, self.sharding_spec))

    def __repr__(self) -> str:
        return f"Layout({self.sharding_spec} of {self.entire_shape} on {self.device_type})"


Layout = DeviceLayout
