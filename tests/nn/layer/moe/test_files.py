"""Files of models with experts: all experts are in one file, which other plans read; others are refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import colossalai
from colossalai.mesh import serial_tensor
from colossalai.nn.layer.moe import FFNExperts, MoeLayer, Top2Router, load_moe_model, save_moe_model
from colossalai.testing import spawn


def build(experts: int = 4, seed: int = 0) -> MoeLayer:
    torch.manual_seed(seed)
    layer = MoeLayer(8, experts, Top2Router(), FFNExperts(experts, 8, 16))
    for param in layer.parameters():
        param.data.add_(seed)
    return layer


def _on_ranks(file: Path, **place: Any) -> list[torch.Tensor]:
    colossalai.launch_from_torch({"parallel": {"moe": 2}}, backend="gloo", verbose=False)
    layer = build()
    save_moe_model(layer, file)
    torch.distributed.barrier()
    with pytest.raises(RuntimeError, match=r"experts\.w1: \(4, 8, 16\) in the file, \(8, 8, 16\) in"):
        load_moe_model(build(8), file)  # on every rank
    other = build(seed=1)
    load_moe_model(other, file)
    for mine, loaded in zip(layer.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, loaded)
    return [serial_tensor(p.detach(), p, colossalai.core.global_context.mesh) for p in layer.parameters()]


def test_one_file_has_the_experts_of_all_ranks(tmp_path: Path) -> None:
    whole, _ = spawn(partial(_on_ranks, tmp_path / "model.pt"), 2)
    alone = build(seed=1)
    load_moe_model(alone, tmp_path / "model.pt")
    assert len(whole) == len(list(alone.parameters()))
    for expected, param in zip(whole, alone.parameters(), strict=True):
        assert torch.equal(expected, param)
