"""A model that is split into stages, written as the whole model that it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from colossalai.checkpoint_io import save_pretrained as save_whole
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.interface import ModelWrapper
from colossalai.mesh import PIPELINE_AXIS
from colossalai.nn.policies.stage import Stage
from colossalai.nn.policies.wrap_forward import native_class, whole_state_dict


def save_pretrained(model: nn.Module, folder: str | Path, **options: Any) -> None:
    """Write the model whose stages ``split_model`` made as transformers does; ``options`` are those of its ``save_pretrained``.

    ``model`` is what ``split_model`` or ``boost`` returned.  Under a plan that keeps weights elsewhere (Gemini) only the latter knows them.
    Every rank calls it; rank 0 gathers the whole model on its CPU and writes it.
    """
    if isinstance(model, ModelWrapper):
        save_whole(model, folder, **options)
        return
    stages = list(model) if isinstance(model, nn.ModuleList) else [model]
    for stage in stages:
        if not isinstance(stage, Stage):
            raise TypeError(
                f"save_pretrained writes what split_model returned, got a {type(stage).__name__}; call its own save_pretrained"
            )
    state = _state(stages)
    if gpc.get_global_rank() == 0:
        stage = stages[0]
        assert isinstance(stage, Stage)
        # one name of tied weights is on another stage
        state = {name: state[same] for name in state for same in stage.share.names[name][:1]}
        native_class(stage).save_pretrained(stage, folder, state_dict=state, **options)
    dist.barrier()


def _state(stages: list[nn.Module]) -> dict[str, Tensor]:
    """The whole model's state on rank 0, something else on the others."""
    keep = all(at == 0 for axis, at in gpc.mesh.coord.items() if axis != PIPELINE_AXIS)
    state = {n: t for s in stages for n, t in whole_state_dict(s, gpc.mesh, keep=keep).items()}
    if not keep or not gpc.is_initialized(ParallelMode.PIPELINE):
        return state
    parts: list[Any] = [None] * gpc.get_world_size(ParallelMode.PIPELINE)
    group = gpc.get_cpu_group(ParallelMode.PIPELINE)
    dist.gather_object(state, parts if gpc.get_global_rank() == 0 else None, group=group, group_dst=0)
    return {name: tensor for part in parts for name, tensor in (part or {}).items()}
