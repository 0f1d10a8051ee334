"""torch's ``GradScaler`` that asks all ranks with a part of the model whether a gradient overflowed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from colossalai.amp.groups import group_of, groups_of_experts, maximum_over
from colossalai.context import ParallelMode


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` whose decision to skip a step is that of the whole model-parallel group.

    Args:
        init_scale: the first factor of the loss.
        growth_factor: what the scale is multiplied by after ``growth_interval`` good steps.
        backoff_factor: what it is multiplied by after a step that overflowed.
        growth_interval: how many good steps in a row it takes to grow.
        enabled: ``False``: losses are not scaled and steps not skipped.
        device: ``'cuda'`` or ``'cpu'``; by default CUDA where it is present.
        process_group: the ranks that decide together, by default those of ``ParallelMode.MODEL`` in a
            launched job.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        device: str | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        check_options(init_scale, growth_factor, backoff_factor, growth_interval)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.groups = groups_of_experts() + group_of(ParallelMode.MODEL, process_group)

    def unscale_(self, optimizer: Optimizer) -> None:
        if (
            self.is_enabled() and self._scale is None
        ):  # a rank that never saw a loss must answer the others all the same
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        super().unscale_(optimizer)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # torch's seam for sharded scalers: its result is what `step` and `update` decide by
        total = found_inf.clone()
        # torch unscales all gradients of a device in one call, which must not mix those that FSDP2 has cut
        # with others
        for part in _by_class(optimizer):
            found = super()._unscale_grads_(part, inv_scale, found_inf.clone(), allow_fp16)
            for value in found.values():
                total = torch.maximum(total, value.to(total.device))
        return {total.device: maximum_over(total, self.groups)}

    def found_overflow(self, optimizer: Optimizer) -> bool:
        """Whether ``unscale_`` found, on any rank, a gradient of ``optimizer`` that is inf or nan."""
        if not self.is_enabled():
            return False
        return any(bool(found.item()) for found in self._found_inf_per_device(optimizer).values())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load; of the state of another kind of scaler only the scale is used."""
        own = self.state_dict()
        super().load_state_dict({**own, **{k: v for k, v in state_dict.items() if k in own}})


class _Part:
    """Some of the parameters of an optimizer, as far as torch's scaler looks at them."""

    def __init__(self, params: list[Tensor]) -> None:
        self.param_groups = [{"params": params}]


def _by_class(optimizer: Optimizer) -> list[Any]:
    cut: list[Tensor] = []
    whole: list[Tensor] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            (cut if hasattr(p, "placements") else whole).append(p)
    return [_Part(params) for params in (whole, cut) if params]


def check_options(
    init_scale: float, growth_factor: float, backoff_factor: float, growth_interval: int
) -> None:
    if not (init_scale > 0 and growth_factor > 1 and 0 < backoff_factor < 1 and growth_interval >= 1):
        raise ValueError(
            "fp16 by torch needs init_scale > 0, growth_factor > 1, 0 < backoff_factor < 1 and"
            f" growth_interval >= 1; got {init_scale}, {growth_factor}, {backoff_factor}, {growth_interval}"
        )
