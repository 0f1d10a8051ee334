"""A batch 16 times as large, in as many epochs: SGD, LARS and LAMB, each with the best of several learning rates.

Data: 40 Gaussian clouds in 32 dimensions, 10 classes (synthetic).  Model: a perceptron with 6 hidden layers and no
normalization, whose gradients differ a lot in size from layer to layer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.nn.lr_scheduler import PolynomialWarmupLR
from colossalai.nn.optimizer import FusedSGD, Lamb, Lars

CLASSES, CLOUDS, WIDTH, DEPTH = 10, 40, 64, 6
INPUTS, TRAINING, TEST = 32, 8192, 2048
Maker = Callable[[Iterable[nn.Parameter], float], Optimizer]

OPTIMIZERS: dict[str, Maker] = {
    "SGD": lambda p, lr: FusedSGD(p, lr=lr, momentum=0.9, weight_decay=1e-4),
    "LARS": lambda p, lr: Lars(p, lr=lr, momentum=0.9, eeta=1e-2, weight_decay=1e-4),
    "LAMB": lambda p, lr: Lamb(p, lr=lr, weight_decay=1e-4),
}


@dataclass(frozen=True)
class Trial:
    optimizer: str
    batch: int
    rates: tuple[float, ...]


TRIALS = (
    Trial("SGD", 32, (0.03, 0.1)),
    Trial("SGD", 512, (0.1, 0.2, 0.3, 0.5, 1.0, 1.6)),
    Trial("LARS", 512, (1.0, 2.0, 4.0)),
    Trial("LAMB", 512, (0.01, 0.03, 0.06)),
)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(CLOUDS, INPUTS, generator=generator)
    clouds = torch.randint(0, CLOUDS, (TRAINING + TEST,), generator=generator)
    return centers[clouds] + 0.9 * torch.randn(len(clouds), INPUTS, generator=generator), clouds % CLASSES


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    sizes = [INPUTS] + [WIDTH] * DEPTH
    hidden = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))


def train(name: str, batch: int, lr: float, epochs: int = 10, seed: int = 1) -> list[float]:
    """The accuracy on the test data after each epoch."""
    x, y = data()
    net = model(seed)
    optimizer = OPTIMIZERS[name](net.parameters(), lr)
    steps = epochs * (TRAINING // batch)
    scheduler = PolynomialWarmupLR(optimizer, steps, warmup_steps=steps // 5, end_lr=0.0, power=2.0)
    generator = torch.Generator().manual_seed(seed)
    accuracies = []
    for _ in range(epochs):
        for chosen in torch.randperm(TRAINING, generator=generator).split(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[chosen]), y[chosen]).backward()
            optimizer.step()
            scheduler.step()
        with torch.no_grad():
            right = net(x[TRAINING:]).argmax(1) == y[TRAINING:]
        accuracies.append(right.float().mean().item())
    return accuracies


def plot(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure: Any = pyplot.figure(figsize=(6, 4))
    axes = figure.add_subplot(xlabel="epoch", ylabel="test accuracy", ylim=(0, 1))
    for label, curve in curves.items():
        axes.plot(range(1, len(curve) + 1), curve, label=label)
    axes.legend()
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="where to save the curves (needs matplotlib)")
    args = parser.parse_args()
    best: dict[str, list[float]] = {}
    for trial in TRIALS:
        label = f"{trial.optimizer}, batch {trial.batch}"
        curves = {lr: train(trial.optimizer, trial.batch, lr, args.epochs, args.seed) for lr in trial.rates}
        rate = max(curves, key=lambda lr: curves[lr][-1])
        best[f"{label}, lr {rate}"] = curves[rate]
        found = "  ".join(f"{lr}: {curve[-1]:.3f}" for lr, curve in curves.items())
        print(f"{label:16} best {curves[rate][-1]:.3f}   by learning rate  {found}", flush=True)
    if args.plot is not None:
        plot(best, args.plot)
        print(f"curves saved to {args.plot}")


if __name__ == "__main__":
    main()
