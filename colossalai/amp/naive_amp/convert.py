"""From fp32 training objects to naive AMP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.amp.loss_scale import LossScaleOptions
from colossalai.amp.naive_amp.fp16_optimizer import NaiveAMPOptimizer
from colossalai.amp.naive_amp.grad_scaler import DynamicGradScaler
from colossalai.amp.naive_amp.naive_amp_model import NaiveAMPModel
from colossalai.utils import is_using_pp


@dataclass(frozen=True, kw_only=True)
class NaiveOptions(LossScaleOptions):
    """The documented keys of ``fp16 = dict(mode=AMP_TYPE.NAIVE, ...)``.

    The documents' first scale, 2**32, is far beyond fp16: dozens of steps are skipped before one is made.
    """

    log_num_zeros_in_grad: bool = False
    verbose: bool | None = None
    clip_grad_norm: float = 0
    dp_process_group: Any = None
    mp_process_group: Any = None

    def scaler(self, verbose: bool = False) -> DynamicGradScaler:
        return super().scaler(verbose or bool(self.verbose))


def naive_amp(
    model: nn.Module, optimizer: Optimizer | None, options: NaiveOptions, *, sync_buffer: bool
) -> tuple[NaiveAMPModel, NaiveAMPOptimizer | None]:
    """``model`` in fp16 and ``optimizer`` with masters that have the digits the model had before."""
    exact: dict[Tensor, Tensor] = {p: p.data for p in model.parameters()}
    # between stages fp16 travels; the pipeline casts the output of the last one
    amp_model = NaiveAMPModel(model, output_to_fp32=not is_using_pp(), sync_buffer=sync_buffer)
    if optimizer is None:
        return amp_model, None
    return amp_model, NaiveAMPOptimizer(
        optimizer,
        options.scaler(),
        bool(options.verbose),
        options.clip_grad_norm,
        options.dp_process_group,
        options.mp_process_group,
        log_num_zeros_in_grad=options.log_num_zeros_in_grad,
        master_values=exact,
    )
