"""A language model from a folder, cut as the job was launched: a rank never holds more than its pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from colossalai.checkpoint_io import load_pretrained
from colossalai.lazy import LazyInitContext
from colossalai.nn import parallelize
from colossalai.nn.modes import current
from colossalai.pipeline import split_model
from colossalai.pipeline.stage import Placement, pipeline_size


def load_model(
    path: str | Path,
    *,
    config: str | Path | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """The causal language model in ``path``, whole or this rank's part of it, in evaluation.

    ``path`` is a folder that ``from_pretrained`` would open, or a checkpoint of ``booster.save``, which says
    nothing of the architecture: then ``config`` is a folder with a ``config.json``.  ``dtype`` is by default
    that of the config.  The model is built without memory, cut over the tensor-parallel ranks and the stages
    of the launched job, and then filled; every rank calls this, and nothing is communicated.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    folder = Path(path if config is None else config)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"there is no config.json in {folder}; give a folder that from_pretrained opens, or for a"
            " checkpoint of booster.save config=, a folder with the config.json of its model"
        )
    found: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    chosen = dtype or getattr(found, "dtype", None) or torch.float32
    if isinstance(chosen, str):
        chosen = getattr(torch, chosen)
    with LazyInitContext(large=1):
        model: Any = AutoModelForCausalLM.from_config(found, dtype=chosen)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    model = _cut(model.eval())
    return load_pretrained(model, path, device=device).requires_grad_(False)


def _cut(model: nn.Module) -> nn.Module:
    mesh = current().mesh
    if mesh is None:
        return model
    stages = pipeline_size(mesh)
    return split_model(model, Placement(stages)) if stages > 1 else parallelize(model)
