"""A batch 16 times as large, in as many epochs: SGD, LARS and LAMB, each with the best of several learning
rates.

The model is a perceptron with 6 hidden layers and no normalization, whose gradients differ a lot in size from
layer to layer.  The data are scikit-learn's handwritten digits, or Gaussian clouds where scikit-learn is not
installed.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm import tqdm

from colossalai.nn.lr_scheduler import PolynomialWarmupLR
from colossalai.nn.optimizer import FusedSGD, Lamb, Lars
from titans.utils.scripts import script_parser

CLASSES, DEPTH = 10, 6
Maker = Callable[[Iterable[nn.Parameter], float], Optimizer]

OPTIMIZERS: dict[str, Maker] = {
    "SGD": lambda p, lr: FusedSGD(p, lr=lr, momentum=0.9, weight_decay=1e-4),
    "LARS": lambda p, lr: Lars(p, lr=lr, momentum=0.9, eeta=1e-2, weight_decay=1e-4),
    "LAMB": lambda p, lr: Lamb(p, lr=lr, weight_decay=1e-4),
}


class Data(NamedTuple):
    """Inputs (count, features) and their classes, to train on and to test with."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Trial:
    optimizer: str
    batch: int
    rates: tuple[float, ...]


@dataclass(frozen=True)
class Problem:
    what: str
    load: Callable[[], Data]
    width: int
    epochs: int
    trials: tuple[Trial, ...]


def digits() -> Data:
    """Every fifth is for testing."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = torch.tensor(found.data, dtype=torch.float32), torch.tensor(found.target)
    test = torch.arange(len(y)) % 5 == 4
    x = (x - x[~test].mean(0)) / x[~test].std(0).clamp_min(1.6)  # pixels go to 16; some never change
    return Data(x[~test], y[~test], x[test], y[test])


def clouds(count: int = 40, features: int = 32, training: int = 8192, test: int = 2048) -> Data:
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(count, features, generator=generator)
    chosen = torch.randint(0, count, (training + test,), generator=generator)
    x = centers[chosen] + 0.9 * torch.randn(training + test, features, generator=generator)
    y = chosen % CLASSES
    return Data(x[:training], y[:training], x[training:], y[training:])


PROBLEMS = {
    "digits": Problem(
        "1438 handwritten digits of scikit-learn to train on, 359 to test with",
        digits,
        width=128,
        epochs=30,
        trials=(
            Trial("SGD", 32, (0.03, 0.05, 0.1)),
            Trial("SGD", 512, (0.1, 0.2, 0.3, 0.5, 0.8, 1.6)),
            Trial("LARS", 512, (1.0, 2.0, 3.0, 5.0)),
            Trial("LAMB", 512, (0.02, 0.03, 0.04, 0.06)),
        ),
    ),
    "clouds": Problem(
        "40 Gaussian clouds of 10 classes in 32 dimensions (synthetic)",
        clouds,
        width=64,
        epochs=10,
        trials=(
            Trial("SGD", 32, (0.03, 0.1)),
            Trial("SGD", 512, (0.1, 0.2, 0.3, 0.5, 1.0, 1.6)),
            Trial("LARS", 512, (1.0, 2.0, 4.0)),
            Trial("LAMB", 512, (0.01, 0.03, 0.06)),
        ),
    ),
}


def build_model(features: int, width: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    sizes = [features] + [width] * DEPTH
    hidden = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, CLASSES))


def train(problem: Problem, name: str, batch: int, lr: float, seed: int = 1) -> list[float]:
    """The accuracy on the test data after each epoch."""
    data = problem.load()
    net = build_model(data.x.shape[1], problem.width, seed)
    optimizer = OPTIMIZERS[name](net.parameters(), lr)
    steps = problem.epochs * -(-len(data.x) // batch)
    scheduler = PolynomialWarmupLR(optimizer, steps, warmup_steps=steps // 5, end_lr=0.0, power=2.0)
    generator = torch.Generator().manual_seed(seed)
    accuracies = []
    for _ in range(problem.epochs):
        for chosen in torch.randperm(len(data.x), generator=generator).split(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(data.x[chosen]), data.y[chosen]).backward()
            optimizer.step()
            scheduler.step()
        with torch.no_grad():
            right = net(data.test_x).argmax(1) == data.test_y
        accuracies.append(right.float().mean().item())
    return accuracies


def plot(curves: dict[str, list[float]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure: Any = pyplot.figure(figsize=(6, 4))
    axes = figure.add_subplot(title=title, xlabel="epoch", ylabel="test accuracy", ylim=(0, 1))
    for label, curve in curves.items():
        axes.plot(range(1, len(curve) + 1), curve, label=label)
    axes.grid(alpha=0.2)
    axes.legend(loc="lower right")
    figure.savefig(path, bbox_inches="tight", dpi=120)
    pyplot.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = script_parser(__doc__)
    found = {name: importlib.util.find_spec(name) is not None for name in ("sklearn", "matplotlib")}
    parser.add_argument(
        "--data",
        choices=PROBLEMS,
        default="digits" if found["sklearn"] else "clouds",
        help="what to learn; by default digits if scikit-learn is installed (here: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1, help="of weights and batches (%(default)s)")
    parser.add_argument("--plot", type=Path, help="save the curves as a picture (needs matplotlib)")
    args = parser.parse_args()
    if args.data == "digits" and not found["sklearn"]:
        parser.error("the digits come with scikit-learn: pip install scikit-learn, or take --data clouds")
    if args.plot is not None and not found["matplotlib"]:
        parser.error("--plot needs matplotlib: pip install matplotlib, or leave --plot out")
    return args


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # faster for so small a model, and the same numbers on every machine
    problem = PROBLEMS[args.data]
    print(f"data: {problem.what}; {problem.epochs} epochs", flush=True)
    best: dict[str, list[float]] = {}
    bar = tqdm(total=sum(len(trial.rates) for trial in problem.trials), unit="run", leave=False)
    for trial in problem.trials:
        label = f"{trial.optimizer}, batch {trial.batch}"
        curves = {}
        for lr in trial.rates:
            bar.set_description(f"{label}, lr {lr}")
            curves[lr] = train(problem, trial.optimizer, trial.batch, lr, args.seed)
            bar.update()
        rate = max(curves, key=lambda lr: curves[lr][-1])
        best[f"{label}, lr {rate}"] = curves[rate]
        found = "  ".join(f"{lr}: {curve[-1]:.3f}" for lr, curve in curves.items())
        bar.clear()
        print(f"{label:16} best {curves[rate][-1]:.3f}   by learning rate  {found}", flush=True)
    bar.close()
    if args.plot is not None:
        plot(best, f"Large batches: {args.data}", args.plot)
        print(f"curves saved to {args.plot}")


if __name__ == "__main__":
    main()
