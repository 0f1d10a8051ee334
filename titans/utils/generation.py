"""Text from a language model, one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from titans.model.gpt import GPT


@torch.no_grad()
def generate(
    model: GPT,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int | None = None,
) -> Tensor:
    """``input_ids`` (batch, sequence) followed by ``max_new_tokens`` tokens that the model chose.

    Each is drawn from ``softmax(logits / temperature)`` over the ``top_k`` most likely tokens (None: over
    all); ``temperature=0`` always takes the most likely one.  The model sees the last
    ``max_position_embeddings`` tokens.  With ``seed`` the draws repeat and do not touch torch's global
    generator.  Where sequences are cut, all ranks of a sequence give the same ``input_ids`` and ``seed``.
    """
    _check(input_ids, max_new_tokens, temperature, top_k)
    generator = None
    if seed is not None:
        generator = torch.Generator(device=input_ids.device).manual_seed(seed)
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            logits = _next_scores(model, input_ids[:, -model.max_position_embeddings :])
            token = _choose(logits.float(), temperature, top_k, generator)  # (batch, 1)
            input_ids = torch.cat([input_ids, token], dim=1)
    finally:
        model.train(was_training)
    return input_ids


def _next_scores(model: GPT, input_ids: Tensor) -> Tensor:
    """The scores (batch, vocab) of what follows the last token, on every rank."""
    logits, sequence, length = model(input_ids), model.sequence, input_ids.shape[1]
    last = logits[:, -1]
    if sequence is not None:
        places = sequence.positions(length, logits.device, padding=-1)
        here = places == length - 1  # True on one rank, for one token
        last = sequence.total(logits[:, here.int().argmax()] * here.any())
    if last.shape != (len(input_ids), model.vocab_size):
        raise ValueError(
            f"generate needs the scores of all {model.vocab_size} words for {len(input_ids)} rows, but this"
            f" rank has {tuple(last.shape)}: tensor parallelism cuts them; generate with a whole model"
        )
    return last


def _choose(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        # by the k-th largest value and not by index, so that the order of the vocabulary plays no part in
        # ties
        smallest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)


def _check(input_ids: Tensor, max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise ValueError(
            "generate needs input_ids of shape (batch, sequence) with at least one token to start from, "
            f"got shape {tuple(input_ids.shape)}"
        )
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be 0 or more, got {max_new_tokens}")
    if not temperature >= 0:
        raise ValueError(f"temperature must be 0 (greedy) or more, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, or None for all tokens, got {top_k}")
