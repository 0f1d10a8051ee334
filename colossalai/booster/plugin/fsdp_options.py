"""The documented arguments of ``TorchFSDPPlugin``, which are FSDP1's, in the words of FSDP2.

An argument that has no meaning in FSDP2 is refused here, when the plugin is built.  torch's FSDP takes two seconds to
import, so that is left to the functions that need it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class FSDPOptions:
    """What ``fully_shard`` is told."""

    reshard_after_forward: bool | None
    hybrid: bool
    offload: bool
    precision: Any  # a MixedPrecisionPolicy, or None: the model's own dtypes


def translate(
    sharding_strategy: Any, cpu_offload: Any, backward_prefetch: Any, mixed_precision: Any
) -> FSDPOptions:
    """Refuse or translate the documented arguments."""
    reshard, hybrid = _strategy(sharding_strategy)
    _check_prefetch(backward_prefetch)
    return FSDPOptions(reshard, hybrid, _offload(cpu_offload), _precision(mixed_precision))


def _strategy(strategy: Any) -> tuple[bool | None, bool]:
    """Whether to cut the weights again after the forward pass (None: all but the outermost), and hybrid or not."""
    if strategy is None:
        return None, False
    from torch.distributed.fsdp import ShardingStrategy

    _check_kind("sharding_strategy", strategy, (ShardingStrategy,))
    if strategy is ShardingStrategy.NO_SHARD:
        raise ValueError(
            "TorchFSDPPlugin does not do ShardingStrategy.NO_SHARD, which cuts nothing; use TorchDDPPlugin"
        )
    hybrid = strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
    keep = strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
    return (False if keep else None), hybrid


def _check_prefetch(prefetch: Any) -> None:
    if prefetch is None:
        return
    from torch.distributed.fsdp import BackwardPrefetch

    _check_kind("backward_prefetch", prefetch, (BackwardPrefetch,))
    if prefetch is not BackwardPrefetch.BACKWARD_PRE:
        raise ValueError(
            f"backward_prefetch={prefetch} has no equivalent in FSDP2, which always gathers the next weights before"
            " the gradients of the current ones are computed (BACKWARD_PRE); leave it out"
        )


def _offload(offload: Any) -> bool:
    if offload is None or isinstance(offload, bool):
        return bool(offload)
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

    _check_kind("cpu_offload", offload, (CPUOffload, OffloadPolicy))
    return bool(getattr(offload, "offload_params", isinstance(offload, CPUOffloadPolicy)))


def _precision(precision: Any) -> Any:
    if precision is None:
        return None
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    _check_kind("mixed_precision", precision, (MixedPrecision, MixedPrecisionPolicy))
    if isinstance(precision, MixedPrecisionPolicy):
        return precision
    if precision.buffer_dtype is not None or precision.keep_low_precision_grads:
        raise ValueError(
            "MixedPrecision(buffer_dtype=..., keep_low_precision_grads=...) has no equivalent in FSDP2: it leaves"
            " buffers as they are and keeps gradients in the dtype of the weights; convert buffers before boost"
        )
    return MixedPrecisionPolicy(
        param_dtype=precision.param_dtype,
        reduce_dtype=precision.reduce_dtype,
        cast_forward_inputs=precision.cast_forward_inputs or precision.cast_root_forward_inputs,
    )


def check_process_group(group: Any) -> None:
    """None, a process group, or a mesh of one or two dims."""
    if group is None:
        return
    from torch.distributed import GroupMember, ProcessGroup, get_rank, get_world_size
    from torch.distributed.device_mesh import DeviceMesh

    if group is GroupMember.NON_GROUP_MEMBER:  # what torch gives to ranks outside of a new group
        raise ValueError(f"rank {get_rank()} is not in process_group, so it cannot train in it")
    _check_kind("process_group", group, (ProcessGroup, DeviceMesh))
    if not isinstance(group, DeviceMesh) or group.ndim == 1:
        return
    if (group.ndim, group.size()) != (2, get_world_size()) or group.mesh_dim_names is None:
        raise ValueError(
            f"process_group is a mesh of shape {tuple(group.shape)} with dim names {group.mesh_dim_names};"
            " TorchFSDPPlugin takes one dim, or two named ones with all ranks of the job: copies, and the ranks that"
            " each copy is cut over"
        )


def check_ignored(modules: Any) -> list[nn.Module]:
    ignored = list(modules) if modules is not None else []
    for module in ignored:
        _check_kind("ignored_modules", module, (nn.Module,))
    return ignored


def _check_kind(name: str, value: Any, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"TorchFSDPPlugin needs {name} to be a {expected} of torch, got {value!r}")
