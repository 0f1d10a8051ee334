"""Documented home of the partitions and of the calls of layers."""

from colossalai.pipeline.calls import (
    build_kwargs_for_function,
    build_kwargs_for_module,
    call_module,
    exec_func_with_kwargs,
    exec_funcs_with_kwargs,
)
from colossalai.pipeline.partition import customized_partition, partition_balanced, partition_uniform

__all__ = [
    "build_kwargs_for_function",
    "build_kwargs_for_module",
    "call_module",
    "customized_partition",
    "exec_func_with_kwargs",
    "exec_funcs_with_kwargs",
    "partition_balanced",
    "partition_uniform",
]
