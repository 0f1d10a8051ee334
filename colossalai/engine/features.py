"""The features that a config asks ``initialize`` for, checked and with types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from colossalai.amp import AMP_TYPE
from colossalai.booster.mixed_precision import PRECISIONS, MixedPrecision, mixed_precision_factory
from colossalai.context.config import ConfigException
from colossalai.engine.zero_section import check_zero, with_clipping

# The mixed precision of a config, by the name it has for Booster.
PRECISION_OF = {AMP_TYPE.TORCH: "fp16", AMP_TYPE.NAIVE: "fp16_naive", AMP_TYPE.APEX: "fp16_apex"}


@dataclass(frozen=True, kw_only=True)
class Features:
    """The sections of a config that ``initialize`` reads."""

    precision: MixedPrecision | None = None
    zero: Mapping[str, Any] | None = None
    ddp_options: Mapping[str, Any] = field(default_factory=dict)
    handlers: tuple[Mapping[str, Any], ...] = ()
    accumulate: int = 1
    clip_grad_norm: float = 0.0
    cudnn_benchmark: bool = False
    cudnn_deterministic: bool = True

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Features:
        """Read ``config``, whose reserved words ``launch`` has checked one by one; here they must fit each
        other.
        """
        _check_combination(config)
        zero, clip_grad_norm = with_clipping(config)
        return cls(
            precision=_precision(config.get("fp16")),
            zero=zero,
            ddp_options=config.get("torch_ddp") or {},
            handlers=tuple(config.get("gradient_handler") or config.get("gradient_handlers") or ()),
            accumulate=config.get("gradient_accumulation") or 1,
            clip_grad_norm=clip_grad_norm,
            cudnn_benchmark=bool(config.get("cudnn_benchmark")),
            cudnn_deterministic=config.get("cudnn_deterministic") in (None, True),
        )


def _check_combination(config: Mapping[str, Any]) -> None:
    zero = config.get("zero")
    if _mode(config.get("fp16")) is not None and zero is not None:
        raise ConfigException(
            "config has both 'fp16' and 'zero'; ZeRO does its own mixed precision, so keep one of them"
        )
    if zero is not None:
        check_zero(zero)
        if config.get("torch_ddp"):
            raise ConfigException(
                "config has both 'torch_ddp' and 'zero', two ways to average gradients; keep one"
            )
        handlers = config.get("gradient_handler") or config.get("gradient_handlers") or ()
        averaging = {f"{what}GradientHandler" for what in ("DataParallel", "Moe", "SequenceParallel")}
        if both := [handler["type"] for handler in handlers if handler.get("type") in averaging]:
            raise ConfigException(
                f"config has 'zero', which averages gradients itself, and the handler {both[0]}; remove one"
            )


def _mode(fp16: Mapping[str, Any] | None) -> AMP_TYPE | None:
    """The mode that the section asks for; None for no mixed precision."""
    if fp16 is None:
        return None
    if "mode" not in fp16:
        raise ConfigException(
            "config section 'fp16' needs a mode, such as fp16 = dict(mode=AMP_TYPE.TORCH) (from"
            " colossalai.amp)"
        )
    if fp16["mode"] is None:
        return None
    try:
        return AMP_TYPE(fp16["mode"])
    except ValueError:
        known = ", ".join(str(mode) for mode in AMP_TYPE)
        raise ConfigException(
            f"fp16 mode must be one of {known}, or None for no mixed precision, got {fp16['mode']!r}"
        ) from None


def _precision(fp16: Mapping[str, Any] | None) -> MixedPrecision | None:
    mode = _mode(fp16)
    if fp16 is None or mode is None:
        return None
    options = {name: value for name, value in fp16.items() if name != "mode"}
    if not options.pop("enabled", True):
        return None
    name = PRECISION_OF[mode]
    if not options or name not in PRECISIONS:
        return mixed_precision_factory(name)  # refuses a name it does not know
    try:
        return PRECISIONS[name](**options)
    except (TypeError, ValueError) as error:
        raise ConfigException(f"config section 'fp16' with mode {mode}: {error}") from error
