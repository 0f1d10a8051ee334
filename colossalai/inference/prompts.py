"""What a script gives a generator: prompts and samplings, in the forms that there are."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from colossalai.inference.requests import Sampling
from colossalai.inference.scheduler import Request

Prompt = str | Sequence[int]
Prompts = Sequence[Prompt] | torch.Tensor | Mapping[str, Any]


def pairs(
    prompts: Prompts, sampling: Sampling | Sequence[Sampling], model: Any, tokenizer: Any
) -> list[tuple[Prompt, Sampling]]:
    """Each prompt with its sampling; ``sampling`` may be one for all."""
    single = prompts.ndim == 1 if isinstance(prompts, torch.Tensor) else isinstance(prompts, str)
    if single or (not isinstance(prompts, Mapping) and len(prompts) and isinstance(prompts[0], int)):
        raise ValueError("generate and score take a list of prompts; write [prompt] for one")
    if isinstance(prompts, Mapping):
        rows = _unpadded(prompts)
    else:
        rows = list(prompts)
        _refuse_padded(rows, model, tokenizer)
    if not isinstance(sampling, Sampling | list | tuple):
        raise TypeError(
            f"sampling is a Sampling(...), or a list of one for each prompt, got {sampling!r:.60}"
        )
    each = [sampling] * len(rows) if isinstance(sampling, Sampling) else list(sampling)
    if len(each) != len(rows):
        raise ValueError(f"{len(rows)} prompts and {len(each)} samplings; give one for all, or one each")
    return list(zip(rows, each, strict=True))


def as_tokens(prompt: Sequence[int]) -> list[int]:
    """The tokens of a prompt that is no text."""
    found: Any = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    if any(isinstance(t, bool) or not isinstance(t, int) for t in found):
        raise ValueError(f"a prompt is a text or a list of whole numbers, got {str(found)[:60]}")
    return [int(token) for token in found]


def _unpadded(batch: Mapping[str, Any]) -> list[Prompt]:
    """The prompts of what a tokenizer returns, without what its mask leaves out."""
    unknown = set(batch) - {"input_ids", "attention_mask", "token_type_ids"}
    if "input_ids" not in batch or unknown:
        raise ValueError(
            "a mapping of prompts has input_ids, and attention_mask where they are padded; got"
            f" {sorted(batch)}"
        )
    rows = [as_tokens(row) for row in batch["input_ids"]]
    if batch.get("attention_mask") is None:
        return list(rows)
    masks = [as_tokens(row) for row in batch["attention_mask"]]
    if [len(row) for row in rows] != [len(mask) for mask in masks]:
        raise ValueError("attention_mask has another shape than input_ids")
    return [
        [t for t, kept in zip(row, mask, strict=True) if kept] for row, mask in zip(rows, masks, strict=True)
    ]


def _refuse_padded(rows: Sequence[Prompt], model: Any, tokenizer: Any) -> None:
    """Refuse rows of one length of which some begin or end with padding, which would be read as text.

    A token that also begins or ends texts is padding only where it is there twice.
    """
    if len(rows) < 2 or any(isinstance(row, str) for row in rows) or len({len(row) for row in rows}) > 1:
        return
    told = [tokenizer, getattr(model, "generation_config", None), getattr(model, "config", None)]
    pads = {pad for owner in told if isinstance(pad := getattr(owner, "pad_token_id", None), int)}
    ends = last_tokens(model) | {getattr(owner, "bos_token_id", None) for owner in told}
    texts = [as_tokens(row) for row in rows]  # type: ignore[arg-type]
    for pad in pads:
        some = [text for text in texts if any(token != pad for token in text)]
        for lines in (some, [text[::-1] for text in some]):
            runs = [next(i for i, token in enumerate(line) if token != pad) for line in lines]
            if len(set(runs)) > 1 and max(runs) > (pad in ends):
                raise ValueError(
                    f"the prompts are padded with the token {pad}, which would be read as text; give what the"
                    " tokenizer returns (input_ids with attention_mask), or lists without padding"
                )


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
