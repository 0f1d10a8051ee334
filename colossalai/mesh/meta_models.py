"""Models on the plain meta device, drawn as they themselves say.

Nothing was recorded while such a model was built, so nothing is known of its values.  But a model of
transformers can be built once more from its config, and modules say how they are drawn: layers of torch by
``reset_parameters()``, a model of transformers by ``_init_weights(module)`` for each of its modules.
``defer_meta`` calls these inside a recording: from then on the model is one that was built without memory,
and every plan fills its pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.mesh.deferred import Deferred, recording_of
from colossalai.mesh.unfilled import take_place

Draw = Callable[[nn.Module], Any]


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
    own, other = _named(module), _named(twin)
    if {n: (t.shape, t.dtype) for n, t in own.items()} != {n: (t.shape, t.dtype) for n, t in other.items()}:
        torch.set_rng_state(state)
        return False
    seen: set[int] = set()
    for name, tensor in own.items():
        if is_on_meta(tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            take_place(tensor, other[name])
    return True


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
