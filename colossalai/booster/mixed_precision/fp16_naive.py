"""fp16 throughout, with fp32 masters: the booster's front of ``colossalai.amp.naive_amp``."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from colossalai.amp.naive_amp.convert import NaiveOptions, naive_amp
from colossalai.booster.mixed_precision.base import Criterion, MixedPrecision


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
