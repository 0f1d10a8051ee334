"""The weights of a model in shards, gathered chunk by chunk: nobody ever holds more than a shard and the few chunks that come and go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from colossalai.checkpoint_io.sharding import MB, calculate_tensor_size, plan_shards

if TYPE_CHECKING:
    from colossalai.zero.gemini.ddp import ZeroDDP


def state_shards(
    model: ZeroDDP, prefix: str, max_shard_size: float, keep: bool, dtype: torch.dtype | None
) -> Iterator[OrderedDict[str, Any]]:
    """Weights and buffers in shards of at most ``max_shard_size`` MB; a tensor under several names is in one of them.

    Ranks that do not ``keep`` get as many, without anything inside.
    """
    if not max_shard_size > 0:
        raise ValueError(f"state_dict_shard needs max_shard_size in MB, above 0; got {max_shard_size!r}")
    return _shards(model, prefix, max_shard_size, keep, dtype)


def _shards(
    model: ZeroDDP, prefix: str, max_shard_size: float, keep: bool, dtype: torch.dtype | None
) -> Iterator[OrderedDict[str, Any]]:
    names: dict[int, list[str]] = {}
    state = model.unwrap().state_dict(keep_vars=True)
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(prefix + name)
    slots = [(chunk, slot) for chunk in model.chunk_manager.chunks for slot in chunk.slots]
    params = {id(slot.param) for _, slot in slots}
    buffers = {id(t): t.detach() for t in state.values() if isinstance(t, Tensor) and id(t) not in params}
    found = [names.get(id(slot.param), []) for _, slot in slots] + [names[key] for key in buffers]
    sizes = [slot.numel * (dtype or chunk.dtype).itemsize / MB for chunk, slot in slots]
    sizes += map(calculate_tensor_size, buffers.values())
    # closed by us if the caller stops early: when Python would do so differs between its versions
    with closing(model.whole_values(dtype, keep)) as gathered:
        values = chain((value for _, value in gathered), (t.to("cpu", copy=True) for t in buffers.values()))
        for numbers, _ in plan_shards((([i], size) for i, size in enumerate(sizes)), max_shard_size):
            taken = [(found[i], next(values)) for i in numbers]
            yield OrderedDict((name, value) for own, value in taken if keep for name in own)
        next(values, None)  # the gathering lets the last chunk go
