"""Initializers of weights, whose values do not depend on the parallel plan.

``init.normal_(std=0.02)`` returns an initializer; ``initializer(tensor, fan_in, fan_out)`` fills a tensor.
Every element is a function of one number from torch's CPU generator and of its index in the *whole* tensor,
so a rank that holds a piece draws just this piece, and the pieces of any plan join to the tensor of the
serial model, bit for bit.  ``fan_in`` and ``fan_out`` are those of the whole tensor; without them they follow
from its shape.

The distribution is also written on the parameter, where ``colossalai.mesh.initialize`` finds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from colossalai.mesh import (
    Constant,
    Distribution,
    Mesh,
    Normal,
    Transposed,
    TruncatedNormal,
    Uniform,
    full_shape,
    placement,
    set_init,
)
from colossalai.mesh.random import fill_from
from colossalai.mesh.weights.deferred import recording_of
from colossalai.nn.modes import current

Fan = int | None


@dataclass(frozen=True)
class Initializer:
    """Fills a tensor from the distribution that ``rule(fan_in, fan_out)`` gives."""

    rule: Callable[[Fan, Fan], Distribution]

    def distribution(self, fan_in: Fan = None, fan_out: Fan = None) -> Distribution:
        return self.rule(fan_in, fan_out)

    def __call__(self, tensor: Tensor, fan_in: Fan = None, fan_out: Fan = None) -> Tensor:
        return self.fill(tensor, current().mesh, fan_in, fan_out)

    @torch.no_grad()
    def fill(self, tensor: Tensor, mesh: Mesh | None, fan_in: Fan = None, fan_out: Fan = None) -> Tensor:
        """The same for a piece of a tensor on any ``mesh``."""
        shape, transposed = tuple(full_shape(tensor)), getattr(tensor, "transposed", False)
        if fan_in is None:
            fan_in, fan_out = _fans(shape[::-1] if transposed else shape)
        drawn = self.rule(fan_in, fan_out)
        if transposed:
            drawn = Transposed(drawn, rows=shape[1], columns=shape[0])
        set_init(tensor, drawn)
        recording = recording_of(tensor)
        if recording is None and tensor.is_meta:
            return tensor
        key, layout = new_key(), placement(tensor)

        def write(piece: Tensor) -> Tensor:
            return fill_from(lambda i: drawn.numbers(key, i), piece, shape, layout, mesh, uneven=True)

        if recording is not None:
            recording.note(tensor, write)
            return tensor
        return write(tensor)


def new_key() -> int:
    """The key of one tensor: the next number of torch's CPU generator, which is alike on all ranks."""
    return int(torch.randint(1 << 62, (), device="cpu"))


def _fans(shape: tuple[int, ...]) -> tuple[Fan, Fan]:
    if len(shape) < 2:
        return None, None
    field = math.prod(shape[2:])
    return shape[1] * field, shape[0] * field


def _needed(fan: Fan, which: str) -> int:
    if fan is None:
        raise ValueError(f"this initializer needs {which} for a tensor of fewer than two dims; pass {which}=")
    return fan


def zeros_() -> Initializer:
    """All 0."""
    return Initializer(partial(_constant, 0.0))


def ones_() -> Initializer:
    """All 1."""
    return Initializer(partial(_constant, 1.0))


def _constant(value: float, fan_in: Fan, fan_out: Fan) -> Distribution:
    return Constant(value)


def uniform_(a: float = 0.0, b: float = 1.0) -> Initializer:
    """Uniform between ``a`` and ``b``."""
    return Initializer(partial(_uniform, a, b))


def _uniform(a: float, b: float, fan_in: Fan, fan_out: Fan) -> Distribution:
    return Uniform(a, b)


def normal_(mean: float = 0.0, std: float = 1.0) -> Initializer:
    """Normal, with this mean and standard deviation."""
    return Initializer(partial(_normal, mean, std))


def _normal(mean: float, std: float, fan_in: Fan, fan_out: Fan) -> Distribution:
    return Normal(mean, std)


def trunc_normal_(mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0) -> Initializer:
    """Normal, without what lies outside of [a, b]."""
    return Initializer(partial(_trunc_normal, TruncatedNormal(mean, std, a, b)))


def _trunc_normal(drawn: Distribution, fan_in: Fan, fan_out: Fan) -> Distribution:
    return drawn


def kaiming_uniform_(a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Initializer:
    """Uniform with the variance gain^2 / fan (He et al. 2015); ``a`` is the slope of a leaky ReLU."""
    return Initializer(partial(_kaiming, _kaiming_gain(a, mode, nonlinearity), mode, True))


def kaiming_normal_(a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Initializer:
    """Normal with the variance gain^2 / fan (He et al. 2015); ``a`` is the slope of a leaky ReLU."""
    return Initializer(partial(_kaiming, _kaiming_gain(a, mode, nonlinearity), mode, False))


def _kaiming_gain(a: float, mode: str, nonlinearity: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f"mode must be 'fan_in' or 'fan_out', got {mode!r}")
    return nn.init.calculate_gain(nonlinearity, a)  # type: ignore[arg-type]


def _kaiming(gain: float, mode: str, uniform: bool, fan_in: Fan, fan_out: Fan) -> Distribution:
    fan = _needed(fan_in if mode == "fan_in" else fan_out, mode)
    return _with_std(gain / math.sqrt(fan), uniform)


def xavier_uniform_(a: float = math.sqrt(3.0), scale: float = 2.0, gain: float = 1.0) -> Initializer:
    """Uniform in +-a gain sqrt(scale / (fan_in + fan_out)) (Glorot and Bengio 2010).

    Without ``fan_out`` the sum is ``fan_in``: ``xavier_uniform_(a=1, scale=1)`` draws a bias as torch's
    layers do.
    """
    return Initializer(partial(_xavier, a, scale, gain))


def xavier_normal_(scale: float = 2.0, gain: float = 1.0) -> Initializer:
    """Normal with the standard deviation gain sqrt(scale / (fan_in + fan_out)) (Glorot and Bengio 2010)."""
    return Initializer(partial(_xavier, None, scale, gain))


def _xavier(a: float | None, scale: float, gain: float, fan_in: Fan, fan_out: Fan) -> Distribution:
    std = gain * math.sqrt(scale / (_needed(fan_in, "fan_in") + (fan_out or 0)))
    return Normal(0.0, std) if a is None else Uniform(-a * std, a * std)


def lecun_uniform_() -> Initializer:
    """Uniform with the variance 1 / fan_in."""
    return Initializer(partial(_lecun, True))


def lecun_normal_() -> Initializer:
    """Normal, cut at two standard deviations, with the variance 1 / fan_in."""
    return Initializer(partial(_lecun, False))


def _lecun(uniform: bool, fan_in: Fan, fan_out: Fan) -> Distribution:
    std = 1 / math.sqrt(_needed(fan_in, "fan_in"))
    if uniform:
        return _with_std(std, True)
    std /= 0.87962566103423978  # what cutting at 2 leaves of a standard deviation of 1
    return TruncatedNormal(0.0, std, -2 * std, 2 * std)


def _with_std(std: float, uniform: bool) -> Distribution:
    bound = math.sqrt(3.0) * std
    return Uniform(-bound, bound) if uniform else Normal(0.0, std)


# What the layers use unless told otherwise; these are torch's own defaults.
WEIGHT = kaiming_uniform_(a=math.sqrt(5))
BIAS = xavier_uniform_(a=1, scale=1)
TABLE = normal_()
POSITIONS = zeros_()
