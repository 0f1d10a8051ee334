"""``read_pretrained``: stored tensors one by one, under the names of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from colossalai.checkpoint_io import read_pretrained
from colossalai.zero import GeminiDDP


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.words.weight


def test_into_gemini(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    stored = {"words.weight": torch.randn(6, 4), "head.bias": torch.randn(6)}
    save_file(stored, path)
    with torch.device("meta"):
        model = Tied()
    gemini = GeminiDDP(model, "cpu", dtype=torch.float32)
    values = read_pretrained(gemini.unwrap(), path)
    assert next(values)[0] in stored
    found = dict(read_pretrained(gemini.unwrap(), path))
    assert set(found) == {"words.weight", "head.bias"}  # the tied weight comes once
    for name, value in found.items():
        gemini.load_state_dict({name: value}, strict=False)
    state = gemini.state_dict()
    torch.testing.assert_close(state["head.weight"], stored["words.weight"])
    torch.testing.assert_close(state["head.bias"], stored["head.bias"])


def test_a_file_of_another_model(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"words.weight": torch.zeros(5, 4), "tail": torch.zeros(1)}, path)
    with pytest.raises(
        RuntimeError,
        match=r"does not fit Tied: it lacks head.bias; the model does not know tail; sizes differ",
    ):
        next(read_pretrained(Tied(), path))
