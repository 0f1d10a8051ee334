"""A model that an engine may ask for scores or for tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from colossalai.inference import Generator, Sampling


class GeneratingModel(nn.Module):
    """This rank's part of a language model.

    Called with ``max_tokens`` it writes: a list of rows without padding, each a prompt and what follows.
    Called without, it is the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config = getattr(model, "config", None)
        self._generators: dict[int, Generator] = {}

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        if "max_tokens" in keywords:
            return self.generate_batch(*arguments, **keywords)
        return self.model(*arguments, **keywords)

    def generate_batch(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_tokens: int,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float | None = None,
    ) -> list[Tensor]:
        """Continue each row up to ``max_tokens``, counted with the padding on its left, or to the last
        position of the model.

        Without ``temperature`` tokens are drawn as the model says; ``temperature=0`` takes the most likely.
        All ranks of the model call it.
        """
        ids = torch.as_tensor(input_ids)
        ids = ids[None] if ids.ndim == 1 else ids
        mask = torch.ones_like(ids)
        if attention_mask is not None:
            mask = torch.as_tensor(attention_mask).view(ids.shape)
        new = max_tokens - ids.shape[1]
        if new < 1:
            raise ValueError(
                f"max_tokens is the length of a whole row: {max_tokens} leaves nothing to write behind"
                f" rows of {ids.shape[1]} tokens"
            )
        prompts = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
        sampling = Sampling(
            max_tokens=new,
            top_k=top_k or 0,
            top_p=1.0 if top_p is None else top_p,
            temperature=1.0 if temperature is None else temperature,
        )
        done = self._generator(len(prompts)).generate(prompts, sampling)
        return [torch.tensor([*prompt, *one.tokens]) for prompt, one in zip(prompts, done, strict=True)]

    def _generator(self, rows: int) -> Generator:
        """One for the largest batch so far; a larger one takes its place."""
        room = 1 << (rows - 1).bit_length()
        if room not in self._generators:
            for old in self._generators.values():
                old.close()
            self._generators = {room: Generator(self.model, max_requests=room)}
        return self._generators[room]
