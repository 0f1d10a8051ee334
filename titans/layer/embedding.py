"""Token ids, or the patches of an image, to vectors; a learnt vector of the position is added to each."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titans.layer.basic import INIT_STD, embedding, patches


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
    ) -> None:
        super().__init__()
        if padding_idx is not None and not 0 <= padding_idx < vocab_size:
            raise ValueError(
                f"padding_idx is {padding_idx}, but token ids go from 0 to {vocab_size - 1}; "
                "choose an id of the vocabulary or None"
            )
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.word_embeddings = embedding(vocab_size, hidden_size, padding_idx=padding_idx, dtype=dtype)
        self.position_embeddings = embedding(max_position_embeddings, hidden_size, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        self._check(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)  # (seq,)
        words = self.word_embeddings(input_ids)  # (batch, seq, hidden)
        positions = self.position_embeddings(position_ids)  # (seq, hidden) or (batch, seq, hidden)
        return self.dropout(words + positions)

    def _check(self, input_ids: Tensor) -> None:
        if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                "input_ids must be an int64 or int32 tensor of shape (batch, sequence), "
                f"got {input_ids.dtype} of shape {tuple(input_ids.shape)}"
            )
        length = input_ids.shape[1]
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
        if patch_size < 1 or img_size < patch_size or img_size % patch_size:
            raise ValueError(
                f"img_size={img_size} is not a multiple of patch_size={patch_size}; patches must cover the image"
            )
        self.in_chans, self.img_size = in_chans, img_size
        tokens = (img_size // patch_size) ** 2 + 1
        self.patch_embed = patches(in_chans, hidden_size, patch_size, dtype=dtype)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, hidden_size, dtype=dtype))
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, hidden_size, dtype=dtype))
        nn.init.trunc_normal_(self.pos_embed, std=INIT_STD)
        self.dropout = nn.Dropout(dropout)

    def forward(self, images: Tensor) -> Tensor:
        expected = (self.in_chans, self.img_size, self.img_size)
        if images.dim() != 4 or tuple(images.shape[1:]) != expected:
            raise ValueError(
                f"this ViT needs images of shape (batch, {', '.join(map(str, expected))}), got"
                f" {tuple(images.shape)}; resize them, or build the model with their img_size and in_chans"
            )
        x = self.patch_embed(images).flatten(2).transpose(1, 2)  # (batch, patches, hidden)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)  # (batch, 1 + patches, hidden)
        return self.dropout(x + self.pos_embed)
