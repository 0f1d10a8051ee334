"""Learning-rate schedulers; all of them take the number of steps of the whole training as ``total_steps``."""

from colossalai.nn.lr_scheduler.cosine import (
    CosineAnnealingLR,
    CosineAnnealingWarmupLR,
    FlatAnnealingLR,
    FlatAnnealingWarmupLR,
)
from colossalai.nn.lr_scheduler.decay import ExponentialLR, MultiStepLR, MultiStepWarmupLR, StepLR
from colossalai.nn.lr_scheduler.delayed import DelayerScheduler, WarmupDelayerScheduler, WarmupScheduler
from colossalai.nn.lr_scheduler.lambdas import LambdaLR, MultiplicativeLR
from colossalai.nn.lr_scheduler.linear import LinearWarmupLR
from colossalai.nn.lr_scheduler.onecycle import OneCycleLR
from colossalai.nn.lr_scheduler.polynomial import PolynomialLR, PolynomialWarmupLR

__all__ = [
    "CosineAnnealingLR",
    "CosineAnnealingWarmupLR",
    "DelayerScheduler",
    "ExponentialLR",
    "FlatAnnealingLR",
    "FlatAnnealingWarmupLR",
    "LambdaLR",
    "LinearWarmupLR",
    "MultiStepLR",
    "MultiStepWarmupLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "PolynomialWarmupLR",
    "StepLR",
    "WarmupDelayerScheduler",
    "WarmupScheduler",
]
