"""The weights alone of a checkpoint that ``booster.save`` wrote, for a model that was not boosted."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from colossalai.checkpoint_io.model_state import ModelState
from colossalai.checkpoint_io.room import fill_buffers, give_room, has_room
from colossalai.checkpoint_io.runs.manifest import read_manifest
from colossalai.checkpoint_io.runs.reading import RunReader
from colossalai.mesh.weights.deferred import materialize


def load_run_weights(model: nn.Module, folder: Path, *, strict: bool, device: torch.device) -> None:
    """Fill ``model``, or a stage of one, with the weights in ``folder``, written under any plan.

    Tensors without memory get theirs on ``device``, and are read into it.  Each of several ranks compares the
    checksums of its part of what is stored; nothing is communicated.
    """
    manifest = read_manifest(folder)
    reader = RunReader(folder, manifest)
    _check_one_model(folder, manifest.values)
    state = ModelState(model)
    _, missing = state.wants(manifest, "optimizer")  # refuses other sizes before anything gets memory
    tensors = {f"{state.section}/{name}": tensor for name, tensor in state.tensors.items()}
    lost = [name for name in missing if strict or not has_room(tensors[name])]
    if lost:
        raise RuntimeError(f"{folder} does not fit {type(model).__name__}: it lacks {', '.join(lost[:6])}")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    reader.verify(rank, ranks)
    for tensor in {id(tensor): tensor for tensor in tensors.values()}.values():
        if not has_room(tensor):
            give_room(model, tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    materialize(model)
    wants, _ = ModelState(model).wants(manifest, "optimizer")
    reader.check_wants(wants)
    reader.fill(wants)
    fill_buffers(model, device)


def _check_one_model(folder: Path, values: dict[str, object]) -> None:
    stored = sorted(key for key in values if key.startswith("model"))
    if len(stored) > 1:
        raise RuntimeError(
            f"{folder} holds {len(stored)} models ({', '.join(stored)}); boost the same ones and use"
            " booster.load"
        )
