"""Everyday tools for training scripts: device, data loading, timers, memory, activation checkpointing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from colossalai.utils.activation_checkpoint import checkpoint, register_random_state
from colossalai.utils.common import (
    MultiTensorApply,
    clip_grad_norm_fp32,
    conditional_context,
    count_zeros_fp32,
    disposable,
    ensure_path_exists,
    multi_tensor_applier,
    print_rank_0,
)
from colossalai.utils.dataloader import DataParallelSampler, get_dataloader
from colossalai.utils.device import empty_cache, get_current_device, set_to_cuda, synchronize
from colossalai.utils.memory import (
    colo_device_memory_capacity,
    colo_device_memory_used,
    colo_get_cpu_memory_capacity,
    colo_set_cpu_memory_capacity,
    colo_set_process_memory_fraction,
    report_memory_usage,
)
from colossalai.utils.parallel import (
    copy_tensor_parallel_attributes,
    is_ddp_ignored,
    is_dp_rank_0,
    is_model_parallel_parameter,
    is_no_pp_or_last_stage,
    is_tp_rank_0,
    is_using_ddp,
    is_using_moe,
    is_using_pp,
    is_using_sequence,
    param_is_not_tensor_parallel_duplicate,
    switch_virtual_pipeline_parallel_rank,
    sync_model_param,
)
from colossalai.utils.tensor_detector import TensorDetector
from colossalai.utils.throughput import Throughput, count_operations
from colossalai.utils.timer import MultiTimer, Timer

__all__ = [
    "DataParallelSampler",
    "MultiTensorApply",
    "MultiTimer",
    "TensorDetector",
    "Throughput",
    "Timer",
    "checkpoint",
    "clip_grad_norm_fp32",
    "colo_device_memory_capacity",
    "colo_device_memory_used",
    "colo_get_cpu_memory_capacity",
    "colo_set_cpu_memory_capacity",
    "colo_set_process_memory_fraction",
    "conditional_context",
    "copy_tensor_parallel_attributes",
    "count_operations",
    "count_zeros_fp32",
    "disposable",
    "empty_cache",
    "ensure_path_exists",
    "get_current_device",
    "get_dataloader",
    "is_ddp_ignored",
    "is_dp_rank_0",
    "is_model_parallel_parameter",
    "is_no_pp_or_last_stage",
    "is_tp_rank_0",
    "is_using_ddp",
    "is_using_moe",
    "is_using_pp",
    "is_using_sequence",
    "multi_tensor_applier",
    "param_is_not_tensor_parallel_duplicate",
    "print_rank_0",
    "register_random_state",
    "report_memory_usage",
    "set_to_cuda",
    "switch_virtual_pipeline_parallel_rank",
    "sync_model_param",
    "synchronize",
]


# Documented as parts of this package, but built on what lies above it; they load on first use.
_ELSEWHERE = {
    "checkpoint_blocks": "colossalai.nn.checkpoint_blocks",
    "load_checkpoint": "colossalai.checkpoint_io.files.training",
    "save_checkpoint": "colossalai.checkpoint_io.files.training",
    "summary": "colossalai.booster.summary",
}


def __getattr__(name: str) -> Any:
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE[name]), name)
