"""From a config to this rank's part of a model, with random weights or those of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from colossalai.serving.loading import cut, filled
from colossalai.utils import get_current_device

METASEQ = "restored.pt"


def build(
    kind: Any, config: Any, checkpoint: str | Path | None, dtype: torch.dtype | None, half: bool
) -> nn.Module:
    """``kind(config)``, cut as the job was launched.

    Args:
        checkpoint: a folder of Hugging Face (safetensors), or metaseq's ``restored.pt`` or a folder with it;
            without one, weights are random and alike on all ranks, for a trial.
        half: fp16.
    """
    dtype = torch.float16 if half else dtype or torch.float32
    if checkpoint is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = kind(config).to(dtype)
        return _ready(cut(model))
    path = Path(checkpoint)
    with torch.device("meta"):
        model = kind(config).to(dtype)
    stored = path / METASEQ if path.is_dir() else path
    if stored.is_file() and stored.suffix == ".pt":
        return _ready(_from_metaseq(model, stored, dtype))
    return filled(model, path)


def _ready(model: nn.Module) -> nn.Module:
    return model.to(get_current_device()).eval().requires_grad_(False)


def _from_metaseq(model: Any, path: Path, dtype: torch.dtype) -> Any:
    """The file is mapped into memory and read with ``weights_only``."""
    from colossalai.checkpoint_io.inspection.convert import weights_of
    from colossalai.checkpoint_io.inspection.detect import open_checkpoint

    weights = weights_of(open_checkpoint(path), dtype)
    state = {block.key: block.read() for block in weights.blocks}
    own = model.state_dict()
    tied = {"lm_head.weight": "model.decoder.embed_tokens.weight"}
    state |= {name: state[source] for name, source in tied.items() if name in own and source in state}
    if differ := sorted(own.keys() ^ state.keys()):
        raise ValueError(f"{path} and the model do not have the same tensors: {', '.join(differ[:5])}")
    for name, value in state.items():
        if own[name].shape != value.shape:
            raise ValueError(
                f"{path}: {name} has the shape {tuple(value.shape)}, the model"
                f" {tuple(own[name].shape)}; is it of another size?"
            )
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return cut(model)
