"""Tokens to the places of experts and back, as pairs of functions.

A token i with ``mask[i]`` not 0 goes to the row ``dest_idx[i]`` of the experts' rows, which lie expert by
expert, ``c`` rows each.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cumsum_sub_one(mask: Tensor) -> Tensor:
    """How many rows before each have a 1, column by column: the place of a token in the queue of an
    expert.
    """
    return mask.cumsum(0) - 1


def dispatch_forward(s: int, ec: int, h: int, batch_tokens: Tensor, mask: Tensor, dest_idx: Tensor) -> Tensor:
    """The rows of the experts (ec, h), of tokens (s, h); a row without a token is 0."""
    return batch_tokens.new_zeros(ec, h).index_copy(0, *_sent(mask, dest_idx, batch_tokens))


def dispatch_backward(s: int, ec: int, h: int, expert_grad: Tensor, mask: Tensor, dest_idx: Tensor) -> Tensor:
    """The gradients of the tokens (s, h)."""
    return expert_grad[dest_idx.long()] * _column(mask, expert_grad)


def combine_forward(
    s: int, e: int, c: int, h: int, expert_tokens: Tensor, logits: Tensor, mask: Tensor, dest_idx: Tensor
) -> Tensor:
    """The tokens (s, h): each the row of its expert (e * c, h) times its entry of ``logits`` (s, e)."""
    weights = logits.gather(1, (dest_idx.long() // c)[:, None]).to(expert_tokens.dtype)
    return expert_tokens.reshape(e * c, h)[dest_idx.long()] * weights * _column(mask, expert_tokens)


def combine_backward(
    s: int,
    e: int,
    c: int,
    h: int,
    tokens_grad: Tensor,
    expert_tokens: Tensor,
    logits: Tensor,
    mask: Tensor,
    dest_idx: Tensor,
) -> tuple[Tensor, Tensor]:
    """The gradients of ``expert_tokens`` and ``logits``."""
    rows, owner = expert_tokens.reshape(e * c, h), (dest_idx.long() // c)[:, None]
    weighted = tokens_grad * logits.gather(1, owner).to(tokens_grad.dtype)
    expert_grad = torch.zeros_like(rows).index_copy(0, *_sent(mask, dest_idx, weighted))
    inner = (tokens_grad * rows[dest_idx.long()] * _column(mask, rows)).sum(1, keepdim=True)
    logits_grad = torch.zeros_like(logits).scatter(1, owner, inner.to(logits.dtype))
    return expert_grad.view_as(expert_tokens), logits_grad


def _sent(mask: Tensor, dest_idx: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    kept = mask.reshape(-1) != 0
    return dest_idx.long()[kept], rows[kept]


def _column(mask: Tensor, like: Tensor) -> Tensor:
    return (mask.reshape(-1, 1) != 0).to(like.dtype)
