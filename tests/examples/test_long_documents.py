"""examples/language/long_documents: a cut sequence learns as a whole one does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.examples.scripts import run_script

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")

TRAIN = "language/long_documents/train.py"
OPTIONS = ("--length", 200, "--steps", 4, "--documents", 200, "--batch-size", 2)


def losses(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"step \d / 4 \| documents: \d+ \| loss: (\S+)", text)]


def test_two_ranks_learn_what_one_does(tmp_path: Path) -> None:
    alone = run_script(TRAIN, *OPTIONS, "--out", tmp_path / "alone")
    assert "rows of 200 tokens; a rank holds 200 of each" in alone
    cut = run_script(TRAIN, *OPTIONS, "--out", tmp_path / "cut", nprocs=2)
    assert "a rank holds 100 of each" in cut
    assert losses(cut) == pytest.approx(losses(alone), abs=2e-3)
    assert losses(cut)[-1] < losses(cut)[0] - 0.5
    models = [
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("alone", "cut")
    ]
    for name, tensor in models[0].items():
        torch.testing.assert_close(models[1][name], tensor, rtol=1e-2, atol=2e-3)
