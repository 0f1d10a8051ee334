"""``HalfWeightPlugin``: plugins whose weights themselves are in half precision (ZeRO).

Precision, loss scale and clipping are the plugin's own, not the booster's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from colossalai.booster.mixed_precision import MixedPrecision, is_plain, precision_name
from colossalai.booster.plugin.dp import DPPluginBase
from colossalai.logging import get_dist_logger
from colossalai.mesh.gradient_norm import check_clipping

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


DEFAULT = "fp16"


class HalfWeightPlugin(DPPluginBase):
    """A plan with a precision of its own: ``precision`` is its name, ``dtype`` that of weights, gradients and
    operations.

    It is the one that the plugin was given, or else the one that the booster was given, or else fp16.
    """

    def __init__(
        self,
        precision: str | None,
        max_norm: float,
        norm_type: float,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        if precision is not None and precision not in DTYPES:
            raise ValueError(
                f"{type(self).__name__} needs precision as one of {', '.join(DTYPES)}, got {precision!r}"
            )
        check_clipping(max_norm, norm_type)
        self._given = precision
        self.precision = precision or DEFAULT

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @property
    def half(self) -> torch.dtype | None:
        """The dtype that weights are cast to; None where they stay as they are."""
        return None if self.dtype == torch.float32 else self.dtype

    def tell_default(self) -> None:
        """A precision that nobody chose is told: whoever comes from DDP or Accelerate expects fp32."""
        if self._given is None:
            get_dist_logger().warning_once(
                f"{type(self).__name__} trains in {self.precision}, since no precision was chosen; say"
                " Booster(mixed_precision='bf16'), 'fp16' or 'fp32'",
                ranks=[0],
            )

    def supported_precisions(self) -> list[str]:
        return list(DTYPES)

    def control_precision(self) -> bool:
        return True

    def take_precision(self, precision: MixedPrecision | str) -> None:
        name = precision_name(precision)
        who = type(self).__name__
        if name not in DTYPES:
            raise ValueError(
                f"{who} does its own mixed precision, and does not support"
                f" mixed_precision={name or precision!r}, only {', '.join(DTYPES)}"
            )
        if not is_plain(precision):
            raise ValueError(
                f"{who} does its own mixed precision, so options of {type(precision).__name__} would have no"
                f" effect; pass mixed_precision={name!r}, and options such as initial_scale to the plugin"
            )
        if self._given not in (None, name):
            raise ValueError(
                f"{who} was given precision={self._given!r}, and the Booster mixed_precision={name!r}; leave"
                " one of them out"
            )
        self._given = self.precision = name
