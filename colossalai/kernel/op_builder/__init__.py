"""The documented builders of compiled operations.

Nothing is built ahead: ``load`` returns a module of functions with the arguments that Apex and its relatives
made usual, and each calls the kernels of ``colossalai.kernel`` or PyTorch, on the device of its tensors.
Modules, rather than these functions, are what a new script wants: ``colossalai.nn.optimizer`` and
``colossalai.kernel``.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import ClassVar


class Builder:
    """Finds the functions of one kind; a subclass names their module."""

    name: ClassVar[str]

    def load(self, verbose: bool | None = None) -> ModuleType:
        """The module of the functions.  ``verbose`` is for a compiler's output, of which there is none."""
        return import_module(f"{__name__}.{self.name}")


class CPUAdamBuilder(Builder):
    """``CPUAdamOptimizer``, which steps one tensor at a time."""

    name = "cpu_adam"


class FusedOptimBuilder(Builder):
    """``multi_tensor_adam``, ``multi_tensor_sgd``, ``multi_tensor_lamb``, ``multi_tensor_scale`` and
    ``multi_tensor_l2norm``, for ``colossalai.utils.multi_tensor_applier``.
    """

    name = "fused_optim"


class LayerNormBuilder(Builder):
    """``forward_affine`` and ``backward_affine``."""

    name = "layer_norm"


class MOEBuilder(Builder):
    """``cumsum_sub_one``, and tokens to experts and back: ``dispatch_*`` and ``combine_*``."""

    name = "moe"


class MultiHeadAttnBuilder(Builder):
    """``MultiHeadAttention`` and the product of attention in it."""

    name = "multihead_attention"


class ScaledMaskedSoftmaxBuilder(Builder):
    """``forward`` and ``backward`` of a softmax with a mask."""

    name = "scaled_masked_softmax"


class ScaledUpperTrainglemaskedSoftmaxBuilder(Builder):
    """``forward`` and ``backward`` of a causal softmax.  The spelling is the documented one."""

    name = "scaled_upper_triang_masked_softmax"


__all__ = [
    "Builder",
    "CPUAdamBuilder",
    "FusedOptimBuilder",
    "LayerNormBuilder",
    "MOEBuilder",
    "MultiHeadAttnBuilder",
    "ScaledMaskedSoftmaxBuilder",
    "ScaledUpperTrainglemaskedSoftmaxBuilder",
]
