"""``TorchFSDPPlugin`` in a job with tensor parallelism: the pieces of a model are cut over the replicas."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy

from colossalai.booster import Booster
from colossalai.booster.plugin import Plugin, TorchDDPPlugin, TorchFSDPPlugin
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.lazy import LazyInitContext
from colossalai.mesh import placement
from colossalai.nn import parallelize
from colossalai.tensor import ColoInitContext, ComputePattern, ComputeSpec, ProcessGroup, ShardSpec
from colossalai.testing import spawn
from colossalai.testing.boosted import BoosterRun
from colossalai.testing.parity import ParityError, Problem, Tolerance, check_plan

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")

from tests.nn.policies import zoo  # noqa: E402

EXACT = Tolerance(loss=1e-9, gradient=1e-9, weight=1e-9)
TWO = {"size": 2, "mode": "1d"}


def _loss(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """In the dtype of the model; that of transformers is in float32."""
    labels = given["labels"]
    scores = model(**{name: value for name, value in given.items() if name != "labels"}).logits
    return nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten())


def problem(name: str, steps: int = 2, **options: Any) -> Problem:
    batches = [zoo.batch(name, step) for step in range(steps)]
    for given in batches:
        given["labels"] = given["labels"].clamp(min=0)  # all tokens count, so the mean of means is the mean
        if name == "t5":
            given["decoder_input_ids"] = given["labels"]
        if name == "vit":
            given["pixel_values"] = given["pixel_values"].double()
    return Problem(build=lambda: zoo.build(name, **options).double(), batches=batches, loss=_loss)


def _check(rank: int, world_size: int, port: int, tensor: dict[str, Any], cases: list[Any]) -> None:
    zoo.launch(tensor)
    for name, options, run, plugin in cases:
        try:
            check_plan(
                problem(name, **options),
                lambda p, run=run, plugin=plugin: BoosterRun(
                    p, Booster("cpu", plugin=TorchFSDPPlugin(**plugin)), convert=parallelize, **run
                ),
                tolerance=EXACT,
            )
        except ParityError as error:
            raise ParityError(f"{name}, {tensor}: {error}") from error


CASES: list[Any] = [  # model, options of the problem, of the run, of the plugin
    ("gpt2", {}, {}, {}),
    ("llama", {"steps": 2, "tie_word_embeddings": True}, {"accumulate": 2}, {}),
    ("t5", {"steps": 1}, {}, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
]


def test_a_model_cut_by_parallelize_equals_the_serial_one() -> None:
    spawn(_check, 4, tensor=TWO, cases=CASES)


def test_two_dims_of_tensor_parallelism() -> None:
    spawn(_check, 8, tensor={"size": 4, "mode": "2d"}, cases=[("gpt2", {"steps": 1}, {}, {})])


class Run(BoosterRun):
    """GPT-2, whose stored matrices are fused and turned, cut and boosted."""

    def __init__(self, plugin: Plugin, seed: int = 0) -> None:
        super().__init__(problem("gpt2", 4), Booster("cpu", plugin=plugin), convert=_other(seed))

    def train(self, steps: range) -> dict[str, Tensor]:
        for step in steps:
            self.forward_backward(self.problem.batches[step])
            self.update()
        return self.weights()


def _other(seed: int) -> Any:
    def convert(model: nn.Module) -> nn.Module:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(seed)
        return parallelize(model)

    return convert


def _save_and_load(rank: int, world_size: int, port: int, folder: Path) -> None:
    zoo.launch(TWO)
    first = Run(TorchFSDPPlugin())
    weights = first.train(range(2))
    first.booster.save(folder / "run")
    first.booster.save_model(first.model, folder / "model.bin")
    first.booster.save_optimizer(first.optimizer, folder / "optimizer.bin")
    saved = torch.load(folder / "model.bin", weights_only=True)
    torch.testing.assert_close({name: saved[name] for name in weights}, weights, rtol=0, atol=0)
    ddp = Run(TorchDDPPlugin(), seed=1)
    ddp.train(range(1))
    ddp.booster.save(folder / "ddp")
    expected, expected_ddp = first.train(range(2, 4)), ddp.train(range(1, 2))
    for plugin in (TorchFSDPPlugin(), TorchDDPPlugin()):
        run = Run(plugin, seed=2)
        run.booster.load(folder / "run")
        _same(run.train(range(2, 4)), expected)
        run.booster.load(folder / "ddp")
        _same(run.train(range(1, 2)), expected_ddp)
        run.booster.load_model(run.model, folder / "model.bin")
        run.booster.load_optimizer(run.optimizer, folder / "optimizer.bin")
        _same(run.train(range(2, 4)), expected)
    state = copy.deepcopy(first.model.state_dict())
    first.train(range(1))
    first.model.load_state_dict(state)
    _same(first.weights(), expected)
    twins = [copy.deepcopy(p) for p in first.model.parameters()]
    for mine, twin in zip(first.model.parameters(), twins, strict=True):
        assert placement(mine) == placement(twin)
    assert any(placement(twin).sharded for twin in twins)


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_checkpoints_go_to_and_from_other_plans(tmp_path: Path) -> None:
    spawn(_save_and_load, 4, folder=tmp_path)


def _without_memory(rank: int, world_size: int, port: int) -> None:
    zoo.launch(TWO)
    torch.manual_seed(0)
    with LazyInitContext():
        model = zoo.llama()
    boosted = Booster("cpu", plugin=TorchFSDPPlugin()).boost(parallelize(model)).model
    torch.manual_seed(0)
    serial = zoo.llama()
    given = zoo.batch("llama")
    torch.testing.assert_close(boosted(**given).loss, serial(**given).loss)


def test_a_model_that_was_built_without_memory() -> None:
    spawn(_without_memory, 4)


class Apart(nn.Module):
    """A block whose whole parameter each tensor rank applies to numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * (1 + gpc.get_local_rank(ParallelMode.TENSOR))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Apart()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


def _drift(rank: int, world_size: int, port: int) -> None:
    zoo.launch(TWO)
    model = Blocks()
    booster = Booster("cpu", plugin=TorchFSDPPlugin())
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.backward(boosted(torch.ones(2, 4)).sum(), optimizer)
    with pytest.raises(RuntimeError, match=r"different gradients on these ranks.*0.scale.*Pieces\('inner'\)"):
        optimizer.step()


def test_copies_with_different_gradients_are_noticed() -> None:
    spawn(_drift, 4)


def _refuse(rank: int, world_size: int, port: int) -> None:
    zoo.launch(TWO)
    world: Any = dist.group.WORLD
    words = r"wte.weight, which tensor parallelism has cut, over the ranks \[0, 1, 2, 3\], of which only"
    for plugin in (
        TorchFSDPPlugin(world),
        TorchFSDPPlugin(sharding_strategy=ShardingStrategy.HYBRID_SHARD),
        TorchDDPPlugin(process_group=world),
    ):
        with pytest.raises(ValueError, match=words):
            Booster("cpu", plugin=plugin).boost(parallelize(zoo.build("gpt2")))
    group = ProcessGroup(tp_degree=2)
    with ColoInitContext(default_pg=group):
        model = nn.Linear(4, 4)
    model.weight.set_tensor_spec(ShardSpec([-1], [2]), ComputeSpec(ComputePattern.TP1D))  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"cannot divide weight, a ColoParameter .* use TorchDDPPlugin"):
        Booster("cpu", plugin=TorchFSDPPlugin()).boost(model)


def test_replicas_that_hold_other_pieces_are_refused() -> None:
    spawn(_refuse, 4)
