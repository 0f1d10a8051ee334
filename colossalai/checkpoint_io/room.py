"""Memory for the tensors of models that were built without it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from colossalai.mesh.weights.deferred import recording_of
from colossalai.mesh.weights.unfilled import become


def has_room(target: Tensor) -> bool:
    """Whether ``target`` has memory."""
    return not target.is_meta and recording_of(target) is None


@torch.no_grad()
def write(model: nn.Module, target: Tensor, value: Tensor, device: torch.device) -> None:
    """Set the values of ``target``, a tensor of ``model``, which gets memory on ``device`` if it has none."""
    if has_room(target):
        target.copy_(value)
    else:
        give_room(model, target, torch.empty(target.shape, dtype=target.dtype, device=device).copy_(value))


def give_room(model: nn.Module, target: Tensor, data: Tensor) -> None:
    """Let ``target``, a tensor of ``model`` without memory, have that of ``data``."""
    if not target.is_meta:
        become(target, data)
        return
    new: Tensor = data
    if isinstance(target, nn.Parameter):
        new = type(target)(data, requires_grad=target.requires_grad)
        new.__dict__.update(target.__dict__)
    for module in model.modules():  # all that share it
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is target:
                    held[name] = new  # type: ignore[assignment]


def fill_buffers(model: nn.Module, device: torch.device) -> None:
    """Compute the buffers on meta that no file has (tables of positions), as transformers does."""
    for path, module in model.named_modules():
        lost = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        left = _computed(model, module, lost, device)
        if left:
            raise RuntimeError(
                f"the buffer {f'{path}.{left[0]}'.lstrip('.')!r} is on the meta device, in no file, and"
                " nothing computes it; "
                "build the model with its buffers on a real device"
            )


def _computed(model: nn.Module, module: nn.Module, names: list[str], device: torch.device) -> list[str]:
    """Fill the buffers ``names`` of ``module`` by the model's function; returns those that it left alone."""
    compute = getattr(model, "_init_weights", None)
    if not names or compute is None or list(module.parameters(recurse=False)):
        return names
    outcomes: list[list[Tensor]] = []
    for start in (0, 1):  # what is computed does not depend on what was there
        for name in names:
            module._buffers[name] = torch.full_like(module.get_buffer(name), start, device=device)
        compute(module)
        outcomes.append([module.get_buffer(name) for name in names])
    return [name for name, a, b in zip(names, *outcomes, strict=True) if not torch.equal(a, b)]
