"""The Python of docs/source/en/pipeline_stages.md runs and prints what it says."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

import pytest

import colossalai
from colossalai.testing import spawn

PAGE = Path(__file__).parents[2] / "docs/source/en" / "pipeline_stages.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
OF_A_JOB, OF_ONE_PROCESS = ([b for b in BLOCKS if ("launch_from_torch" in b) is job] for job in (True, False))


def test_the_page_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="needs `pip install transformers`")
    monkeypatch.chdir(tmp_path)
    assert len(OF_ONE_PROCESS) == 5
    for block in OF_ONE_PROCESS:
        exec(compile(block, PAGE.name, "exec"), {"__name__": "page"})
        expected = re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
        assert expected
        assert capsys.readouterr().out.splitlines() == expected


def _run(rank: int, world_size: int, port: int, folder: Path) -> None:
    from transformers import GPT2LMHeadModel

    os.chdir(folder)
    # two ranks may have to share one GPU, which NCCL does not allow
    colossalai.launch_from_torch = partial(colossalai.launch_from_torch, backend="gloo", verbose=False)
    (block,) = OF_A_JOB
    namespace: dict[str, object] = {"__name__": "page"}
    exec(compile(block, PAGE.name, "exec"), namespace)
    losses = namespace["losses"]
    assert isinstance(losses, list)
    if rank == 0:
        assert losses == [None] * 5
    else:
        assert losses[-1] < losses[0] - 0.5
        assert GPT2LMHeadModel.from_pretrained("my-gpt2").config.n_layer == 4


def test_the_job_of_the_page_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs `pip install transformers`")
    spawn(_run, 2, folder=tmp_path)
