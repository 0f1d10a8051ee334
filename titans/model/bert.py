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
from colossalai.nn.sequence import SequenceParallel, current_sequence
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
        self.place, self.sequence = current()._asdict(), current_sequence()
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
        return run_layers(self, None, input_ids, attention_mask, token_type_ids)

    def encode(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """One vector for each token, (batch, sequence, hidden_size), or for each of this rank's tokens where
        sequences are cut.
        """
        return run_blocks(self, None, input_ids, attention_mask, token_type_ids)


def run_layers(
    model: Any,
    x: Tensor | None,
    input_ids: Tensor | None,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
) -> Tensor:
    """What ``model``, a BERT or some of its layers one after the other, makes of ``x`` or, with an embedding,
    of ``input_ids``.
    """
    x = run_blocks(model, x, input_ids, attention_mask, token_type_ids)
    return x if model.head is None else model.head(x)


def run_blocks(
    model: Any,
    x: Tensor | None,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    token_type_ids: Tensor | None,
) -> Tensor:
    given, name = (x, "hidden_states") if model.embed is None else (input_ids, "input_ids")
    if given is None:
        raise ValueError(f"{type(model).__name__} needs {name}, got None")
    mask = None if attention_mask is None else as_key_mask(attention_mask, input_ids)
    if model.sequence is not None:
        mask = _documents(model.sequence, input_ids, mask)
    if mask is not None:
        # (batch, 1, 1, seq): a padding token may look at the real ones, so no row of scores is empty
        mask = partition_batch(mask, at="inner", **model.place)
    if model.embed is not None:
        x = model.embed(*partition_batch((input_ids, token_type_ids), **model.place))
    for block in model.blocks.children():
        x, _ = block(x, mask)
    assert x is not None
    return x


def _documents(
    sequence: SequenceParallel, input_ids: Tensor | None, key_mask: Tensor | None
) -> Tensor | None:
    """Which tokens of a sequence that is cut are real; None if all are, and nothing was added to them."""
    if key_mask is not None:
        return sequence.documents(key_mask[:, 0, 0], causal=False)
    if input_ids is None:
        raise ValueError(
            "where sequences are cut, each stage of a BERT needs to know how long they are: give the engine"
            " batches that are dicts with input_ids, which reach all stages"
        )
    if sequence.padded(input_ids.shape[1]) == input_ids.shape[1]:
        return None
    return sequence.documents(torch.ones_like(input_ids, dtype=torch.bool), causal=False)


def bert_base(**kwargs: Any) -> BERT:
    """110 million parameters; keyword arguments go to ``BERT``."""
    return BERT(**kwargs)


def bert_large(**kwargs: Any) -> BERT:
    """335 million parameters; keyword arguments go to ``BERT``."""
    return BERT(**{"hidden_size": 1024, "num_heads": 16, "depth": 24, **kwargs})
