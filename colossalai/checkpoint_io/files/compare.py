"""Whether the tensors of a checkpoint are those of a model: shapes before anything is loaded, names after.

Names come last because modules may have a say: some fill in what older checkpoints lack.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from colossalai.checkpoint_io.held_tensors import is_expanded, serial_shape


def check_shapes(module: nn.Module, state: Mapping[str, Any], path: Path) -> None:
    """Refuse tensors of other shapes than the model's of the same name, before the model is changed.

    A module with hooks may change what is loaded, so then this is left to torch.
    """
    if any(part._load_state_dict_pre_hooks for part in module.modules()):
        return
    rename = getattr(module, "serial_name", str)
    own = {rename(name): value for name, value in module.state_dict(keep_vars=True).items()}
    faults = [
        f"size mismatch for {name}: {tuple(value.shape)} in the file, {serial_shape(own[name])} in the model"
        for name, value in state.items()
        if isinstance(value, Tensor) and _differ(value, own.get(name))
    ]
    faults += [
        f"{name} is a buffer made by expand, several of whose elements are one in memory; give the model a"
        " copy, with .clone()"
        for name in state
        if _is_buffer(own.get(name)) and is_expanded(own[name])
    ]
    if faults:
        raise RuntimeError(f"{path} does not fit the model: {'; '.join(faults)}")


def _is_buffer(value: Any) -> bool:
    """A parameter may lie elsewhere, as Gemini's do; what the model has then holds its place."""
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not is_lazy(value)


def _differ(value: Tensor, own: Any) -> bool:
    if not isinstance(own, Tensor) or is_lazy(own):
        return False
    # torch takes a row of one number for a number
    return tuple(value.shape) != serial_shape(own) and not (value.shape == (1,) and own.dim() == 0)


def report_names(
    module: nn.Module, checkpoint: Path, missing: Sequence[str], unexpected: Sequence[str], strict: bool
) -> None:
    """Refuse names that only one side has; not ``strict``, warn if they have no name in common."""
    if not missing and not unexpected:
        return
    total = len(module.state_dict(keep_vars=True))
    none_fits = bool(unexpected) and len(missing) == total
    prefix = _difference(missing, unexpected)
    if strict:
        faults = [("it lacks", missing), ("the model does not know", unexpected)]
        details = "; ".join(f"{what} {', '.join(names)}" for what, names in faults if names)
        hint = " Pass strict=False to pass over this; what both have is loaded already"
        raise RuntimeError(
            f"{checkpoint} does not fit {type(module).__name__}: {details}."
            f"{prefix or (' They have no name in common' if none_fits else hint)}"
        )
    if none_fits:
        warnings.warn(
            f"nothing was loaded from {checkpoint}: none of its {len(unexpected)} names is one of the {total}"
            " of"
            f" {type(module).__name__}.{prefix}",
            stacklevel=2,
        )


def _difference(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """A sentence, if the names differ by a prefix and by nothing else."""
    for longer, shorter, where, other in (
        (unexpected, missing, "the file", "the model"),
        (missing, unexpected, "the model", "the file"),
    ):
        if not shorter or len(longer) != len(shorter):
            continue
        for name in longer:
            prefix = name.removesuffix(shorter[0])
            if prefix != name and {prefix + short for short in shorter} == set(longer):
                return (
                    f" The names differ only in that those of {where} begin with {prefix!r}, and those of"
                    f" {other} do not:"
                    " load into the part of the model, or rename them"
                )
    return ""
