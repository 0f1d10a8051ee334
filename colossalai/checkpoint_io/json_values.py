"""Encode small values (learning rates, counters, loss scales, random states) as JSON, and decode them.

JSON has no tuples, no keys but strings and no tensors; these are written as an object with one key that
begins with ``$``.
Nothing that is read can run code: unknown objects are refused on both ways.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from colossalai.checkpoint_io.byte_io import dtype_of, name_of

PLAIN = (bool, int, float, str, type(None))


def encode(value: Any, where: str = "value") -> Any:
    """``value`` for ``json.dumps``; ``where`` names it in errors."""
    if isinstance(value, Enum):
        raise _refused(value, where)
    if isinstance(value, PLAIN):
        return value if type(value) in PLAIN else _base(value)
    if isinstance(value, Tensor):
        return {"$tensor": _encode_tensor(value, where)}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where)
    if isinstance(value, list):
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    for tag, kind in (("$tuple", tuple), ("$set", (set, frozenset))):
        if isinstance(value, kind):
            items = sorted(value, key=repr) if tag == "$set" else value
            return {tag: [encode(item, f"{where}[{i}]") for i, item in enumerate(items)]}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a number of numpy
        return encode(value.item(), where)
    if hasattr(value, "__array__"):
        return {"$array": encode(torch.as_tensor(value), where)["$tensor"]}
    raise _refused(value, where)


def decode(value: Any, where: str = "value") -> Any:
    """Undo ``encode``."""
    if isinstance(value, list):
        return [decode(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: decode(item, f"{where}.{key}") for key, item in value.items()}
    ((tag, inner),) = value.items() if len(value) == 1 else ((None, None),)
    try:
        return _DECODERS[tag](inner, where)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RuntimeError(f"{where} cannot be read: {_shortened(value)} ({error})") from error


def _encode_mapping(value: Mapping[Any, Any], where: str) -> Any:
    if isinstance(value, Counter):
        return {"$counter": [[encode(key, where), count] for key, count in value.items()]}
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
    return {
        "$items": [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]
    }


def _encode_tensor(value: Tensor, where: str) -> dict[str, Any]:
    if value.is_meta or value.layout != torch.strided or hasattr(value, "placements"):
        raise _refused(value, where)
    data = value.detach().cpu().contiguous()
    raw = data.view(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
    return {
        "dtype": name_of(data.dtype),
        "shape": list(data.shape),
        "data": base64.b64encode(raw).decode("ascii"),
    }


def _decode_tensor(value: Any, where: str) -> Tensor:
    raw = bytearray(base64.b64decode(value["data"], validate=True))
    dtype, shape = dtype_of(value["dtype"]), list(value["shape"])
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(shape)


def _pairs(value: Any, where: str) -> list[tuple[Any, Any]]:
    return [(_hashable(decode(key, where)), decode(item, where)) for key, item in value]


def _hashable(key: Any) -> Any:
    hash(key)
    return key


_DECODERS: dict[Any, Any] = {
    "$tensor": _decode_tensor,
    "$array": lambda value, where: _decode_tensor(value, where).numpy(),
    "$bytes": lambda value, where: base64.b64decode(value, validate=True),
    "$tuple": lambda value, where: tuple(decode(item, where) for item in value),
    "$set": lambda value, where: {_hashable(decode(item, where)) for item in value},
    "$items": lambda value, where: dict(_pairs(value, where)),
    "$counter": lambda value, where: Counter(dict(_pairs(value, where))),
}


def _base(value: Any) -> Any:
    """A subclass of a plain type (a number of numpy) as that type."""
    return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))


def _refused(value: Any, where: str) -> TypeError:
    return TypeError(
        f"{where} is a {type(value).__name__}, and a checkpoint holds numbers, strings, tensors and lists,"
        " tuples, sets and"
        " dicts of them"
    )


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."
