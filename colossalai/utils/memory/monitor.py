"""Monitors of this process's memory: ``start()``, do something, ``finish()`` says how many bytes were in use
at most.
"""

from __future__ import annotations

import json
import os
import threading
import time

import torch

from colossalai.utils.device import get_current_device
from colossalai.utils.memory.device import colo_device_memory_used

SHORTEST = 1e-3  # seconds between two looks: a thread that looks all the time would slow down what it watches


class MemoryMonitor:
    """The most bytes of each measurement, and when it ended."""

    def __init__(self) -> None:
        self.time_stamps: list[float] = []
        self.mem_stats: list[int] = []

    def __len__(self) -> int:
        return len(self.mem_stats)

    def note(self, most: int) -> int:
        self.time_stamps.append(time.time())
        self.mem_stats.append(most)
        return most

    def clear(self) -> None:
        self.time_stamps.clear()
        self.mem_stats.clear()

    def state_dict(self) -> dict[str, list[float]]:
        return {"time_stamps": list(self.time_stamps), "mem_stats": list(self.mem_stats)}

    def save(self, filename: str | os.PathLike[str]) -> None:
        """All measurements, as JSON."""
        with open(filename, "w") as file:
            json.dump(self.state_dict(), file)


class SyncCudaMemoryMonitor(MemoryMonitor):
    """Asks torch's allocator for the peak of its tensors: exact, on a GPU only, and it resets that peak."""

    def start(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(
                "SyncCudaMemoryMonitor needs a GPU, and there is none; AsyncMemoryMonitor watches the host"
                " too"
            )
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def finish(self) -> int:
        torch.cuda.synchronize()
        return self.note(torch.cuda.max_memory_allocated())


class AsyncMemoryMonitor(MemoryMonitor):
    """A thread that looks every ``10 ** -power`` seconds, at most a thousand times each second; what is
    shorter it does not see.

    It sees what this process uses of its device: tensors on a GPU, everything resident on a CPU.
    """

    def __init__(self, power: int = 10) -> None:
        super().__init__()
        self.interval = max(10.0**-power, SHORTEST)
        self.looks = 0
        self._stop = threading.Event()
        self._most = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is not None:
            raise RuntimeError(
                "this AsyncMemoryMonitor measures already; call finish() before the next start()"
            )
        self._stop.clear()
        self._most = self.looks = 0
        self._look(device := get_current_device())
        self._thread = threading.Thread(target=self._watch, args=(device,), daemon=True)
        self._thread.start()

    def finish(self) -> int:
        if self._thread is None:
            raise RuntimeError("this AsyncMemoryMonitor measures nothing; call start() before finish()")
        self._stop.set()
        self._thread.join()
        self._thread = None
        self._look(get_current_device())
        return self.note(self._most)

    def _watch(self, device: torch.device) -> None:
        while not self._stop.wait(self.interval):
            self._look(device)

    def _look(self, device: torch.device) -> None:
        self.looks += 1
        self._most = max(self._most, colo_device_memory_used(device))
