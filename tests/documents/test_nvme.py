"""Page 40: GPT-2 trained with optimizer states on a disk."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.cli.tools import free_port
from tests.documents.pages import code
from tests.documents.scripts import run

WIDTH = 512
HELPERS = (code("40.loss"), code("40.helpers"))
FEW = ("get_data(4, 128", "get_data(2, 32")  # tokens: what takes time, and no state
LINES = (
    r"Model numel: 0\.\d{3} B\n((?:\[\d\] loss: \d+\.\d{3}\n){3})Time: \d+\.\d{3} s\nMem usage:"
    r" (\d+\.\d{3}) MB\n"
)


def _smaller(width: int = WIDTH) -> tuple[str, str]:
    return "GPT2Config()", f"GPT2Config(n_layer=2, n_embd={width}, n_head=8, vocab_size=8192)"


def test_the_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 2)
    optimizer = run(code("40.usage"), model=model)["optimizer"]
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    assert list(tmp_path.iterdir()) == []


def _outputs(*scripts: Sequence[str]) -> list[tuple[str, float]]:
    """The losses that each script prints, and its memory in MiB; they run beside each other."""
    # freed memory goes back to the system, so that what is measured is what is used
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", "\n".join(blocks)],
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for blocks in scripts
    ]
    texts = [process.communicate() for process in running]
    results = []
    for process, (printed, errors) in zip(running, texts, strict=True):
        assert process.returncode == 0, errors
        found = re.search(LINES, printed)
        assert found, printed
        results.append((found[1], float(found[2])))
    return results


def test_a_gpt_on_the_cpu() -> None:
    """The losses are the same, and at least 0.95 of the bytes of the states are saved."""
    pytest.importorskip("transformers")
    pytest.importorskip("psutil")
    script = (code("40.imports"), "torch.manual_seed(0)\n", *HELPERS, code("40.train_cpu", _smaller(), FEW))
    in_memory, offloaded = _outputs((*script, code("40.run_cpu")), (*script, code("40.run_cpu_offloaded")))
    assert in_memory[0] == offloaded[0]
    assert 0.95 <= _saved(in_memory[1], offloaded[1]) <= 1.05


def _saved(memory: float, offloaded_memory: float, nbytes: int = 8, width: int = WIDTH) -> float:
    """How much of the states of the model, ``nbytes`` for each parameter, is not in memory any more."""
    layers, vocabulary, positions = 2, 8192, 1024
    numel = (vocabulary + positions) * width + layers * (12 * width**2 + 13 * width) + 2 * width
    return (memory - offloaded_memory) * 2**20 / (nbytes * numel)


def _environment() -> str:
    """As torchrun gives it to one process."""
    names = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": free_port(),
    }
    return f"import os\nos.environ.update({ {name: str(value) for name, value in names.items()} })\n"


def _saved_by_gemini(
    *changes: tuple[str, str],
    helpers: tuple[tuple[str, str], ...] = (),
    nbytes: int = 8,
    width: int = WIDTH,
) -> float:
    pytest.importorskip("transformers")
    pytest.importorskip("psutil")
    script = (
        code("40.imports"),
        "torch.manual_seed(0)\n",
        code("40.loss"),
        code("40.helpers", *helpers),
        code("40.train_gemini", _smaller(width), FEW, *changes),
    )
    in_memory, offloaded = _outputs(
        (_environment(), *script, code("40.run_gemini")),
        (_environment(), *script, code("40.run_gemini_offloaded")),
    )
    assert in_memory[0] == offloaded[0]
    return _saved(in_memory[1], offloaded[1], nbytes, width)


@pytest.mark.gpu
def test_a_gpt_with_gemini() -> None:
    """As it is written: in half precision, whose float32 weights are states too.

    Of a process with CUDA some MiB come and go, whatever the model: so it is one with 400 MiB of states.
    """
    assert _saved_by_gemini(nbytes=12, width=1024) >= 0.95


def test_a_gpt_with_gemini_on_the_cpu() -> None:
    """In float32, as half precision is slow on a CPU; chunks have the size that they have by default, and few
    are enough for the model.
    """
    on_cpu = ("torch.cuda.current_device()", "'cpu'")
    exact = ("strict_ddp_mode=True", "strict_ddp_mode=True, dtype=torch.float32")
    assert 0.95 <= _saved_by_gemini(on_cpu, exact, helpers=(on_cpu,)) <= 1.05
