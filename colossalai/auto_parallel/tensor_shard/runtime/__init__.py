"""Runs a :class:`ShardedPlan`: parameters in pieces, and the traced operations on them, and moves."""

from colossalai.auto_parallel.tensor_shard.runtime.random_pieces import serial_masks
from colossalai.auto_parallel.tensor_shard.runtime.sharded_model import transform

__all__ = ["serial_masks", "transform"]
