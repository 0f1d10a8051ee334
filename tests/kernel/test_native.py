"""Building the kernels in C, and what happens where that is impossible."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from colossalai.kernel.native import adam as native
from colossalai.kernel.native import build
from colossalai.kernel.optimizer import adam
from colossalai.kernel.optimizer.snapshot import copy_past_cache


def lists(weights: torch.Tensor) -> adam.AdamLists:
    half, moments = weights.bfloat16(), (torch.rand_like(weights), torch.rand_like(weights))
    grads = [torch.rand_like(weights).bfloat16()]
    return adam.AdamLists(
        weights=[weights], grads=grads, halves=[half], exp_avgs=[moments[0]], exp_avg_sqs=[moments[1]]
    )


OPTIONS = adam.AdamOptions(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)


def test_the_number_of_threads_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LEAST", 100)
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        torch.manual_seed(0)
        one = lists(torch.rand(12_345))
        native.adam_native_(one, 1, OPTIONS)
        found.append(one)
    assert torch.equal(found[0].weights[0], found[1].weights[0])
    assert torch.equal(found[0].halves[0], found[1].halves[0])


def test_rounding_of_special_numbers() -> None:
    """Infinities and NaN stay what they are, in the weights and in their rounded copy."""
    one = lists(torch.tensor([float("inf"), float("-inf"), float("nan"), 3.3e38]))
    native.adam_native_(one, 1, OPTIONS)
    assert torch.equal(one.halves[0], one.weights[0].bfloat16()) or torch.equal(
        one.halves[0].isnan(), one.weights[0].isnan()
    )
    assert one.halves[0].isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16])
@pytest.mark.parametrize("offset", [0, 1, 32])  # also where nothing is aligned
@pytest.mark.parametrize("numel", [0, 3, 40_000, 3_000_001])
def test_copies_past_the_cache(dtype: torch.dtype, offset: int, numel: int) -> None:
    sources = [torch.randint(100, (numel + offset,)).to(dtype)[offset:], torch.tensor(7.0)]
    room = [torch.full((numel + offset + 8,), 5).to(dtype), torch.tensor(0.0)]
    targets = [room[0][offset : offset + numel], room[1]]
    copy_past_cache(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source)
    assert room[0][offset + numel :].eq(5).all()  # and nothing else
    assert room[0][:offset].eq(5).all()


def test_copies_of_tensors_with_strides() -> None:
    source = torch.rand(300, 400).t()
    target = torch.zeros(400, 300)
    copy_past_cache([target], [source])
    assert torch.equal(target, source)


def run_without_compiler(folder: Path, code: str) -> str:
    """Run ``code`` in a process that has an empty cache and no compiler."""
    env = {**os.environ, "PATH": str(folder), "CC": "", "COLOSSALAI_CACHE": str(folder / "cache")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_without_a_compiler_torch_does_it(tmp_path: Path) -> None:
    code = (
        "import torch, tests.kernel.test_native as t; from colossalai.kernel.optimizer import adam\n"
        "one = t.lists(torch.ones(5)); print(adam.choose(one)); adam.adam_(one, 1, t.OPTIONS)\n"
        "t.test_copies_past_the_cache(torch.float32, 0, 40_000)"
    )
    printed = run_without_compiler(tmp_path, code)
    assert "blocks" in printed
    assert "there is no C compiler: install gcc or clang, or set CC" in printed


def test_a_source_that_does_not_compile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "wrong.c"
    source.write_text("int f( {")
    with pytest.raises(RuntimeError, match=r"wrong\.c.* failed: "):
        build._compile(source, tmp_path / "cache" / "wrong.so")
    assert not list((tmp_path / "cache").iterdir())


def test_a_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOSSALAI_CACHE", str(tmp_path))
    build.load("adam")
    (first,) = tmp_path.iterdir()
    time = first.stat().st_mtime_ns
    build.load("adam")
    assert [p.stat().st_mtime_ns for p in tmp_path.iterdir()] == [time]
