"""Mixed precisions by name and by class."""

from __future__ import annotations

from colossalai.booster.mixed_precision.base import MixedPrecision
from colossalai.booster.mixed_precision.bf16 import BF16MixedPrecision, FP8MixedPrecision
from colossalai.booster.mixed_precision.fp16 import (
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
)

PRECISIONS: dict[str, type[MixedPrecision]] = {
    "fp16": FP16TorchMixedPrecision,
    "fp16_naive": FP16NaiveMixedPrecision,
    "fp16_apex": FP16ApexMixedPrecision,
    "bf16": BF16MixedPrecision,
    "fp8": FP8MixedPrecision,
}


def mixed_precision_factory(mixed_precision_type: str) -> MixedPrecision:
    """The mixed precision of that name, with its default options."""
    if mixed_precision_type not in PRECISIONS:
        raise ValueError(
            f"unknown mixed precision {mixed_precision_type!r}; choose one of {', '.join(PRECISIONS)},"
            " or pass a MixedPrecision"
        )
    return PRECISIONS[mixed_precision_type]()


def precision_name(precision: MixedPrecision | str) -> str | None:
    """The name of a mixed precision; None for one of the user's own."""
    if isinstance(precision, str):
        return precision
    return next((name for name, kind in PRECISIONS.items() if type(precision) is kind), None)


def is_plain(precision: MixedPrecision | str) -> bool:
    """Whether a mixed precision has the options of its name, and no others."""
    return isinstance(precision, str) or vars(precision) == vars(type(precision)())


__all__ = [
    "PRECISIONS",
    "BF16MixedPrecision",
    "FP8MixedPrecision",
    "FP16ApexMixedPrecision",
    "FP16NaiveMixedPrecision",
    "FP16TorchMixedPrecision",
    "MixedPrecision",
    "is_plain",
    "mixed_precision_factory",
    "precision_name",
]
