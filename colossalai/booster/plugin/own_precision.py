"""Plans whose weights themselves are in half precision (ZeRO): precision, loss scale and clipping are theirs, not the booster's."""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist

from colossalai.amp.naive_amp.grad_scaler import DynamicGradScaler
from colossalai.booster.plugin.dp import DPPluginBase
from colossalai.mesh.norm import check_clipping

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class OwnPrecisionPlugin(DPPluginBase):
    """A plan with a precision of its own: ``precision`` is its name, ``dtype`` that of weights, gradients and operations."""

    def __init__(
        self,
        precision: str,
        max_norm: float,
        norm_type: float,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        if precision not in DTYPES:
            raise ValueError(
                f"{type(self).__name__} needs precision as one of {', '.join(DTYPES)}, got {precision!r}"
            )
        check_clipping(max_norm, norm_type)
        self.precision, self.dtype = precision, DTYPES[precision]

    def supported_precisions(self) -> list[str]:
        return list(DTYPES)

    def control_precision(self) -> bool:
        return True


def loss_scale(
    initial_scale: float,
    min_scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    max_scale: float,
) -> dict[str, float]:
    """The documented arguments about the loss scale of fp16, by name; those that do not fit together are refused."""
    scale = dict(locals())  # the arguments, and nothing else yet
    DynamicGradScaler(**scale)
    return scale


LOSS_SCALE = tuple(inspect.signature(loss_scale).parameters)
