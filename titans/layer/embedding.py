"""Token ids, or the patches of an image, to vectors; a learnt vector of the position is added to each.

Where the launched job cuts sequences, these layers take whole ones and return the vectors of this rank's
tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from colossalai.nn.sequence import current_sequence
from titans.layer.basic import dropout as residual_dropout
from titans.layer.basic import embedding, layer_norm, own_tokens, patches


class GPTEmbedding(nn.Module):
    """``word_embeddings[input_ids] + position_embeddings[position_ids]``, then dropout.

    Without ``position_ids`` the tokens of a row are numbered 0, 1, 2, ...
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        max_position_embeddings: int,
        padding_idx: int | None = None,
        dropout: float = 0.0,
        dtype: torch.dtype | None = None,
        split_hidden: bool = False,
    ) -> None:
        super().__init__()
        if padding_idx is not None and not 0 <= padding_idx < vocab_size:
            raise ValueError(
                f"padding_idx is {padding_idx}, but token ids go from 0 to {vocab_size - 1}; "
                "choose an id of the vocabulary or None"
            )
        self.sequence = current_sequence()
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.word_embeddings = embedding(
            vocab_size, hidden_size, padding_idx=padding_idx, dtype=dtype, split_hidden=split_hidden
        )
        self.position_embeddings = embedding(max_position_embeddings, hidden_size, dtype=dtype)
        self.dropout = residual_dropout(dropout)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        self._check(input_ids, position_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)  # (seq,)
        words = self.word_embeddings(own_tokens(input_ids, self.sequence))  # (batch, seq, hidden)
        # (seq, hidden) or (batch, seq, hidden)
        positions = self.position_embeddings(own_tokens(position_ids, self.sequence, -1))
        return self.dropout(words + positions)

    def _check(self, input_ids: Tensor, position_ids: Tensor | None = None) -> None:
        if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                "input_ids must be an int64 or int32 tensor of shape (batch, sequence), "
                f"got {input_ids.dtype} of shape {tuple(input_ids.shape)}"
            )
        length = input_ids.shape[1]
        if length > self.max_position_embeddings and position_ids is not None:
            length = int(position_ids.max()) + 1  # several texts in one row
        if length > self.max_position_embeddings:
            raise ValueError(
                f"input_ids has {length} tokens per row, but the model has "
                f"max_position_embeddings={self.max_position_embeddings}; "
                "shorten the rows or build the model with more positions"
            )
        # Reading the ids of a GPU would stall it in every step; there the lookup itself asserts.
        if input_ids.device.type == "cpu" and input_ids.numel() and not torch.compiler.is_compiling():
            low, high = int(input_ids.min()), int(input_ids.max())
            if low < 0 or high >= self.vocab_size:
                raise ValueError(
                    f"input_ids holds values from {low} to {high}, but vocab_size={self.vocab_size} "
                    f"allows 0 to {self.vocab_size - 1}; check the tokenizer"
                )


class BertEmbedding(GPTEmbedding):
    """Words, positions and the types of tokens (first or second sentence), then a layer norm and dropout."""

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        max_position_embeddings: int,
        num_token_types: int = 2,
        padding_idx: int | None = None,
        dropout: float = 0.0,
        layernorm_epsilon: float = 1e-12,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, vocab_size, max_position_embeddings, padding_idx, dropout, dtype)
        self.token_type_embeddings = embedding(num_token_types, hidden_size, dtype=dtype)
        self.norm = layer_norm(hidden_size, eps=layernorm_epsilon, dtype=dtype)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        self._check(input_ids)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)  # (seq,)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(positions)  # the first type, for all rows
        input_ids, positions, token_type_ids = (
            own_tokens(ids, self.sequence, -1) for ids in (input_ids, positions, token_type_ids)
        )
        x = self.word_embeddings(input_ids) + self.position_embeddings(positions)  # (batch, seq, hidden)
        return self.dropout(self.norm(x + self.token_type_embeddings(token_type_ids)))


class ViTEmbedding(nn.Module):
    """The patches of an image as tokens, after a class token; each with its position, then dropout."""

    def __init__(
        self,
        img_size: int,
        patch_size: int,
        in_chans: int,
        hidden_size: int,
        dropout: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.sequence = current_sequence()
        self.patch_embed = patches(img_size, patch_size, in_chans, hidden_size, dtype=dtype)
        self.dropout = residual_dropout(dropout)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images)  # (batch, 1 + patches, hidden)
        return self.dropout(own_tokens(x, self.sequence))
