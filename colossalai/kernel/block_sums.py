"""Sums of blocks of rows, of which each covers a part of the rows of the result, in one pass over memory.

Ring attention adds up what it computes with the keys of each rank: outputs, weighted by their log-sum-exps,
and gradients.  ``available`` says where the kernel runs; elsewhere ``nn.attention`` composes the same from
operations of PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from colossalai.kernel.probe import triton_works

AT_ONCE = 4
"""How many blocks the kernel adds at once."""


class Block(NamedTuple):
    """Rows of a result (batch, heads, rows, features), from the row ``start`` on."""

    start: int
    values: Tensor
    lse: Tensor | None = None
    """The log-sum-exp of each row, (batch, heads, rows), by which blocks are weighted."""


def available(values: Tensor) -> bool:
    """Whether the kernel adds up tensors like ``values``."""
    if not values.is_cuda or values.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    # the compiler fuses the operations of PyTorch itself
    return not torch.compiler.is_compiling() and values.size(-1) <= 256 and triton_works()


def add_blocks(blocks: Sequence[Block], old: Tensor | None, out: Tensor, lse: Tensor | None = None) -> Tensor:
    """``out``, which becomes ``old`` (None for zeros) plus ``blocks``, at most ``AT_ONCE``, in float32.

    With ``lse`` (batch, heads, rows), the log-sum-exps of ``old``, all are weighted by their shares in the
    sum of exponentials, whose logarithm replaces ``lse``.  ``out`` may be ``old``.
    """
    from colossalai.kernel import triton_block_sums

    return triton_block_sums.add_blocks(blocks, old, out, lse)
