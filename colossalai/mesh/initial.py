"""The older place of initial values; they live in ``colossalai.mesh.weights.initial``."""

from colossalai.mesh.weights.initial import (
    Constant,
    Normal,
    Transposed,
    TruncatedNormal,
    Uniform,
    ZeroRow,
    initialize,
    set_init,
)

__all__ = [
    "Constant",
    "Normal",
    "Transposed",
    "TruncatedNormal",
    "Uniform",
    "ZeroRow",
    "initialize",
    "set_init",
]
