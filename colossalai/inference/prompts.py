"""What a script gives a generator: prompts and samplings, in the forms that there are."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
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
    if isinstance(prompts, Mapping):
        rows = _unpadded(prompts)
    else:
        _refuse_single(prompts)
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


def _refuse_single(prompts: Any) -> None:
    if isinstance(prompts, str | bytes) or not hasattr(prompts, "__len__"):
        single = True
    else:  # of a tensor with a row too many the row is refused
        single = len(prompts) > 0 and (getattr(prompts, "ndim", 0) == 1 or _is_token(prompts[0]))
    if single:
        raise ValueError(
            f"generate and score take a list of prompts; write [prompt] for one, got {prompts!r:.60}"
        )


def _is_token(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def as_tokens(prompt: Any) -> list[int]:
    """The tokens of a prompt that is no text."""
    found = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(found, Mapping):
        raise ValueError("a prompt is a text or a list of whole numbers, got a mapping; give its input_ids")
    # the bytes of a text would be read as the numbers of tokens
    if isinstance(found, bytes | bytearray) or not isinstance(found, Iterable):
        raise ValueError(f"a prompt is a text or a list of whole numbers, got {found!r:.60}")
    tokens = list(found)
    if not all(map(_is_token, tokens)):
        raise ValueError(f"a prompt is a text or a list of whole numbers, got {str(tokens)[:60]}")
    return [int(token) for token in tokens]


def _unpadded(batch: Mapping[str, Any]) -> list[Prompt]:
    """The prompts of what a tokenizer returns, without what its mask leaves out."""
    unknown = set(batch) - {"input_ids", "attention_mask", "token_type_ids"}
    if "input_ids" not in batch or unknown:
        raise ValueError(
            "a mapping of prompts has input_ids, and attention_mask where they are padded; got"
            f" {sorted(batch)}"
        )
    _refuse_single(batch["input_ids"])
    rows = [as_tokens(row) for row in batch["input_ids"]]
    if batch.get("attention_mask") is None:
        return list(rows)
    _refuse_single(batch["attention_mask"])
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
    texts = [as_tokens(row) for row in rows]
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
