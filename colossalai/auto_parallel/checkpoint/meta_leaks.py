"""Notices tensors of the meta device that a played step leaves behind outside of the model.

Code may keep what it has computed where nobody can put it back: in a global dict, a closure, an attribute of
a class.  A model whose cache has a tensor without values is broken.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import _lru_cache_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.utils.held_tensors import held

_FAR = 3  # from a tensor to the cache: a pair of tensors may lie in it, or a list of pairs
_DEEP = 16  # in the arguments of blocks, which a plan keeps


@contextmanager
def none_left_on_meta(model: nn.Module) -> Iterator[list[Any]]:
    """Raise an error if tensors on the meta device that were made inside the block are held afterwards, other
    than by what is put into the list.

    All objects are looked through, once before and once afterwards, so that a play is not slowed down.
    """
    before = _meta_tensors()  # they live, so no other tensor gets the id of one
    known = {id(tensor) for tensor in before}
    ours: list[Any] = []
    try:
        yield ours
    except Exception as error:
        _refuse_left(model, known, ours, error)
        raise
    _refuse_left(model, known, ours, None)


def _refuse_left(model: nn.Module, known: set[int], ours: list[Any], error: Exception | None) -> None:
    if not _left(known, ours):
        return
    while error is not None:
        traceback.clear_frames(error.__traceback__)  # their variables are not left behind
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    gc.collect()
    _forget(_left(known, ours))
    if left := _left(known, ours):
        shape, where = tuple(left[0].shape), _place_of(left)
        raise ValueError(
            f"auto_checkpoint: a step of {type(model).__name__} was played on the meta device, and something"
            f" outside of the model keeps tensors that were made there, which have no values ({len(left)}, of"
            f" which one has the shape {shape}, and lies {where}); empty that cache, and run one step of the"
            " model before auto_checkpoint, so that it is filled with real tensors"
        )


def _left(known: set[int], ours: list[Any]) -> list[Tensor]:
    found = [tensor for tensor in _meta_tensors() if id(tensor) not in known]
    if found and ours:
        kept = {id(tensor) for tensor in held(ours, Tensor, _DEEP)}
        found = [tensor for tensor in found if id(tensor) not in kept]
    return found


def _meta_tensors() -> list[Tensor]:
    with torch._C.DisableTorchFunctionSubclass():
        return [one for one in gc.get_objects() if issubclass(type(one), Tensor) and one.is_meta]


def _forget(tensors: list[Tensor]) -> None:
    """Remove ``tensors`` from caches that work without them: those of ``functools``, and entries of dicts
    whose key names the meta device, which no real step looks up.
    """
    level: list[Any] = tensors
    for _ in range(_FAR):
        ids = {id(one) for one in level}
        holders = [one for one in gc.get_referrers(*level) if one is not level and one is not tensors]
        for holder in holders:
            if isinstance(holder, _lru_cache_wrapper):
                holder.cache_clear()
            elif isinstance(holder, dict):
                entries = [key for key, value in holder.items() if id(value) in ids and _names_meta(key)]
                for key in entries:
                    del holder[key]
        level = [one for one in holders if isinstance(one, (tuple, list, dict))]


def _names_meta(key: Any) -> bool:
    if isinstance(key, (tuple, list)):
        return any(_names_meta(part) for part in key)
    return key == "meta" if isinstance(key, str) else isinstance(key, torch.device) and key.type == "meta"


def _place_of(tensors: list[Tensor]) -> str:
    """Where one of ``tensors`` lies, if that is, or is in, a variable of a Python module or an attribute of a
    class there.
    """
    holders = {id(one) for one in tensors} | {id(one) for one in gc.get_referrers(*tensors)}
    for module_name, module in list(sys.modules.items()):
        known = getattr(module, "__dict__", {})
        for name, value in list(known.items()):
            if id(value) in holders and value is not tensors and value is not known:
                return f"in {name} of {module_name}"
            for attribute, its in list(vars(value).items()) if issubclass(type(value), type) else ():
                if id(its) in holders and its is not tensors:
                    return f"in {name}.{attribute} of {module_name}"
    return "in a closure, or another object that is no variable of a module"
