"""Existing models, cut by ``colossalai.nn.parallelize``, in chunks: equal to the serial model, also after a
checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, Plugin
from colossalai.core import global_context as gpc
from colossalai.testing import spawn

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")

from tests.nn.policies import zoo  # noqa: E402

TINY = 64 / 1024**2  # chunks of some dozen elements
STEPS = 2


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def serial(name: str, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of twice ``STEPS`` steps, and the weights after ``STEPS`` of them."""
    model = zoo.build(name, **options)
    optimizer, losses, trained = sgd(model), [], {}
    for step in range(2 * STEPS):
        loss = model(**batch(name, step)).loss
        losses.append(float(loss))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == STEPS - 1:
            trained = {n: t.detach().clone() for n, t in model.state_dict().items()}
    return losses, trained


def batch(name: str, step: int) -> dict[str, torch.Tensor]:
    """Rows of one length: replicas take the mean of means."""
    given = zoo.batch(name, step)
    if "attention_mask" in given:
        given["attention_mask"].fill_(1)
        given["labels"].clamp_(min=2)
    return given


class Run:
    """A model of the zoo under ``plugin``, cut by tensor parallelism or not."""

    def __init__(self, name: str, plugin: Plugin, cut: bool = True, **options: Any) -> None:
        self.name = name
        model = zoo.build(name, **options)
        if cut:
            model = colossalai.nn.parallelize(model)
        self.booster = Booster(device="cpu", plugin=plugin)
        self.model, self.optimizer, *_ = self.booster.boost(model, sgd(model))

    def train(self, steps: range) -> list[float]:
        parts, own = gpc.data_parallel_size, gpc.mesh.coord["dp"]
        losses = []
        for step in steps:
            given = {n: t.chunk(parts)[own] for n, t in batch(self.name, step).items()}
            loss = self.model(**given).loss
            self.booster.backward(loss, self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        total = torch.stack(losses)
        dist.all_reduce(total)
        return (total / dist.get_world_size()).tolist()


def check_run(run: Run, other: Run, folder: Path, **options: Any) -> None:
    """``run`` trains as the serial model, saves, and ``other`` goes on."""
    losses, weights = serial(run.name, **options)
    close(f"{run.name}, losses", run.train(range(STEPS)), losses[:STEPS])
    run.booster.save(folder / "run")
    run.booster.save_model(run.model, folder / "model.pt")
    saved = torch.load(folder / "model.pt", weights_only=True)
    for name, expected in weights.items():
        close(f"{run.name}, {name}", saved[name], expected)
    other.booster.load(folder / "run")
    close(f"{run.name}, losses after loading", other.train(range(STEPS, 2 * STEPS)), losses[STEPS:])


def close(what: str, found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5, msg=lambda m: f"{what}: {m}")


def small(policy: str) -> GeminiPlugin:
    return GeminiPlugin(
        "cpu", policy, precision="fp32", min_chunk_size_mb=TINY, search_range_mb=TINY, prefetch=1
    )


def check_families(
    rank: int, world_size: int, port: int, tensor: dict[str, Any], names: list[str], folder: str
) -> None:
    zoo.launch(tensor)
    for name in names:
        where = Path(folder, name)
        where.mkdir(exist_ok=True)
        check_run(Run(name, small("cpu")), Run(name, small("cuda")), where)


def test_1d(tmp_path: Path) -> None:
    spawn(
        check_families, 2, tensor={"size": 2, "mode": "1d"}, names=["qwen3", "gemma2"], folder=str(tmp_path)
    )


def test_2d(tmp_path: Path) -> None:
    names = ["gpt2", "bert", "opt", "t5", "vit"]
    spawn(check_families, 4, tensor={"size": 4, "mode": "2d"}, names=names, folder=str(tmp_path))


def check_uneven(rank: int, world_size: int, port: int, folder: str) -> None:
    """The vocabulary does not divide, so the ranks cut the table of positions, which all have, at different
    places.
    """
    zoo.launch({"size": 2, "mode": "1d"})
    for kind, plugin in (("gemini", GeminiPlugin), ("zero", LowLevelZeroPlugin)):
        where = Path(folder, kind)
        where.mkdir(exist_ok=True)
        run = Run("gpt2", plugin(precision="fp32"), n_positions=512)
        other = Run("gpt2", LowLevelZeroPlugin(precision="fp32"), cut=False, n_positions=512)
        check_run(run, other, where, n_positions=512)


def test_replicas_with_an_uneven_vocabulary(tmp_path: Path) -> None:
    spawn(check_uneven, 4, folder=str(tmp_path))


def check_masters(rank: int, world_size: int, port: int, folder: str) -> None:
    """The float32 weights of bf16 parameters, which torch's optimizers keep, in a file of whole tensors."""
    zoo.launch({"size": 2, "mode": "1d"})
    for plugin in (GeminiPlugin, LowLevelZeroPlugin):
        runs = [Run("gpt2", plugin(precision="bf16")) for _ in range(2)]
        runs[0].train(range(STEPS))
        booster = runs[0].booster
        booster.save_model(runs[0].model, Path(folder, plugin.__name__ + ".pt"))
        booster.save_optimizer(runs[0].optimizer, Path(folder, plugin.__name__ + ".opt"))
        booster.load_model(runs[1].model, Path(folder, plugin.__name__ + ".pt"))
        booster.load_optimizer(runs[1].optimizer, Path(folder, plugin.__name__ + ".opt"))
        first, second = (run.train(range(STEPS, 2 * STEPS)) for run in runs)
        assert first == second, plugin


def test_masters_of_pieces_in_one_file(tmp_path: Path) -> None:
    spawn(check_masters, 4, folder=str(tmp_path))
