"""How much memory of the compute device a training step needs beside model data: activations, temporary tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
