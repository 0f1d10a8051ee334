"""``model.save_pretrained`` of a boosted model: the whole model, however its weights are spread.

``save_pretrained`` of transformers writes what a process holds.  Where that is all, it is called as it is.  Where a plan keeps weights
elsewhere (Gemini), cuts them (FSDP), or puts the model's stages on several ranks, they are gathered one by one on the first rank, which writes;
then every rank must call it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from colossalai.checkpoint_io.entries import is_dtensor
from colossalai.checkpoint_io.io import GatheredCheckpointIO, whole_state
from colossalai.checkpoint_io.model_state import ModelState
from colossalai.interface import ModelWrapper
from colossalai.nn.policies.stage import Stage
from colossalai.nn.policies.wrap_forward import native_class


def save_pretrained(model: ModelWrapper, save_directory: Any, **options: Any) -> None:
    """Write the whole of a boosted ``model`` by its own ``save_pretrained``, with its ``options``.

    With a ``state_dict`` among them, the first rank writes that, if all of the model is in it.
    """
    user = model.unwrap()
    if not is_spread(model):
        user.save_pretrained(save_directory, **options)  # type: ignore[operator]
        return
    options.pop("is_main_process", None)  # the one that writes has all of it
    if "state_dict" in options:
        io, state = GatheredCheckpointIO(), options.pop("state_dict")
        wanted = io.ranks.gather(
            [(*entry.aliases, entry.name, entry.shape) for entry in ModelState(model, "").entries()]
        )

        def write() -> None:
            _check_whole(state, [weight for weights in wanted for weight in weights])
            _write(user, save_directory, state, options)

        io.run_write(write)
        return
    io = GatheredCheckpointIO()
    parts = io.model_parts(model, float("inf"))
    io.run_write(lambda: _write(user, save_directory, dict(whole_state(parts, model)), options), parts)


def _check_whole(state: Mapping[str, Any], wanted: Iterable[tuple[Any, ...]]) -> None:
    """Refuse a state that lacks a weight of the model; each of ``wanted`` has its names, and its shape in the serial model."""
    lost = {
        names[-1].removeprefix("/"): None
        for *names, shape in wanted
        if not any(_is_whole(state.get(name.removeprefix("/")), shape) for name in names)
    }
    if lost:
        raise ValueError(
            f"save_pretrained(..., state_dict=...): {len(lost)} weights of the model are not in the state_dict of the first rank, or"
            f" only pieces of them (the first: {next(iter(lost))}). Leave out state_dict, and the whole model is written; another dtype is given"
            " when it is loaded (from_pretrained(..., dtype=...))"
        )


def _is_whole(value: Any, shape: tuple[int, ...]) -> bool:
    return value is not None and tuple(value.shape) == tuple(shape) and not is_dtensor(value)


def push_to_hub(model: ModelWrapper, *args: Any, **options: Any) -> Any:
    """Refuse for a model that is spread, since the model's own method looks at what one process holds."""
    if is_spread(model):
        raise RuntimeError(
            f"push_to_hub would upload what this process holds of the model, which {type(model).__name__} has spread; call"
            " model.save_pretrained(folder, push_to_hub=True, repo_id=...) on every rank"
        )
    user: Any = model.unwrap()
    return user.push_to_hub(*args, **options)


def is_spread(model: ModelWrapper) -> bool:
    """Whether this process holds less than ``model.unwrap()`` would write."""
    user = model.unwrap()
    stages = list(user) if isinstance(user, nn.ModuleList) else [user]
    has_stages = any(isinstance(stage, Stage) for stage in stages)
    return has_stages or bool(model.holdings()) or any(map(is_dtensor, user.parameters()))


def _write(user: nn.Module, folder: Any, state: dict[str, Any], options: dict[str, Any]) -> None:
    first: Any = user[0] if isinstance(user, nn.ModuleList) else user
    native = native_class(first)
    if "state_dict" in inspect.signature(native.save_pretrained).parameters:
        native.save_pretrained(first, folder, state_dict=state, **options)
        return
    first.__dict__["state_dict"] = lambda *_, **__: state  # what such a method asks for
    try:
        native.save_pretrained(first, folder, **options)
    finally:
        del first.__dict__["state_dict"]


ModelWrapper.methods.update(save_pretrained=save_pretrained, push_to_hub=push_to_hub)
