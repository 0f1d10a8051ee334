"""BERT: an encoder that predicts the words that were masked out of a text.

``embed -> blocks -> head``; the layers are in ``titans.layer``.  Parameters of a model with vocabulary V,
positions P, T types of tokens, width h, depth L, ``mlp_ratio`` 4 and a tied head: ``(V + P + T) h + 2 h + L
(12 h^2 + 13 h) + h^2 + 3 h + V``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from colossalai.nn import partition_batch
from colossalai.nn.modes import current
from titans.layer.block import BertBlock, Checkpoint
from titans.layer.embedding import BertEmbedding
from titans.layer.head import BertLMHead
from titans.model.gpt import as_key_mask

__all__ = ["BERT", "bert_base", "bert_large"]


class BERT(nn.Module):
    """A masked language model; ``model(input_ids)`` returns logits of shape (batch, sequence, vocab_size).

    Train it with ``colossalai.nn.CrossEntropyLoss()`` and labels that are -100 wherever a word was not
    masked. ``checkpoint`` and ``activation_offload`` save memory (see ``TransformerBlock``); ``tied``: the
    head scores words by their embeddings.  Under tensor parallelism every rank of the model gets the whole
    batch (see ``GPT``).
    """

    def __init__(
        self,
        vocab_size: int = 30522,
        max_position_embeddings: int = 512,
        hidden_size: int = 768,
        num_heads: int = 12,
        depth: int = 12,
        mlp_ratio: float = 4.0,
        num_token_types: int = 2,
        dropout: float = 0.1,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-12,
        activation: Callable[[Tensor], Tensor] = gelu,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        checkpoint: Checkpoint = False,
        activation_offload: bool = False,
        tied: bool = True,
    ) -> None:
        super().__init__()
        if depth < 1:
            raise ValueError(f"a BERT needs at least one block, got depth={depth}")
        self.place = current()._asdict()
        self.embed = BertEmbedding(
            hidden_size,
            vocab_size,
            max_position_embeddings,
            num_token_types,
            padding_idx=padding_idx,
            dropout=dropout,
            layernorm_epsilon=layernorm_epsilon,
            dtype=dtype,
        )
        self.blocks = nn.ModuleList(
            BertBlock(
                hidden_size,
                num_heads,
                mlp_ratio=mlp_ratio,
                activation=activation,
                attention_dropout=attention_dropout,
                dropout=dropout,
                layernorm_epsilon=layernorm_epsilon,
                dtype=dtype,
                checkpoint=checkpoint,
                activation_offload=activation_offload,
            )
            for _ in range(depth)
        )
        self.head = BertLMHead(
            hidden_size,
            vocab_size,
            weight=self.embed.word_embeddings.weight if tied else None,
            activation=activation,
            layernorm_epsilon=layernorm_epsilon,
            dtype=dtype,
        )

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Logits for ``input_ids`` (batch, sequence); ``attention_mask`` is 1 at real tokens and 0 at
        padding.
        """
        return self.head(self.encode(input_ids, attention_mask, token_type_ids))

    def encode(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """One vector for each token, (batch, sequence, hidden_size)."""
        key_mask = None
        if attention_mask is not None:
            # (batch, 1, 1, seq): a padding token may look at the real ones, so no row of scores is empty
            key_mask = partition_batch(as_key_mask(attention_mask, input_ids), at="inner", **self.place)
        x = self.embed(*partition_batch((input_ids, token_type_ids), **self.place))
        for block in self.blocks:
            x, _ = block(x, key_mask)
        return x


def bert_base(**kwargs: Any) -> BERT:
    """110 million parameters; keyword arguments go to ``BERT``."""
    return BERT(**kwargs)


def bert_large(**kwargs: Any) -> BERT:
    """335 million parameters; keyword arguments go to ``BERT``."""
    return BERT(**{"hidden_size": 1024, "num_heads": 16, "depth": 24, **kwargs})
