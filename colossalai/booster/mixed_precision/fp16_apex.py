"""The levels O0 to O3: the booster's front of ``colossalai.amp.apex_amp``."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.amp.apex_amp import ApexOptions, apex_amp
from colossalai.amp.apex_amp.options import LossScale
from colossalai.booster.mixed_precision.base import Criterion, MixedPrecision


class FP16ApexMixedPrecision(MixedPrecision):
    """One of the levels of Apex: O0 is fp32, O1 autocast, O2 fp16 with fp32 batch normalization and masters, O3 fp16.

    The arguments are the fields of ``colossalai.amp.apex_amp.ApexOptions``; ``None`` is what the level says.
    """

    def __init__(
        self,
        opt_level: str = "O1",
        cast_model_type: torch.dtype | None = None,
        patch_torch_functions: bool | None = None,
        keep_batchnorm_fp32: bool | None = None,
        master_weights: bool | None = None,
        loss_scale: LossScale | None = None,
        cast_model_outputs: torch.dtype | None = None,
        num_losses: int = 1,
        verbosity: int = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = 2.0**24,
    ) -> None:
        self.options = ApexOptions(
            opt_level=opt_level,
            cast_model_type=cast_model_type,
            patch_torch_functions=patch_torch_functions,
            keep_batchnorm_fp32=keep_batchnorm_fp32,
            master_weights=master_weights,
            loss_scale=loss_scale,
            cast_model_outputs=cast_model_outputs,
            num_losses=num_losses,
            verbosity=verbosity,
            min_loss_scale=min_loss_scale,
            max_loss_scale=max_loss_scale,
        )

    def configure(
        self, model: nn.Module, optimizer: Optimizer | None = None, criterion: Criterion | None = None
    ) -> tuple[nn.Module, Optimizer | None, Criterion | None]:
        return apex_amp(model, optimizer, criterion, self.options)
