"""How the tokens of training steps were shared out among experts: numbers, a table, a picture.

``colossalai.nn.expert_loads`` records them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class LayerLoads:
    """The loads of one router, step by step."""

    tokens: list[list[int]] = field(default_factory=list)
    """For each step how many choices fell on each expert."""
    dropped: list[int] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    forgotten: int = 0
    """How many steps came before the first of these."""

    def add(self, tokens: list[int], dropped: int, entropy: float, keep: int) -> None:
        """Add a step, and forget all but the last ``keep``."""
        columns: tuple[list[Any], ...] = (self.tokens, self.dropped, self.entropy)
        for column, value in zip(columns, (tokens, dropped, entropy), strict=True):
            column.append(value)
        if len(self.tokens) > keep:
            self.forgotten += 1
            for column in columns:
                del column[0]

    def numbers(self, step: int = -1) -> dict[str, float]:
        """What is worth watching: the largest load over the mean one (1 is even), the share of choices that
        were dropped, and the mean entropy of a token's scores.
        """
        tokens = self.tokens[step]
        total = max(sum(tokens), 1)
        return {
            "load": max(tokens) * len(tokens) / total,
            "dropped": self.dropped[step] / total,
            "entropy": self.entropy[step],
        }


def steps_to_keep(keep: int) -> int:
    """``keep``, if it is a number of steps."""
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ValueError(f"a history of loads keeps the last steps, at least one; got keep={keep!r}")
    return keep


def load_table(layers: dict[str, LayerLoads]) -> str:
    """The last step as text, a line for each layer."""
    width = max(map(len, layers), default=0)
    lines = []
    for name, layer in layers.items():
        numbers = layer.numbers()
        lines.append(
            f"{name:{width}}  load max/mean {numbers['load']:.2f}  dropped {numbers['dropped']:.1%}"
            f"  entropy {numbers['entropy']:.2f}  tokens {' '.join(map(str, layer.tokens[-1]))}"
        )
    return "\n".join(lines)


def draw_loads(path: str | Path, layers: dict[str, LayerLoads]) -> None:
    """Draw a picture of the loads: for each layer, experts over steps; 1 is an even load."""
    try:
        from matplotlib.figure import Figure  # heavy, and only pictures need it
    except ImportError as error:
        raise ImportError(
            "a picture of loads needs matplotlib, which is not installed; pip install matplotlib"
        ) from error
    figure = Figure(figsize=(10, 1 + 1.8 * len(layers)), layout="constrained")
    axes = figure.subplots(len(layers), squeeze=False, sharex=True)[:, 0]
    image: Any = None
    for axis, (name, layer) in zip(axes, layers.items(), strict=True):
        tokens = torch.tensor(layer.tokens, dtype=torch.float64).T  # (experts, steps)
        share = tokens * len(tokens) / tokens.sum(0).clamp(min=1)
        image = axis.imshow(
            share.numpy(),
            aspect="auto",
            interpolation="nearest",
            cmap="coolwarm",
            vmin=0,
            vmax=2,
            origin="lower",
            extent=(layer.forgotten - 0.5, layer.forgotten + tokens.size(1) - 0.5, -0.5, len(tokens) - 0.5),
        )
        dropped = sum(layer.dropped) / max(float(tokens.sum()), 1)
        axis.set_title(f"{name}: {dropped:.1%} dropped", fontsize=9, loc="left")
        axis.set_ylabel("expert", fontsize=8)
        axis.tick_params(labelsize=8)
    axes[-1].set_xlabel("step", fontsize=8)
    figure.colorbar(image, ax=list(axes), label="load over the mean (2: twice or more)")
    figure.savefig(path, dpi=100)
