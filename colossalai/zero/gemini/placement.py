"""Placement policies: where chunks rest, and how much of the compute tier they may fill.

| policy | home of a chunk | wholes on the compute tier |
|---|---|---|
| ``cuda`` | compute | as many as the tier takes |
| ``cpu`` | host | those in use, and a few ahead |
| ``const`` | host | up to a fixed number of bytes |
| ``auto`` | compute for as many as fit beside what the first step measured, else host | as many as fit |

A chunk's optimizer states lie at its home, and it is updated there.

A step needs memory of the compute device beside model data, for activations and temporary tensors.
``MemStatsCollector`` measures it in the first step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from colossalai.zero.gemini.chunk_manager import ChunkManager
from colossalai.zero.gemini.tiers import UNLIMITED, Tier

MB = 1024**2


class PlacementPolicy:
    """Says where chunks rest from the beginning, and how many wholes stay on the compute tier."""

    name: ClassVar[str]
    rests_on_compute: ClassVar[bool] = False
    measures: ClassVar[bool] = False  # chunks move to the compute tier after the first step, as many as fit

    def limit(self) -> int:
        """Return the bytes of whole chunks to keep on the compute tier while they are not in use."""
        return 0

    def warmup_limit(self, capacity: int) -> int:
        """Return the same for the first step, on a compute tier of ``capacity`` bytes."""
        return UNLIMITED

    @classmethod
    def get_default_device(cls) -> torch.device:
        on_gpu = cls.rests_on_compute and torch.cuda.is_available()
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


class CPUPlacementPolicy(PlacementPolicy):
    """Chunks rest on the host."""

    name = "cpu"


class CUDAPlacementPolicy(PlacementPolicy):
    """Chunks rest on the device that computes."""

    name = "cuda"
    rests_on_compute = True

    def limit(self) -> int:
        return UNLIMITED


class AutoPlacementPolicy(PlacementPolicy):
    """Keeps as many chunks on the compute tier as fit beside what the first step measured.

    In the first step it is not known what activations need: they are left ``_warmup_non_model_data_ratio`` of
    the device.
    """

    name = "auto"
    measures = True
    _warmup_non_model_data_ratio: ClassVar[float] = 0.8
    _steady_cuda_cap_ratio: ClassVar[float] = 0.9

    def limit(self) -> int:
        return UNLIMITED

    def warmup_limit(self, capacity: int) -> int:
        if capacity >= UNLIMITED:
            return UNLIMITED
        return int(capacity * (1 - self._warmup_non_model_data_ratio))

    @classmethod
    def set_warmup_non_model_data_ratio(cls, ratio: float) -> None:
        """Set the share of the compute tier that is left to activations in the first step."""
        cls._warmup_non_model_data_ratio = _share("warmup_non_model_data_ratio", ratio)

    @classmethod
    def set_steady_cuda_cap_ratio(cls, ratio: float) -> None:
        """Set the share of the device that is used after the first step."""
        cls._steady_cuda_cap_ratio = _share("steady_cuda_cap_ratio", ratio)


class ConstPlacementPolicy(PlacementPolicy):
    name = "const"
    _accessed_memory_boundary: ClassVar[int] = 1024 * MB

    def limit(self) -> int:
        return self._accessed_memory_boundary

    @classmethod
    def set_const_memory_boundary(cls, cuda_memory_mb: float) -> None:
        """Limit whole chunks to this many MB of the compute tier."""
        if not (isinstance(cuda_memory_mb, int | float) and cuda_memory_mb > 0):
            raise ValueError(
                f"set_const_memory_boundary needs a number of MB above 0, got {cuda_memory_mb!r}"
            )
        cls._accessed_memory_boundary = round(cuda_memory_mb * MB)


def _share(name: str, ratio: float) -> float:
    if not 0 < ratio < 1:
        raise ValueError(f"{name} is a share between 0 and 1, got {ratio!r}")
    return float(ratio)


POLICIES: dict[str, type[PlacementPolicy]] = {
    policy.name: policy
    for policy in (CPUPlacementPolicy, CUDAPlacementPolicy, AutoPlacementPolicy, ConstPlacementPolicy)
}


class PlacementPolicyFactory:
    """Finds policies by their names."""

    @staticmethod
    def create(policy_name: str) -> type[PlacementPolicy]:
        if policy_name not in POLICIES:
            raise ValueError(
                f"there is no placement policy {policy_name!r}; there are {', '.join(map(repr, POLICIES))}"
            )
        return POLICIES[policy_name]

    @staticmethod
    def get_policy_names() -> tuple[str, ...]:
        return tuple(POLICIES)

    @staticmethod
    def get_default_device(policy_name: str) -> torch.device:
        return PlacementPolicyFactory.create(policy_name).get_default_device()


@dataclass
class MemStats:
    """What the first step measured, in bytes.

    Between two sampling moments (a module begins) the device's peak is known; what exceeds the model data of
    that time is not model data.
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
    """Measures, into ``memstats``, what a step needs on the compute tier beside chunks."""

    def __init__(self, chunk_manager: ChunkManager, memstats: MemStats | None = None) -> None:
        self.chunk_manager, self.memstats = chunk_manager, memstats or MemStats()
        self.is_collecting = False

    def start_collection(self) -> None:
        self.is_collecting = True
        self.record_model_data_volume()

    def finish_collection(self) -> None:
        """Take the last sample."""
        self.sample_overall_data()
        self.is_collecting = False

    def record_model_data_volume(self) -> None:
        """Note how much model data there is at the begin of a period."""
        if self.is_collecting:
            self.memstats.restart(self.chunk_manager.compute)

    def sample_overall_data(self) -> None:
        """Take a sample: the most memory since the last one, without model data."""
        if self.is_collecting:
            self.memstats.sample(self.chunk_manager.compute)

    def margin(self) -> int:
        """Return the bytes of the compute tier that model data and what was measured leave free."""
        compute = self.chunk_manager.compute
        total = compute.limit
        if compute.device.type == "cuda":
            total = min(total, _usable(compute.device) - self.memstats.non_model)
        return total - compute.used

    def capacity(self) -> int:
        """Bytes of the compute tier that this process may use at all."""
        compute = self.chunk_manager.compute
        if compute.device.type != "cuda":
            return compute.limit
        return min(compute.limit, _memory(compute.device))


def _memory(device: torch.device) -> int:
    """Bytes of a GPU for one process; a script may allow itself a part of it only."""
    share_of = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    return int(torch.cuda.get_device_properties(device).total_memory * share_of(device))


def _usable(device: torch.device) -> int:
    """Bytes of a GPU that one process uses after the first step."""
    return int(_memory(device) * AutoPlacementPolicy._steady_cuda_cap_ratio)
