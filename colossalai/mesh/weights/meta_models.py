"""Models on the plain meta device, drawn as they themselves say.

Nothing was recorded while such a model was built, so nothing is known of its values.  But a model of
transformers can be built once more from its config, and modules say how they are drawn: layers of torch by
``reset_parameters()``, a model of transformers by ``_init_weights(module)`` for each of its modules.
``defer_meta`` calls these inside a recording: from then on the model is one that was built without memory,
and every plan fills its pieces.

A model that was cut on the meta device cannot say this of its pieces.  So a copy of it from before, which
takes no memory either, is kept beside it (``before_cut``, ``note_cut``): this one is drawn and cut in the
same way, and the model gets its pieces.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colossalai.mesh.weights.deferred import Deferred, recording_of
from colossalai.mesh.weights.unfilled import take_place

Draw = Callable[[nn.Module], Any]
Cut = Callable[[nn.Module], nn.Module]
_NOTE = "_cut_on_meta"


@dataclass(frozen=True)
class CutOnMeta:
    """A model as it was before it was cut on the meta device, and what was done to it since."""

    whole: nn.Module
    cuts: tuple[Cut, ...] = ()


def is_on_meta(tensor: Tensor) -> bool:
    """Whether ``tensor`` is on the meta device, and no recording fills it."""
    return tensor.is_meta and recording_of(tensor) is None


def draws_itself(module: nn.Module) -> bool:
    """Whether ``module`` holds a model that says how all of its modules are drawn."""
    return any(callable(getattr(part, "_init_weights", None)) for part in module.modules())


def defer_meta(module: nn.Module, large: int = 0) -> nn.Module:
    """Let ``module``, which is on the meta device, be one that was built without memory, in place.

    Random numbers come from torch's generator, as for a constructor: where it has not moved since, the
    weights of a model of transformers are those of the serial constructor.  What nothing fills is refused by
    name.
    """
    if (note := vars(module).pop(_NOTE, None)) is not None:
        return _cut_again(module, note, large)
    if draws_itself(module) and _take_twin(module, large):
        return module
    with Deferred(large) as recording, torch.no_grad():
        own = {id(t): t for t in (*module.parameters(), *module.buffers()) if is_on_meta(t)}
        for tensor in own.values():
            take_place(tensor, torch.empty(tensor.shape, dtype=tensor.dtype))
        for part in module.modules():
            reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
            if callable(reset):
                reset()
        _apply(module, None)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if id(tensor) in own and not recording.is_filled(tensor):
            raise ValueError(
                f"nothing says how to fill {name!r} of {type(module).__name__}, which is on the meta device:"
                " build the model in colossalai.lazy.LazyInitContext() instead, which repeats what its"
                " constructors did; or give its module a reset_parameters(), or the model an"
                " _init_weights(module) that fills it"
            )
    return module


def _take_twin(module: nn.Module, large: int) -> bool:
    """Build ``module`` once more from its config, in a recording, and let it have those tensors; False if it
    cannot be built so, or was changed since.
    """
    config = getattr(module, "config", None)
    state = torch.get_rng_state()
    try:
        with Deferred(large):
            twin = type(module)(config)
    except Exception:  # its constructor takes other arguments
        torch.set_rng_state(state)
        return False
    if not _take_tensors(module, twin):
        torch.set_rng_state(state)
        return False
    return True


def _take_tensors(module: nn.Module, twin: nn.Module) -> bool:
    """Let the tensors of ``module`` that are on the meta device be those of ``twin``; False if they are not
    alike.
    """
    own, other = _named(module), _named(twin)
    if {n: (t.shape, t.dtype) for n, t in own.items()} != {n: (t.shape, t.dtype) for n, t in other.items()}:
        return False
    seen: set[int] = set()
    for name, tensor in own.items():
        if is_on_meta(tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            take_place(tensor, other[name])
    return True


def before_cut(model: nn.Module) -> CutOnMeta | None:
    """What ``note_cut`` is to be given of ``model`` after it was cut; None if it is not on the meta device,
    or in a dry run, where it stays there.
    """
    if not any(map(is_on_meta, model.parameters())):
        return None
    if dist.is_initialized() and dist.get_backend() == "fake":
        return None
    return vars(model).get(_NOTE) or CutOnMeta(copy.deepcopy(model))


def note_cut(model: nn.Module, before: CutOnMeta | None, cut: Cut) -> None:
    """Keep beside ``model`` what it was ``before``, and that ``cut`` makes of this what it is now."""
    if before is not None:
        vars(model)[_NOTE] = replace(before, cuts=(*before.cuts, cut))


def is_cut_on_meta(model: nn.Module) -> bool:
    """Whether it is known what ``model``, on the meta device, was before it was cut."""
    return _NOTE in vars(model)


def _cut_again(module: nn.Module, note: CutOnMeta, large: int) -> nn.Module:
    twin = defer_meta(note.whole, large)
    for cut in note.cuts:
        twin = cut(twin)
    if not _take_tensors(module, twin):
        raise ValueError(
            f"this {type(module).__name__} was cut on the meta device, and its parameters or buffers were"
            " changed after that; change the model before it is cut, or build it in"
            " colossalai.lazy.LazyInitContext()"
        )
    return module


def _named(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _apply(module: nn.Module, draw: Draw | None) -> None:
    """Call ``_init_weights`` of the nearest model around it for every module, children first."""
    own = getattr(module, "_init_weights", None)
    draw = own if callable(own) else draw
    for child in module.children():
        _apply(child, draw)
    if draw is not None:
        draw(module)
