"""A small model in every form of checkpoint that the library writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from colossalai.booster import Booster
from colossalai.utils import save_checkpoint


def build() -> nn.Sequential:
    """Two tied weights, and two more layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 16), nn.Linear(16, 8))
    model[2].weight = model[0].weight  # type: ignore[union-attr]
    return model


def trained(steps: int = 2) -> tuple[Booster, nn.Module, Any]:
    booster = Booster("cpu")
    model = build()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for _ in range(steps):
        booster.backward(model(torch.arange(4)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return booster, model, optimizer


def write_all(root: Path) -> dict[str, torch.Tensor]:
    """Every form below ``root``; returns the weights."""
    booster, model, optimizer = trained()
    small = 1e-3
    for step in (1, 2):
        booster.save(root / "runs" / f"step-{step}", {"step": step, "epoch": 0}, size_per_shard=small)
    booster.save_model(model, root / "bin", shard=True, size_per_shard=small)
    booster.save_optimizer(optimizer, root / "bin", shard=True, size_per_shard=small)
    booster.save_model(model, root / "safe", shard=True, size_per_shard=small, use_safetensors=True)
    booster.save_model(model, root / "model.bin")
    booster.save_model(model, root / "model.safetensors")
    booster.save_optimizer(optimizer, root / "optimizer.bin")
    save_checkpoint(root / "training.pt", 3, model, optimizer)
    return {name: value.clone() for name, value in model.state_dict().items()}


# path below the root: what `show` says of it
FORMS = {
    "runs": "run",
    "runs/step-1": "run",
    "runs/step-1/manifest.json": "run",
    "bin/pytorch_model.bin.index.json": "model",
    "bin/pytorch_optim.bin.index.json": "optimizer",
    "safe": "model",
    "model.bin": "model",
    "model.safetensors": "model",
    "optimizer.bin": "optimizer",
    "training.pt": "training",
}
