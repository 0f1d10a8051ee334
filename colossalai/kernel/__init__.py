"""Optimizer steps on many tensors at once (``optimizer``), sums of rows of experts (``expert_rows``) and of
blocks of attention (``block_sums``), each with a fast way where there is one and plain PyTorch everywhere;
and a few modules that are documented here (``LayerNorm``, ``FusedScaleMaskSoftmax``,
``MultiHeadAttention``), by PyTorch's fused operations.

Nothing is compiled, and Triton is not imported, before a kernel is used.
"""

from __future__ import annotations

import torch

from colossalai.kernel import jit, op_builder
from colossalai.kernel.layer_norm import MixedFusedLayerNorm
from colossalai.kernel.multi_head_attention import MultiHeadAttention
from colossalai.kernel.native.adam import native_works
from colossalai.kernel.probe import triton_works
from colossalai.kernel.scaled_softmax import AttnMaskType, FusedScaleMaskSoftmax

LayerNorm = MixedFusedLayerNorm


def implementations() -> dict[str, str]:
    """The name of each kernel and the implementation that float32 weights on the best device here get."""
    gpu = torch.cuda.is_available()
    own = "triton" if triton_works() else "foreach"
    return {
        "Adam": "fused (torch)",
        "Adam, half-precision weights": own if gpu else "native (C)" if native_works() else "blocks (torch)",
        "SGD": "fused (torch)",
        "LAMB": own,
        "LARS": own,
    }


__all__ = [
    "AttnMaskType",
    "FusedScaleMaskSoftmax",
    "LayerNorm",
    "MixedFusedLayerNorm",
    "MultiHeadAttention",
    "implementations",
    "jit",
    "op_builder",
]
