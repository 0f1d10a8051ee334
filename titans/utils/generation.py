"""Text from a language model, one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from colossalai.inference import Generator, Sampling
from colossalai.inference.sampling import SamplingRows, choose
from colossalai.mesh import random_key
from titans.model.gpt import GPT


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
    generator.  All ranks that share the model, or its sequences, give the same ``input_ids`` and ``seed``.

    ``colossalai.inference.Generator``, which does the work, has more: stop strings, streams, requests that
    come and go.
    """
    _check(input_ids, max_new_tokens, temperature, top_k)
    if seed is None:
        seed = int(torch.randint(1 << 62, ()))
    asked = [
        Sampling(
            max_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k or 0,
            seed=random_key(seed, "row", row) >> 1,
            ignore_eos=True,
        )
        for row in range(len(input_ids))
    ]
    length = input_ids.shape[1] + max_new_tokens
    if model.sequence is None and input_ids.shape[1] < model.max_position_embeddings and max_new_tokens:
        input_ids = _within_positions(model, input_ids, asked)
    return _beyond_positions(model, input_ids, length, asked)


def _within_positions(model: GPT, input_ids: Tensor, asked: list[Sampling]) -> Tensor:
    """All rows as long as the model has positions for them, or as they are to be."""
    prompts = [[int(token) for token in row] for row in input_ids.tolist()]
    longest = min(model.max_position_embeddings, input_ids.shape[1] + asked[0].max_tokens)
    with_room = Generator(model, max_requests=len(prompts), max_length=longest, memory=1.0)
    try:
        found = with_room.generate(prompts, asked)
    finally:
        with_room.close()
    wrong = next((c.error for c in found if c.error), None)
    if wrong is not None:
        raise ValueError(wrong)
    return torch.tensor([c.prompt_tokens + c.tokens for c in found], device=input_ids.device)


@torch.no_grad()
def _beyond_positions(model: GPT, input_ids: Tensor, length: int, asked: list[Sampling]) -> Tensor:
    """All rows to the ``length``: their last tokens move to the first positions with every step."""
    was_training = model.training
    rows = SamplingRows.of(asked, model.vocab_size, input_ids.device)
    model.eval()
    try:
        for place in range(input_ids.shape[1], length):
            logits = _next_scores(model, input_ids[:, -model.max_position_embeddings :])
            positions = torch.full((len(asked),), place, device=logits.device)
            input_ids = torch.cat([input_ids, choose(logits, rows, positions)[:, None]], dim=1)
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
