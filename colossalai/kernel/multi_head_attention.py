"""``MultiHeadAttention``: the attention half of a transformer layer, with its norm and its residual."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from colossalai._numeric import autocast_dtype


class MultiHeadAttention(nn.Module):
    """``x + dropout(attention(norm(x)))`` with ``norm_first``, otherwise ``norm(x + dropout(attention(x)))``.

    PyTorch's fused attention computes the product.

    Args:
        hidden_size: features of the input, a multiple of ``nhead``.
        batch_size, max_seq_len: the largest batch and the longest sequence that will come.
        dropout: of the weights of attention, and of what it adds to the input.
        fp16: weights and input in fp16; otherwise float32.
        pg: only a group of one rank; a model is cut over ranks by ``colossalai.nn`` and ``parallelize``.
    """

    def __init__(
        self,
        hidden_size: int,
        nhead: int,
        batch_size: int,
        max_seq_len: int,
        dropout: float = 0.0,
        norm_first: bool = False,
        fp16: bool = True,
        pg: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if hidden_size % nhead:
            raise ValueError(f"hidden_size {hidden_size} is not a multiple of nhead {nhead}")
        if pg is not None and dist.get_world_size(pg) > 1:
            raise NotImplementedError(
                f"MultiHeadAttention does not cut its heads over the {dist.get_world_size(pg)} ranks of pg;"
                " build the layer without pg, and cut the model by colossalai.nn.parallelize or with the"
                " layers of colossalai.nn"
            )
        self.nhead, self.max_batch, self.max_seq_len = nhead, batch_size, max_seq_len
        self.dropout, self.norm_first = dropout, norm_first
        dtype = torch.float16 if fp16 else torch.float32
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, dtype=dtype)
        self.out = nn.Linear(hidden_size, hidden_size, dtype=dtype)
        self.norm = nn.LayerNorm(hidden_size, dtype=dtype)
        for layer in (self.qkv, self.out):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, hidden_states: Tensor, encoder_padding_mask: Tensor | None = None) -> Tensor:
        """Of (batch, sequence, features).

        ``encoder_padding_mask`` (batch, sequence) is true, or 1 in any dtype, for keys that do not count.  A
        float mask with other values than 0 and 1 is added to the scores.
        """
        self._check(hidden_states)
        x = self.norm(hidden_states) if self.norm_first else hidden_states
        batch, length, features = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.nhead, -1).permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        attended = attention(q, k, v, encoder_padding_mask, rate)
        y = self.out(attended.transpose(1, 2).reshape(batch, length, features))
        y = hidden_states + F.dropout(y, self.dropout, self.training)
        return y if self.norm_first else self.norm(y)

    def _check(self, x: Tensor) -> None:
        if x.dim() != 3 or x.size(0) > self.max_batch or x.size(1) > self.max_seq_len:
            raise ValueError(
                f"MultiHeadAttention was built for (batch, sequence, features) up to {self.max_batch} x"
                f" {self.max_seq_len}, got {tuple(x.shape)}; raise batch_size or max_seq_len"
            )
        if x.dtype is not self.qkv.weight.dtype and autocast_dtype(x.device) is None:
            raise TypeError(
                f"MultiHeadAttention has weights of {self.qkv.weight.dtype}, got input of {x.dtype}; cast"
                " it, or choose fp16 accordingly"
            )


def attention(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """Attention of (batch, heads, sequence, features) by PyTorch's fused kernel, without the keys that
    ``padding`` (batch, sequence) names.
    """
    mask = None
    if padding is not None:
        mask = _kept_or_added(padding, q.dtype)[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)


def _kept_or_added(padding: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as PyTorch's attention takes it: true for keys that count, or numbers that are added."""
    if padding.dtype is torch.bool:
        return ~padding
    if bool(((padding == 0) | (padding == 1)).all()):  # 1 is padding; added to a score it would hide nothing
        return padding == 0
    if not padding.is_floating_point():
        raise ValueError(
            f"a padding mask of {padding.dtype} has 1 for keys that do not count and 0 for the others, got"
            f" values from {int(padding.min())} to {int(padding.max())}; give a bool mask, or a float mask"
            " that is added to the scores"
        )
    return padding.to(dtype)
