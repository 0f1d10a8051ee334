"""What ``auto_checkpoint`` has chosen, as text and as a picture."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from colossalai.auto_parallel.checkpoint.timeline import StepTimeline
from colossalai.utils.text import size_text, table

if TYPE_CHECKING:
    from colossalai.auto_parallel.checkpoint.planner import CheckpointPlanner


class CurvePoint(NamedTuple):
    """A budget in bytes, the predicted peak below it, and the seconds of a step."""

    budget: int
    peak: int
    seconds: float


@dataclass(frozen=True)
class CheckpointPlan:
    """The modes of the blocks of ``model``, and what a step needs with them.

    ``peak`` is what the whole step needed when it was played, or run on the GPU; ``seconds`` is its time,
    predicted or measured there, of which a better plan could save at most the share ``gap``.
    """

    model: nn.Module
    budget: int
    peak: int
    seconds: float
    gap: float
    modes: dict[str, str]
    timeline: StepTimeline = field(repr=False)
    regions: tuple[tuple[str, ...], ...] = ()
    """Blocks that are computed again together; their modes are those of their second run."""
    reserved: int = 0
    resting: int = 0
    """Bytes of weights, gradients and states that may lie on the host and will lie on the device."""
    notes: tuple[str, ...] = ()
    planner: CheckpointPlanner | None = field(default=None, repr=False)

    def curve(self, points: int = 15) -> list[CurvePoint]:
        """The seconds of a step for budgets from the least possible to all that is needed."""
        assert self.planner is not None
        return self.planner.curve(points)

    def plot(self, path: str) -> None:
        """Draw the curve into a file."""
        plot_curve(self.curve(), path, {"this plan": (self.peak, self.seconds)})

    def __str__(self) -> str:
        line = self.timeline
        worst, what = max(
            (line.before.peak, "before the first block"),
            *(
                (piece.peak, f"in the forward pass of {line.calls[i]}")
                for i, piece in enumerate(line.forward)
            ),
            *((piece.peak, f"after {line.calls[i]}") for i, piece in enumerate(line.between)),
            *((piece.peak, f"in the backward pass of {line.calls[i]}") for i, piece in line.backward.items()),
            (line.step.peak, "in the step of the optimizer"),
        )
        kept = line.between[-1].start - line.before.start if line.between else 0
        rows = [
            ("memory", size_text(self.budget)),
            ("peak", f"{size_text(self.peak)}, {what}"),
            ("  weights", size_text(line.weights)),
            ("  optimizer states", size_text(line.states)),
            ("  reserved", size_text(self.reserved)),
            *([("  moved to the device", size_text(self.resting))] if self.resting else []),
            ("  kept by the forward pass", size_text(kept)),
            ("  gradients at the end", size_text(line.gradients)),
            (
                "step",
                f"{self.seconds * 1e3:.3g} ms predicted" + (f", gap {self.gap:.1%}" if self.gap else ""),
            ),
        ]
        counts = Counter(self.modes.values())
        rows += [(f"blocks in mode {mode}", str(count)) for mode, count in counts.items()]
        if self.regions:
            inside = len({name for names in self.regions for name in names})
            rows.append(("blocks in regions", f"{inside}, in {len(self.regions)} regions"))
        notes = list(self.notes)
        head = line.between[-1].peak - line.between[-1].start if line.between else 0
        if head > worst / 4 and line.between[-1].peak == worst:
            notes.append(
                f"what follows the last block, such as a head and a loss, needs {size_text(head)}, which no"
                " mode changes; for language models see colossalai.nn.chunk_causal_loss"
            )
        return "\n".join([*table(rows), *(f"note: {note}" for note in notes)])


def plot_curve(curve: list[CurvePoint], path: str, marks: dict[str, tuple[int, float]] | None = None) -> None:
    """Draw the time of a step over its peak memory into a file; needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(6, 4))
    axes: Any = figure.add_subplot()
    axes.plot([p.peak / 2**20 for p in curve], [p.seconds * 1e3 for p in curve], marker="o")
    for name, (peak, seconds) in (marks or {}).items():
        axes.plot([peak / 2**20], [seconds * 1e3], marker="*", markersize=14, linestyle="", label=name)
        axes.legend()
    axes.set_xlabel("peak memory (MB)")
    axes.set_ylabel("step time (ms)")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
