"""``NaiveAMPModel``: everything in fp16, whatever the caller passes and expects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from colossalai.amp.casting import CastModel, cast_model
from colossalai.amp.groups import group_of
from colossalai.context import ParallelMode
from colossalai.utils.parallel import row_mode


class NaiveAMPModel(CastModel):
    """``model`` with weights, inputs and operations in fp16.

    Args:
        output_to_fp32: cast outputs to fp32, where the loss is computed.
        parallel_mode: the ranks, or several sets of them, that share statistics such as those of BatchNorm.
        sync_buffer: average floating-point buffers over these ranks before every forward pass in training,
            where there is more than one.  ``DistributedDataParallel`` does this itself.
    """

    def __init__(
        self,
        model: nn.Module,
        output_to_fp32: bool = True,
        parallel_mode: ParallelMode | Sequence[ParallelMode] = ParallelMode.DATA,
        sync_buffer: bool = True,
    ) -> None:
        super().__init__(model, torch.float16, torch.float32 if output_to_fp32 else None)
        cast_model(model, torch.float16)
        modes = [parallel_mode] if isinstance(parallel_mode, ParallelMode) else parallel_mode
        # where sequences are cut, data lies on their ranks as well
        modes = [row_mode() if mode is ParallelMode.DATA else mode for mode in modes]
        self._buffer_groups = [group for mode in modes for group in group_of(mode)] if sync_buffer else []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._buffer_groups and self.training and torch.is_grad_enabled():
            self._average_buffers()
        return super().forward(*args, **kwargs)

    def _average_buffers(self) -> None:
        for group in self._buffer_groups:
            size = dist.get_world_size(group)
            for buffer in self.buffers():
                if buffer.is_floating_point():
                    mean = buffer.float() / size  # in fp32: a sum may overflow fp16
                    dist.all_reduce(mean, group=group)
                    buffer.copy_(mean)
