"""Self-attention: every token looks at all tokens or, if causal, at itself and at the tokens before it.

``softmax(Q K^T / sqrt(d) + mask) V`` is one call of torch's ``scaled_dot_product_attention``, which picks a
fused kernel where it has one.  Queries, keys and values come from one matrix product; its output holds the
three blocks one after the other, ``[Q | K | V]``, and each block holds the heads one after the other.

Under tensor parallelism a rank computes some of the heads, for some of the rows of the batch, and needs no
other rank: ``head_dim`` is a property of the model, how many heads there are here follows from the plan.
Where sequences are cut, a rank has the queries of its tokens and asks the others for their keys and values
(:mod:`colossalai.nn.attention`).
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from colossalai.nn import Dropout, local_heads
from colossalai.nn.attention import sequence_attention
from colossalai.nn.attention.pages import Attends
from colossalai.nn.layer.dropout import exact_stream
from colossalai.nn.modes import current
from colossalai.nn.sequence import SequenceParallel, current_sequence
from titans.layer.basic import INIT_STD, linear
from titans.layer.basic import dropout as residual_dropout

FUSED_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


def causal_mask(attention_mask: Tensor, length: int) -> Tensor:
    """Join a mask over keys with the causal one; the result broadcasts to (batch, heads, query, key).

    ``attention_mask`` broadcasts to the same shape, usually as (batch, 1, 1, key): bool (True: may be looked
    at) or floating (added to the scores).
    """
    causal = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device).tril()
    if attention_mask.dtype != torch.bool:
        return attention_mask.masked_fill(~causal, float("-inf"))
    # A padding token may look at itself: a row with nothing to look at would be 0 / 0, and the NaN would
    # reach the gradients of every weight.
    itself = torch.eye(length, dtype=torch.bool, device=attention_mask.device)
    return attention_mask & causal | itself


class SelfAttention(nn.Module):
    """Multi-head self-attention; a subclass says whether it is causal.

    With ``fuse_scale_mask_softmax`` only torch's fused kernels are used, which never store the
    (sequence x sequence) scores; where none fits, an error says so.  Without it torch chooses freely.  Where
    sequences are cut, no rank has such scores in either case, and the mask is made of documents
    (``SequenceParallel.documents``).
    """

    causal: ClassVar[bool]
    pages: ClassVar[Attends | None] = None
    """Stands in for its attention while a generator runs the model."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        bias: bool = True,
        fuse_scale_mask_softmax: bool = False,
        dtype: torch.dtype | None = None,
        output_std: float = INIT_STD,
    ) -> None:
        super().__init__()
        if num_heads < 1 or hidden_size % num_heads:
            raise ValueError(
                f"hidden_size={hidden_size} is not divisible by num_heads={num_heads}; "
                "every head gets an equal share, so choose a multiple"
            )
        self.num_heads = num_heads
        self.sequence = current_sequence()
        self.local_heads, self.head_dim = local_heads(num_heads), hidden_size // num_heads
        scores = current().tp.heads  # (batch, heads, query, key)
        if self.sequence is not None:
            scores = self.sequence.cutting(scores, 2)
        self.attention_dropout = Dropout(attention_dropout, layout=scores)
        self.fuse_scale_mask_softmax = fuse_scale_mask_softmax
        self.query_key_value = linear(
            hidden_size, 3 * hidden_size, role="expand", fused=3, bias=bias, dtype=dtype
        )
        self.dense = linear(hidden_size, hidden_size, role="contract", bias=bias, dtype=dtype, std=output_std)
        self.dropout = residual_dropout(dropout)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        qkv = self.query_key_value(x)  # (batch, seq, 3 * hidden)
        # view, not unflatten: torch.compile cannot always trace the latter
        qkv = qkv.view(*qkv.shape[:-1], 3, self.local_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, seq, head_dim)
        y = self._attend(q, k, v, attention_mask)  # (batch, heads, seq, head_dim)
        return self.dropout(self.dense(y.transpose(1, 2).flatten(2)))  # (batch, seq, hidden)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        if self.pages is not None:
            found = self.pages.attend(self, q, k, v, scale=1 / math.sqrt(self.head_dim))
            return found.transpose(1, 2)
        mask = attention_mask
        dropout = self.attention_dropout.p if self.training else 0.0
        if self.sequence is not None:
            return self._attend_across(q, k, v, mask, dropout, self.sequence)
        if mask is not None and self.causal:
            mask = causal_mask(mask, q.shape[2])
        if dropout and exact_stream() is not None:
            return self._attend_step_by_step(q, k, v, mask)

        def attend() -> Tensor:
            with self.attention_dropout.own_stream():
                return scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=self.causal and mask is None
                )

        if not self.fuse_scale_mask_softmax:
            return attend()
        try:
            with sdpa_kernel(FUSED_BACKENDS):
                return attend()
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            raise RuntimeError(
                f"fuse_scale_mask_softmax=True, but torch has no fused attention kernel for {q.dtype} on "
                f"{q.device.type} with head size {q.shape[-1]} and attention dropout {dropout}; "
                "set fuse_scale_mask_softmax=False (on a CPU, attention_dropout=0 also helps)"
            ) from error

    def _attend_across(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, p: float, sequence: SequenceParallel
    ) -> Tensor:
        if p and exact_stream() is not None:
            raise ValueError(
                f"attention_dropout={p} inside plan_independent_dropout: attention over a cut sequence"
                " draws masks block by block, which no other plan does; set attention_dropout=0 to compare"
                " plans"
            )
        with self.attention_dropout.own_stream():
            return sequence_attention(
                q,
                k,
                v,
                sequence.mesh,
                ring=sequence.ring,
                heads=sequence.heads,
                causal=self.causal,
                documents=documents,
                dropout_p=p,
            )

    def _attend_step_by_step(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The same with a dropout that is alike under every plan, which torch's kernels do not have."""
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)  # (batch, heads, query, key)
        if mask is None and self.causal:
            mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        return self.attention_dropout(scores.softmax(-1)) @ v


class GPTSelfAttention(SelfAttention):
    """A token looks at itself and at the tokens before it."""

    causal = True


class ViTSelfAttention(SelfAttention):
    """A token looks at all tokens."""

    causal = False
