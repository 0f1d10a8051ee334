"""What Gemini refuses: models that it cannot hold, and changes to parameters that it would not see.

Parameters show what lies in their chunks.  Whatever is written to them, or put in their place, would be gone with the next fetch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from colossalai.amp._compat import changes
from colossalai.zero.gemini.chunk import Chunk, Slot
from colossalai.zero.gemini.chunk_manager import ChunkManager
from colossalai.zero.pieces import IN_CHUNKS
from colossalai.zero.renormalizing import renormalizing

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_model(module: Any, dtype: Any) -> None:
    """Refuse what cannot be laid into chunks, before anything is changed or sent."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"Gemini holds a torch.nn.Module, got {type(module).__name__}: {module!r}")
    if dtype not in DTYPES:
        raise ValueError(f"Gemini trains in {', '.join(map(str, DTYPES))}; got dtype={dtype!r}")
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel):
            raise ValueError(
                f"Gemini averages gradients itself, but {name or 'the model'!r} is a DistributedDataParallel; give the model inside it"
            )
    if (problem := renormalizing(module, "which would be lost")) is not None:
        raise ValueError(problem)
    for name, param in module.named_parameters():
        if getattr(param, IN_CHUNKS, False):
            raise ValueError(
                f"{name!r} lies in chunks of another GeminiDDP already; go on with that one, or build a new model"
            )
        if (
            param.dtype is torch.float64 and dtype is torch.float32
        ):  # half precision is asked for, this is not
            raise ValueError(
                f"the parameter {name!r} is of torch.float64, and Gemini would train it in torch.float32, with half of its digits; call"
                " model.float() before if that is what you want, or use TorchDDPPlugin or LowLevelZeroPlugin(precision='fp32')"
            )


def check_shares(**shares: Any) -> None:
    for name, value in shares.items():
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"{name} is a share from 0 to 1, got {value!r}")


class Untouched:
    """The parameters of a model as its chunks have made them."""

    def __init__(self, chunks: ChunkManager) -> None:
        self._slots = [(chunk, slot) for chunk in chunks.chunks for slot in chunk.slots]
        self._changes = [changes(slot.param) for _, slot in self._slots]
        self._frozen = [not slot.trained for _, slot in self._slots]
        for _, slot in self._slots:
            setattr(slot.param, IN_CHUNKS, True)

    def check(self) -> None:
        """Before a step: nobody has written to parameters, replaced them or unfrozen them."""
        for (chunk, slot), seen, frozen in zip(self._slots, self._changes, self._frozen, strict=True):
            param = slot.param
            if frozen and param.requires_grad:
                raise RuntimeError(
                    f"{slot.name!r} was frozen when its chunk was made, and is not any more; unfreeze parameters before, or build"
                    " the model again"
                )
            if param.data_ptr() != (slot.view if chunk.present else slot.blank).data_ptr():
                raise RuntimeError(
                    f"{slot.name!r} was given new memory (by model.to(...) or p.data = ...) after it was laid into {chunk.name};"
                    " move and cast the model before, and write weights by load_state_dict"
                )
            if not chunk.resident and changes(param) != seen:
                raise not_reached(slot, chunk)


def not_reached(slot: Slot, chunk: Chunk) -> RuntimeError:
    return RuntimeError(
        f"{slot.name!r} was written to in place, which does not reach {chunk.name}; write weights before, or by load_state_dict"
    )


def compare_keys(module: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> Any:
    """Refuse weights of another model; what torch returns about missing and unexpected names."""
    from torch.nn.modules.module import _IncompatibleKeys

    own = module.state_dict(keep_vars=True)
    missing = [name for name in own if name not in state_dict]
    unexpected = [name for name in state_dict if name not in own]
    given = {n: tuple(state_dict[n].shape) for n in own if n in state_dict}
    problems = [
        f"{n} has shape {shape}, the model's is {tuple(own[n].shape)}"
        for n, shape in given.items()
        if shape != tuple(own[n].shape)
    ]
    if strict:
        problems += [f"missing: {', '.join(missing)}"] * bool(missing)
        problems += [f"unexpected: {', '.join(unexpected)}"] * bool(unexpected)
    if problems:
        raise RuntimeError(f"cannot load the weights of {type(module).__name__}: {'; '.join(problems)}")
    return _IncompatibleKeys(missing, unexpected)
