"""Distributed tensors by their older names: specs, layouts on a grid of devices, and conversion."""

from colossalai.tensor.d_tensor.d_tensor import (
    DTensor,
    construct_default_sharding_spec,
    distribute_module,
    distribute_tensor,
)
from colossalai.tensor.d_tensor.layout import Layout
from colossalai.tensor.d_tensor.layout_converter import LayoutConverter
from colossalai.tensor.d_tensor.sharding_spec import ShardingSpec

__all__ = [
    "DTensor",
    "Layout",
    "LayoutConverter",
    "ShardingSpec",
    "construct_default_sharding_spec",
    "distribute_module",
    "distribute_tensor",
]
