"""Monitors of memory see what was there between start and finish."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import pytest
import torch

from colossalai.zero.gemini.memory_tracer import AsyncMemoryMonitor, SyncCudaMemoryMonitor

SIZE = 64 * 2**20


@pytest.mark.skipif(torch.cuda.is_available(), reason="watches the host")
def test_the_thread_sees_what_is_allocated(tmp_path: Path) -> None:
    monitor = AsyncMemoryMonitor(power=1)
    monitor.start()
    idle = monitor.finish()
    monitor.start()
    with pytest.raises(RuntimeError, match=r"measures already; call finish\(\)"):
        monitor.start()
    held = mmap.mmap(-1, SIZE)  # a tensor may get memory that the process has already
    held.write(b"1" * SIZE)
    assert monitor.finish() >= idle + 0.9 * SIZE
    held.close()
    assert monitor.looks >= 2
    monitor.save(tmp_path / "memory.json")
    saved = json.loads((tmp_path / "memory.json").read_text())
    assert saved == monitor.state_dict()
    assert len(monitor) == len(saved["time_stamps"]) == 2
    monitor.clear()
    assert len(monitor) == 0
    with pytest.raises(RuntimeError, match=r"measures nothing; call start\(\)"):
        monitor.finish()


def test_it_does_not_look_all_the_time() -> None:
    assert AsyncMemoryMonitor().interval == 1e-3
    assert AsyncMemoryMonitor(power=1).interval == 0.1


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said without a GPU")
def test_no_gpu() -> None:
    with pytest.raises(RuntimeError, match=r"SyncCudaMemoryMonitor needs a GPU, and there is none"):
        SyncCudaMemoryMonitor().start()


@pytest.mark.gpu
def test_the_peak_of_a_gpu() -> None:
    monitor = SyncCudaMemoryMonitor()
    monitor.start()
    before = torch.cuda.memory_allocated()
    torch.ones(SIZE, dtype=torch.uint8, device="cuda")  # gone at once
    assert monitor.finish() >= before + SIZE
