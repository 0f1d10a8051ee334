"""What the levels mean, and which options go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

LossScale = float | Literal["dynamic"]


@dataclass(frozen=True, kw_only=True)
class Properties:
    """The settings of a level.

    Attributes:
        cast_model_type: the dtype of weights and buffers; ``None`` leaves them as they are.
        patch_torch_functions: compute under autocast to fp16.
        keep_batchnorm_fp32: leave batch normalization in fp32 where the rest of the model is cast.
        master_weights: the optimizer steps fp32 masters of half-precision weights.
        loss_scale: a fixed scale, or ``'dynamic'``.
    """

    cast_model_type: torch.dtype | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: LossScale


def _level(
    cast: torch.dtype | None, patch: bool, norm: bool | None, masters: bool | None, scale: LossScale
) -> Properties:
    return Properties(
        cast_model_type=cast,
        patch_torch_functions=patch,
        keep_batchnorm_fp32=norm,
        master_weights=masters,
        loss_scale=scale,
    )


LEVELS: dict[str, Properties] = {
    "O0": _level(torch.float32, False, None, False, 1.0),
    "O1": _level(None, True, None, None, "dynamic"),
    "O2": _level(torch.float16, False, True, True, "dynamic"),
    "O3": _level(torch.float16, False, False, False, 1.0),
}


@dataclass(frozen=True, kw_only=True)
class ApexOptions:
    """The documented keys of ``fp16 = dict(mode=AMP_TYPE.APEX, ...)``; ``None`` is what the level says.

    Attributes:
        enabled: ``False``: everything stays as it is.
        cast_model_outputs: the dtype of the model's outputs; by default fp32 where the model is cast, else as
            they are.
        num_losses: only 1: the gradients of all losses add up under one scale.
        verbosity: 0 for silence; 1 warns of skipped steps; 2 also logs every change of the loss scale.
        min_loss_scale, max_loss_scale: bounds of a dynamic loss scale.
    """

    enabled: bool = True
    opt_level: str = "O1"
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool | None = None
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: LossScale | None = None
    cast_model_outputs: torch.dtype | None = None
    num_losses: int = 1
    verbosity: int = 1
    min_loss_scale: float | None = None
    max_loss_scale: float | None = 2.0**24

    def __post_init__(self) -> None:
        if self.opt_level not in LEVELS:
            raise ValueError(
                f"opt_level must be one of {', '.join(LEVELS)} (the letter O and a digit), got"
                f" {self.opt_level!r}"
            )
        if self.num_losses != 1:
            raise ValueError(
                f"num_losses={self.num_losses}: one loss scale serves all losses here; leave num_losses=1"
                " and call optimizer.backward once per loss"
            )
        if (self.min_loss_scale or 0) > (self.max_loss_scale or float("inf")):
            raise ValueError(
                f"min_loss_scale={self.min_loss_scale} is above max_loss_scale={self.max_loss_scale}"
            )
        _check_together(self.opt_level, self.properties())

    def properties(self) -> Properties:
        """The level, with what was given in place of its defaults."""
        level = LEVELS[self.opt_level]
        return Properties(
            **{
                name: default if getattr(self, name) is None else getattr(self, name)
                for name, default in vars(level).items()
            }
        )


def _check_together(level: str, p: Properties) -> None:
    half = p.cast_model_type is torch.float16
    if p.cast_model_type not in (None, torch.float32, torch.float16):
        raise ValueError(
            f"cast_model_type must be torch.float16 or torch.float32, got {p.cast_model_type!r}; for bf16"
            " use the mixed precision 'bf16'"
        )
    contradictions = {
        "patch_torch_functions=True leaves the weights in fp32, so it does not go with"
        " cast_model_type=torch.float16": (p.patch_torch_functions and half),
        "keep_batchnorm_fp32=True and master_weights=True are for models that are cast to torch.float16": (
            not half and bool(p.keep_batchnorm_fp32 or p.master_weights)
        ),
        "loss_scale must be a number above 0 or 'dynamic'": (
            p.loss_scale != "dynamic" and not (isinstance(p.loss_scale, int | float) and p.loss_scale > 0)
        ),
    }
    for message, found in contradictions.items():
        if found:
            raise ValueError(f"opt_level {level!r} with the options given: {message}; got {p}")
