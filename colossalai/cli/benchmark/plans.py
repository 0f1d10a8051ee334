"""The tensor-parallel configurations for a number of devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from colossalai.context.tensor_modes import tensor_mode

MODES = ("1d", "2d", "2.5d", "3d")


@dataclass(frozen=True)
class BenchmarkPlan:
    """One tensor mode on ``size`` ranks."""

    size: int
    mode: str | None
    depth: int | None = None

    @property
    def config(self) -> dict[str, Any]:
        """What ``colossalai.launch`` takes."""
        tensor: dict[str, Any] = {"size": self.size, "mode": self.mode}
        if self.depth is not None:
            tensor["depth"] = self.depth
        return {"parallel": {"tensor": tensor}}

    def __str__(self) -> str:
        depth = "" if self.depth is None else f", depth: {self.depth}"
        return f"size: {self.size}, mode: {self.mode}{depth}"

    @property
    def short(self) -> str:
        depth = "" if self.depth is None else f" deep {self.depth}"
        return "serial" if self.mode is None else f"{self.mode}{depth} x{self.size}"


def all_plans(devices: int) -> list[BenchmarkPlan]:
    """One serial plan, then every mode on every number of ranks that divides ``devices``.

    A mode is left out where one of its axes would have a single rank: that is another mode, or none.
    """
    plans = [BenchmarkPlan(1, None)]
    for size in (n for n in range(2, devices + 1) if devices % n == 0):
        for mode in MODES:
            row = tensor_mode(mode)
            for depth in range(1, size + 1) if "depth" in row.options else (None,):
                plan = BenchmarkPlan(size, mode, depth)
                if _fits(plan):
                    plans.append(plan)
    return plans


def _fits(plan: BenchmarkPlan) -> bool:
    row = tensor_mode(plan.mode)
    try:
        axes = row.sizes(plan.size, **({} if plan.depth is None else {"depth": plan.depth}))
    except ValueError:
        return False
    return all(n > 1 for axis, n in axes.items() if axis != "dep")
