"""The numbers of a training: kept in a file as they come, drawn as a picture at the end."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Metrics:
    """One JSON object per line and event, in ``path`` and in ``records``.

    A training that goes on from step ``keep_until`` keeps the lines up to there.  Only the ``active`` rank
    has a file.
    """

    def __init__(self, path: Path, *, keep_until: int, active: bool) -> None:
        self.path, self._active = path, active
        self.records: list[dict[str, Any]] = []
        if active:
            path.parent.mkdir(parents=True, exist_ok=True)
            if keep_until and path.is_file():
                old = map(json.loads, path.read_text().splitlines())
                self.records = [record for record in old if record["step"] <= keep_until]
            path.write_text("".join(json.dumps(record) + "\n" for record in self.records))

    def add(self, **record: float) -> None:
        self.records.append(record)
        if self._active:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")


def unigram_entropy(tokens: Tensor) -> float:
    """The loss in nats of a model that knows how often each token occurs and nothing else."""
    frequencies = torch.bincount(tokens).double() / len(tokens)
    return -torch.xlogy(frequencies, frequencies).sum().item()


def smooth(losses: list[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average; divided by the sum of the weights, so that it does not start at zero."""
    average, smoothed = 0.0, []
    for count, loss in enumerate(losses, start=1):
        average = weight * average + (1 - weight) * loss
        smoothed.append(average / (1 - weight**count))
    return smoothed


@dataclass(frozen=True)
class Baselines:
    """What the losses of a picture compare with, in nats per token."""

    uniform: float
    unigram: float
    bytes_per_token: float


def plot(records: list[dict[str, Any]], path: Path, baselines: Baselines) -> Path:
    """Training and validation loss over steps, with what two models without context would reach."""
    import matplotlib as mpl

    mpl.use("Agg")  # no window: also works without a display
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for level, label in (
        (baselines.uniform, "every token equally likely"),
        (baselines.unigram, "tokens by their frequency"),
    ):
        axes.axhline(level, color="0.6", linestyle="--", linewidth=1)
        axes.annotate(
            f"{label}: {level:.2f}", (1, level), xycoords=("axes fraction", "data"),
            xytext=(-6, 4), textcoords="offset points", ha="right", color="0.4", fontsize=9,
        )  # fmt: skip
    if train := [(r["step"], r["train_loss"]) for r in records if "train_loss" in r]:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
        axes.plot(steps, smooth(list(losses)), color="tab:blue", label="training (smoothed)")
    if validation := [(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r]:
        axes.plot(*zip(*validation, strict=True), "o-", color="tab:orange", markersize=5, label="validation")
        _, last = validation[-1]
        axes.annotate(f"{last:.2f}", validation[-1], xytext=(0, 8), textcoords="offset points", ha="center")
    axes.set(
        title="A small GPT learns Python from its library", xlabel="step", ylabel="loss (nats per token)"
    )
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.1 * baselines.uniform)
    nats_per_bit = math.log(2) * baselines.bytes_per_token
    scale = axes.secondary_yaxis("right", functions=(lambda n: n / nats_per_bit, lambda b: b * nats_per_bit))
    scale.set_ylabel("bits per byte of text")
    axes.grid(alpha=0.2)
    axes.legend(loc="lower left")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
