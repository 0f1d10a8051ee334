"""How much memory of the compute device a training step needs beside model data: activations, temporary tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from colossalai.zero.gemini.chunk_manager import ChunkManager
from colossalai.zero.gemini.placement import AutoPlacementPolicy
from colossalai.zero.gemini.tiers import Tier


@dataclass
class MemStats:
    """What the first step measured, in bytes.

    Between two sampling moments (a module begins) the device's peak is known; what lies above the model data of that time is not
    model data.
    """

    non_model: int = 0
    samples: int = 0
    _model: int = 0

    def restart(self, tier: Tier) -> None:
        self._model = tier.used
        if tier.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(tier.device)

    def sample(self, tier: Tier) -> None:
        self.samples += 1
        if tier.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(tier.device)
            self.non_model = max(self.non_model, peak - min(self._model, tier.used))
        self.restart(tier)


class MemStatsCollector:
    """Writes into ``memstats`` what the compute tier of ``chunk_manager`` needs beside its chunks, from ``start_collection`` on."""

    def __init__(self, chunk_manager: ChunkManager, memstats: MemStats | None = None) -> None:
        self.chunk_manager, self.memstats = chunk_manager, memstats or MemStats()
        self.is_collecting = False

    def start_collection(self) -> None:
        self.is_collecting = True
        self.record_model_data_volume()

    def finish_collection(self) -> None:
        """The last sampling moment."""
        self.sample_overall_data()
        self.is_collecting = False

    def record_model_data_volume(self) -> None:
        """What model data takes now is what a period begins with."""
        if self.is_collecting:
            self.memstats.restart(self.chunk_manager.compute)

    def sample_overall_data(self) -> None:
        """A sampling moment: the most memory since the last one, without model data, is what a step needs beside it."""
        if self.is_collecting:
            self.memstats.sample(self.chunk_manager.compute)

    def margin(self) -> int:
        """Bytes of the compute tier that neither model data nor what was measured beside it takes."""
        compute = self.chunk_manager.compute
        total = compute.limit
        if compute.device.type == "cuda":
            total = min(total, _usable(compute.device) - self.memstats.non_model)
        return total - compute.used


def _usable(device: torch.device) -> int:
    """Bytes of a GPU for one process; a script may allow itself a part of it only."""
    share_of = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    memory = int(torch.cuda.get_device_properties(device).total_memory * share_of(device))
    return int(memory * AutoPlacementPolicy._steady_cuda_cap_ratio)
