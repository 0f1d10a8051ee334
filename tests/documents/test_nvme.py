"""Page 40: GPT-2 trained with optimizer states on a disk."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.tools import free_port
from tests.documents.pages import code
from tests.documents.scripts import run

SMALLER = ("GPT2Config()", "GPT2Config(n_layer=2, n_embd=512, n_head=8, vocab_size=8192)")
HELPERS = (code("40.loss"), code("40.helpers"))
LINES = r"Model numel: 0\.010 B\n((?:\[\d\] loss: \d+\.\d{3}\n){3})Time: \d+\.\d{3} s\nMem usage: (\d+\.\d{3}) MB\n"


def test_the_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 2)
    optimizer = run(code("40.usage"), model=model)["optimizer"]
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    assert list(tmp_path.iterdir()) == []


def _output(*blocks: str) -> tuple[str, float]:
    """The losses that a script prints, and its memory in MiB."""
    # freed memory goes back to the system, so that what is measured is what is used
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(LINES, done.stdout)
    assert found, done.stdout
    return found[1], float(found[2])


def test_a_gpt_on_the_cpu() -> None:
    """The losses are the same, and at least 0.95 of the bytes of the states are saved."""
    pytest.importorskip("transformers")
    pytest.importorskip("psutil")
    script = (code("40.imports"), "torch.manual_seed(0)\n", *HELPERS, code("40.train_cpu", SMALLER))
    losses, memory = _output(*script, code("40.run_cpu"))
    offloaded_losses, offloaded_memory = _output(*script, code("40.run_cpu_offloaded"))
    assert losses == offloaded_losses
    width, layers, vocabulary, positions = 512, 2, 8192, 1024
    numel = (vocabulary + positions) * width + layers * (12 * width**2 + 13 * width) + 2 * width
    saved = (memory - offloaded_memory) * 2**20 / (8 * numel)
    assert 0.95 <= saved <= 1.05


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


def _compare_gemini(*changes: tuple[str, str], helpers: tuple[tuple[str, str], ...] = ()) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("psutil")
    script = (
        code("40.imports"),
        "torch.manual_seed(0)\n",
        code("40.loss"),
        code("40.helpers", *helpers),
        code("40.train_gemini", SMALLER, *changes),
    )
    losses, memory = _output(_environment(), *script, code("40.run_gemini"))
    offloaded_losses, offloaded_memory = _output(_environment(), *script, code("40.run_gemini_offloaded"))
    assert losses == offloaded_losses
    assert offloaded_memory < memory


@pytest.mark.gpu
def test_a_gpt_with_gemini() -> None:
    _compare_gemini()


def test_a_gpt_with_gemini_on_the_cpu() -> None:
    """In float32, as half precision is slow on a CPU; and in small chunks, as the states of a few pass through memory at a time."""
    on_cpu = ("torch.cuda.current_device()", "'cpu'")
    small = "min_chunk_size_mb=1, search_range_mb=1"
    exact = ("strict_ddp_mode=True", f"strict_ddp_mode=True, dtype=torch.float32, {small}")
    _compare_gemini(on_cpu, exact, helpers=(on_cpu,))
