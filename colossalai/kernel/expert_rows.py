"""Rows of experts on a GPU: added up for their tokens with weights, and activated with the biases of their
experts, in one kernel each.

A token has a row for each expert that it goes to, and rows lie expert by expert.  The kernels compute in
float32, whatever the rows are in.  ``available`` says where they run; elsewhere ``nn.layer.moe`` composes the
same from operations of PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from colossalai.kernel.probe import triton_works


def available(rows: Tensor) -> bool:
    """Whether the kernels compute with ``rows``."""
    if not rows.is_cuda or rows.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    # the compiler fuses the operations of PyTorch itself
    return not torch.compiler.is_compiling() and triton_works()


def add_rows(rows: Tensor, row: Tensor, weights: Tensor | None, kept: Tensor | None) -> Tensor:
    """For each token the sum of its rows, times their weights.

    Args:
        rows: (rows, features).
        row: the number of the row of each choice of a token, (tokens, k).
        weights: (tokens, k), or None for ones.
        kept: False for choices without a row, (tokens, k); None if all have one.
    """
    from colossalai.kernel import triton_expert_rows

    return triton_expert_rows.add_rows(rows, row, weights, kept)


def spread_rows(
    grad: Tensor, rows: Tensor, row: Tensor, weights: Tensor, kept: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of ``rows`` and ``weights`` in ``add_rows``, given that of its result; rows of no choice
    have a gradient of 0.
    """
    from colossalai.kernel import triton_expert_rows

    return triton_expert_rows.spread_rows(grad, rows, row, weights, kept)


def activate(wide: Tensor, bias: Tensor | None, expert: Tensor | None, kind: str, gated: bool) -> Tensor:
    """The activation ``kind`` of ``wide`` plus the bias of each row's expert.

    With ``gated``, ``wide`` has the gates in its first half of columns and what they multiply in the other.

    Args:
        bias: (experts, columns of ``wide``), or None.
        expert: the expert of each row, for its bias.
        kind: ``"none"``, ``"relu"``, ``"silu"`` or ``"gelu"``.
    """
    from colossalai.kernel import triton_expert_rows

    return triton_expert_rows.activate(wide, bias, expert, kind, gated)


def activate_backward(
    grad: Tensor, wide: Tensor, bias: Tensor | None, expert: Tensor | None, kind: str, gated: bool
) -> Tensor:
    """The gradient of ``wide`` in ``activate``, given that of its result."""
    from colossalai.kernel import triton_expert_rows

    return triton_expert_rows.activate_backward(grad, wide, bias, expert, kind, gated)


def sum_by_expert(rows: Tensor, ends: Tensor) -> Tensor:
    """For each expert the sum of its rows, which end before ``ends`` (experts,)."""
    from colossalai.kernel import triton_expert_rows

    return triton_expert_rows.sum_by_expert(rows, ends)
