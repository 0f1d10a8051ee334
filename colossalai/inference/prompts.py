"""What a script gives a generator: prompts and samplings, in the forms that there are."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import torch

from colossalai.inference.requests import Sampling
from colossalai.inference.scheduler import Request

Prompt = str | Sequence[int]


def pairs(
    prompts: Prompt | Sequence[Prompt], sampling: Sampling | Sequence[Sampling]
) -> list[tuple[Prompt, Sampling]]:
    """Each prompt with its sampling; ``sampling`` may be one for all."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        raise ValueError("generate and score take a list of prompts; write [prompt] for one")
    rows: Sequence[Prompt] = prompts  # type: ignore[assignment]
    each = [sampling] * len(rows) if isinstance(sampling, Sampling) else list(sampling)
    if len(each) != len(rows):
        raise ValueError(f"{len(rows)} prompts and {len(each)} samplings; give one for all, or one each")
    return list(zip(rows, each, strict=True))


def as_tokens(prompt: Sequence[int]) -> list[int]:
    """The tokens of a prompt that is no text."""
    found: Any = prompt.tolist() if isinstance(prompt, torch.Tensor) else list(prompt)
    if any(isinstance(t, bool) or not isinstance(t, int) for t in found):
        raise ValueError(f"a prompt is a text or a list of whole numbers, got {str(found)[:60]}")
    return [int(token) for token in found]


def last_tokens(model: Any) -> frozenset[int]:
    """The tokens after which a text of the model is over."""
    found: set[int] = set()
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        ends = getattr(config, "eos_token_id", None)
        found |= {ends} if isinstance(ends, int) else set(ends or ())
        if found:
            break
    return frozenset(found)


def digest(requests: Sequence[Request]) -> int:
    """A number by which ranks compare requests."""
    text = repr([(request.tokens, request.sampling, sorted(request.ends)) for request in requests])
    (found,) = struct.unpack("<q", hashlib.blake2b(text.encode(), digest_size=8).digest())
    return int(found)
