"""GPT-2 and GPT-3: a decoder-only transformer with learnt positions and a tied output head.

``embed -> blocks -> norm -> head``; the layers are in ``titans.layer``, the published sizes at the end of
this file.  Parameters of a model with vocabulary V, positions P, width h, depth L and ``mlp_ratio`` 4: ``V h
+ P h + L (12 h^2 + 13 h) + 2 h``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from colossalai.nn import partition_batch
from colossalai.nn.modes import current
from colossalai.nn.sequence import current_sequence
from titans.layer.basic import layer_norm, residual_std, routed_tokens
from titans.layer.block import Checkpoint, GPTBlock
from titans.layer.embedding import GPTEmbedding
from titans.layer.head import GPTLMHead
from titans.loss.lm_loss import GPTLMLoss

__all__ = ["GPT", "GPTLMLoss", "gpt2_8B", "gpt2_large", "gpt2_medium", "gpt2_small", "gpt2_xl", "gpt3"]


class GPT(nn.Module):
    """A GPT language model; ``model(input_ids)`` returns logits of shape (batch, sequence, vocab_size).

    ``dtype`` is the type of the weights; ``checkpoint`` and ``activation_offload`` save memory (see
    ``GPTBlock``); ``fuse_scale_mask_softmax`` insists on a fused attention kernel (see ``GPTSelfAttention``);
    ``tied``: the head scores words by their embeddings; ``embed_split_hidden``: under tensor parallelism the
    word embedding is cut along its features, not along the vocabulary; ``block`` builds each block, from its
    number and the arguments of ``GPTBlock``.

    Under tensor parallelism every rank of the model gets the whole batch, and the logits are this rank's part
    of the rows and, for a large vocabulary, of the words; the losses of ``colossalai.nn`` and ``GPTLMLoss``
    take them as they are.  So it is where sequences are cut: the logits are those of this rank's tokens.
    """

    def __init__(
        self,
        vocab_size: int = 50304,
        max_position_embeddings: int = 1024,
        hidden_size: int = 768,
        num_heads: int = 12,
        depth: int = 12,
        mlp_ratio: float = 4.0,
        dropout: float = 0.1,
        embedding_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        activation: Callable[[Tensor], Tensor] = gelu,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        bias: bool = True,
        apply_post_layernorm: bool = False,
        fuse_scale_mask_softmax: bool = False,
        checkpoint: Checkpoint = False,
        activation_offload: bool = False,
        tied: bool = True,
        embed_split_hidden: bool = False,
        block: Callable[..., GPTBlock] | None = None,
    ) -> None:
        super().__init__()
        if depth < 1:
            raise ValueError(f"a GPT needs at least one block, got depth={depth}")
        self.place, self.sequence = current()._asdict(), current_sequence()
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.embed = GPTEmbedding(
            hidden_size,
            vocab_size,
            max_position_embeddings,
            padding_idx=padding_idx,
            dropout=embedding_dropout,
            dtype=dtype,
            split_hidden=embed_split_hidden,
        )
        build = block or _block
        self.blocks = nn.ModuleList(
            build(
                number,
                hidden_size=hidden_size,
                num_heads=num_heads,
                mlp_ratio=mlp_ratio,
                activation=activation,
                attention_dropout=attention_dropout,
                dropout=dropout,
                layernorm_epsilon=layernorm_epsilon,
                dtype=dtype,
                bias=bias,
                apply_post_layernorm=apply_post_layernorm,
                fuse_scale_mask_softmax=fuse_scale_mask_softmax,
                checkpoint=checkpoint,
                activation_offload=activation_offload,
                output_std=residual_std(depth),
            )
            for number in range(depth)
        )
        self.norm = layer_norm(hidden_size, eps=layernorm_epsilon, dtype=dtype)
        weight = self.embed.word_embeddings.weight if tied else None
        self.head = GPTLMHead(hidden_size, vocab_size, weight=weight, dtype=dtype)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Logits (batch, sequence, vocab_size) for ``input_ids`` (batch, sequence).

        ``attention_mask`` (batch, sequence) is 1 at real tokens and 0 at padding, on either side.  Positions
        are counted from a row's first real token, so padding changes no logit of a real token; the logits at
        padding have no meaning.  ``position_ids`` (batch, sequence) says it otherwise.
        """
        return run_layers(self, None, input_ids, attention_mask, position_ids)


