"""A record of how the tokens of each training step were shared out among experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colossalai.nn.layer.moe.routers import ExpertLoads, MoeRouter, Routing
from colossalai.utils.activation_checkpoint import is_computed_again


@dataclass
class LayerLoads:
    """The loads of one router, step by step."""

    tokens: list[list[int]] = field(default_factory=list)
    """For each step how many choices fell on each expert."""
    dropped: list[int] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)

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


class LoadHistory:
    """Records the loads of all routers of a model: ``step()`` ends a step, of one or more micro-batches.

    The numbers are those of all ranks, so one rank's record is enough; in a pipeline each has those of its
    stages.  Numbers wait on the device until they are asked for.
    """

    def __init__(self, model: nn.Module) -> None:
        self._pending: dict[str, list[ExpertLoads]] = {}
        self._steps: list[dict[str, list[ExpertLoads]]] = []
        self._layers: dict[str, LayerLoads] = {}
        routers = [(name, m) for name, m in model.named_modules() if isinstance(m, MoeRouter)]
        if not routers:
            raise ValueError(f"{type(model).__name__} has no router whose loads could be recorded")
        self._hooks = [router.register_forward_hook(self._noting(name)) for name, router in routers]

    def _noting(self, name: str) -> Any:
        name = name.removesuffix(".router").removesuffix(".moe_layer") or "experts"

        def note(router: nn.Module, args: Any, routing: Routing) -> None:
            if router.training and not is_computed_again():
                self._pending.setdefault(name, []).append(routing.loads)

        return note

    def step(self) -> None:
        """End a step."""
        if self._pending:
            self._steps.append(self._pending)
            self._pending = {}

    def close(self) -> None:
        """Record no more."""
        for hook in self._hooks:
            hook.remove()

    @property
    def layers(self) -> dict[str, LayerLoads]:
        """The loads of each layer; this waits for the device."""
        steps, self._steps = self._steps, []
        for step in steps:
            for name, parts in step.items():
                layer = self._layers.setdefault(name, LayerLoads())
                layer.tokens.append(torch.stack([part.tokens for part in parts]).sum(0).tolist())
                layer.dropped.append(int(torch.stack([part.dropped for part in parts]).sum()))
                layer.entropy.append(float(torch.stack([part.entropy for part in parts]).mean()))
        return self._layers


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
        )
        dropped = sum(layer.dropped) / max(float(tokens.sum()), 1)
        axis.set_title(f"{name}: {dropped:.1%} dropped", fontsize=9, loc="left")
        axis.set_ylabel("expert", fontsize=8)
        axis.tick_params(labelsize=8)
    axes[-1].set_xlabel("step", fontsize=8)
    figure.colorbar(image, ax=list(axes), label="load over the mean (2: twice or more)")
    figure.savefig(path, dpi=100)
