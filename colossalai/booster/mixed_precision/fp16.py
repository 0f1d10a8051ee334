"""The booster's fp16 precisions: fronts of ``colossalai.amp.torch_amp``, ``naive_amp`` and ``apex_amp``."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.amp.apex_amp import ApexOptions, apex_amp
from colossalai.amp.apex_amp.options import LossScale
from colossalai.amp.naive_amp.convert import NaiveOptions, naive_amp
from colossalai.amp.torch_amp import TorchAMPOptimizer
from colossalai.amp.torch_amp.convert import TorchOptions, torch_amp
from colossalai.booster.mixed_precision.base import Criterion, MixedPrecision


class FP16TorchMixedPrecision(MixedPrecision):
    """Matrix products and convolutions in fp16; weights, gradients and the optimizer in the model's own
    dtype.

    Args:
        init_scale: the first factor of the loss.
        growth_factor: what the scale is multiplied by after ``growth_interval`` good steps.
        backoff_factor: what it is multiplied by after a step that overflowed.
        growth_interval: how many good steps it takes to grow.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.options = TorchOptions(
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
        )

    def configure(
        self, model: nn.Module, optimizer: Optimizer | None = None, criterion: Criterion | None = None
    ) -> tuple[nn.Module, Optimizer | None, Criterion | None]:
        return torch_amp(model, optimizer, criterion, self.options)


class FP16NaiveMixedPrecision(MixedPrecision):
    """Weights and all operations in fp16, outputs in fp32; the optimizer steps fp32 masters of the weights.

    Args:
        log_num_zeros_in_grad: count and log the zeros in the gradients in every step.
        initial_scale: the first factor of the loss.
        growth_factor: what the scale is multiplied by after ``growth_interval`` good steps in a row.
        backoff_factor: what it is multiplied by after an overflow.
        hysteresis: the scale backs off at this overflow since it last grew, and at every one after it.
        max_scale: the largest scale.
        verbose: log every change of the scale.
        growth_interval: see ``growth_factor``.
        min_scale: the smallest scale.
    """

    def __init__(
        self,
        log_num_zeros_in_grad: bool = False,
        initial_scale: float = 2**16,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        hysteresis: int = 2,
        max_scale: float | None = 2**32,
        verbose: bool | None = None,
        *,
        growth_interval: int = 1000,
        min_scale: float | None = 1,
    ) -> None:
        self.options = NaiveOptions(
            log_num_zeros_in_grad=log_num_zeros_in_grad,
            initial_scale=initial_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            hysteresis=hysteresis,
            max_scale=max_scale,
            verbose=verbose,
            growth_interval=growth_interval,
            min_scale=min_scale,
        )

    def configure(
        self, model: nn.Module, optimizer: Optimizer | None = None, criterion: Criterion | None = None
    ) -> tuple[nn.Module, Optimizer | None, Criterion | None]:
        # a plugin with data parallelism brings buffers together itself
        amp_model, amp_optimizer = naive_amp(model, optimizer, self.options, sync_buffer=False)
        return amp_model, amp_optimizer, criterion


class FP16ApexMixedPrecision(MixedPrecision):
    """One of the levels of Apex: O0 is fp32, O1 autocast, O2 fp16 with fp32 batch normalization and masters,
    O3 fp16.

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


__all__ = ["FP16TorchMixedPrecision", "TorchAMPOptimizer"]