def _block(number: int, **options: Any) -> GPTBlock:
    return GPTBlock(**options)


def run_layers(
    model: Any,
    x: Tensor | None,
    input_ids: Tensor | None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Tensor:
    """What ``model``, a GPT or some of its layers one after the other, makes of ``x`` or, with an embedding,
    of ``input_ids``.
    """
    given, name = (x, "hidden_states") if model.embed is None else (input_ids, "input_ids")
    if given is None:
        raise ValueError(f"{type(model).__name__} needs {name}, got None")
    mask = real = None
    if position_ids is not None:
        position_ids = partition_batch(position_ids, **model.place)
    if attention_mask is not None:
        mask = as_key_mask(attention_mask, input_ids)  # (batch, 1, 1, seq)
        real = mask[:, 0, 0]  # (batch, seq)
        if position_ids is None:
            position_ids = partition_batch((real.long().cumsum(dim=-1) - 1).clamp(min=0), **model.place)
        if model.sequence is not None:
            mask = model.sequence.documents(real, causal=True)
        mask = partition_batch(mask, at="inner", **model.place)
    if model.embed is not None:
        x = model.embed(partition_batch(input_ids, **model.place), position_ids)  # (batch, seq, hidden)
    assert x is not None
    routed = None
    if any(block.routes for block in model.blocks.children()):
        known = attention_mask if input_ids is None else input_ids
        length = None if known is None else known.size(1)
        routed = routed_tokens(x, real, length, model.place, model.sequence)
    for block in model.blocks.children():
        x, _ = block(x, mask, routed)
    return x if model.head is None else model.head(model.norm(x))  # (batch, seq, vocab)


def as_key_mask(attention_mask: Tensor, input_ids: Tensor | None) -> Tensor:
    """``input_ids`` may be missing after the first stage of a pipeline, which has seen them."""
    wrong = input_ids is not None and attention_mask.shape != input_ids.shape
    if wrong or attention_mask.is_floating_point():
        ids = "(batch, sequence)" if input_ids is None else str(tuple(input_ids.shape))
        raise ValueError(
            "attention_mask must be a bool or integer tensor of the shape of input_ids, "
            f"{ids}, with 1 at real tokens and 0 at padding; got "
            f"{attention_mask.dtype} of shape {tuple(attention_mask.shape)}"
        )
    return attention_mask.bool()[:, None, None, :]


# name -> what differs from GPT's defaults.  The GPT-2 rows up to xl and GPT-3 are the sizes their papers
# give; 8B is Megatron-LM's.
_SIZES: dict[str, dict[str, int]] = {
    "gpt2_small": {"hidden_size": 768, "depth": 12, "num_heads": 12},
    "gpt2_medium": {"hidden_size": 1024, "depth": 24, "num_heads": 16},
    "gpt2_large": {"hidden_size": 1280, "depth": 36, "num_heads": 20},
    "gpt2_xl": {"hidden_size": 1600, "depth": 48, "num_heads": 25},
    "gpt2_8B": {"hidden_size": 3072, "depth": 72, "num_heads": 24},
    "gpt3": {"hidden_size": 12288, "depth": 96, "num_heads": 96, "max_position_embeddings": 2048},
}


def _build(size: str, changes: dict[str, Any]) -> GPT:
    return GPT(**{**_SIZES[size], **changes})


def gpt2_small(**kwargs: Any) -> GPT:
    """124 million parameters; keyword arguments go to ``GPT``."""
    return _build("gpt2_small", kwargs)


def gpt2_medium(**kwargs: Any) -> GPT:
    """355 million parameters; keyword arguments go to ``GPT``."""
    return _build("gpt2_medium", kwargs)


def gpt2_large(**kwargs: Any) -> GPT:
    """774 million parameters; keyword arguments go to ``GPT``."""
    return _build("gpt2_large", kwargs)


def gpt2_xl(**kwargs: Any) -> GPT:
    """1.6 billion parameters; its 25 heads cannot be shared by 2 devices, ``num_heads=32`` can."""
    return _build("gpt2_xl", kwargs)


def gpt2_8B(**kwargs: Any) -> GPT:
    """8.3 billion parameters; keyword arguments go to ``GPT``."""
    return _build("gpt2_8B", kwargs)


def gpt3(**kwargs: Any) -> GPT:
    """175 billion parameters; keyword arguments go to ``GPT``."""
    return _build("gpt3", kwargs)
