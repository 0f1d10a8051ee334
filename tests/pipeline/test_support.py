"""``Engine``, ``Booster`` and dry runs ask one function what they support, and refuse in the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.dry_run import Parts, dry_run
from colossalai.nn.optimizer import Lamb
from colossalai.testing import parameterize, spawn
from tests.pipeline.plans import config, launch

Make = Callable[[], nn.Module]


class Refused:
    """Something that no door lets through: a config, the plugin that its ``zero`` section means, a stage and
    an optimizer.
    """

    def __init__(
        self,
        told: str,
        *,
        schedule: str = "1f1b",
        chunks: int = 1,
        zero: dict[str, Any] | None = None,
        plugin: Callable[[], Plugin] | None = None,
        model: Make = lambda: nn.Linear(4, 4),
        optimizer: Any = torch.optim.SGD,
    ) -> None:
        self.told, self.plugin, self.model, self.optimizer = told, plugin, model, optimizer
        self.plain = config(schedule, 2, 4, chunks)
        self.config = self.plain if zero is None else {**self.plain, "zero": zero}

    def parts(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = self.model()
        return model, self.optimizer([{"params": list(model.parameters())}], lr=0.1)


def _renormalizing() -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 4, max_norm=1.0), nn.Linear(4, 4))


def _two() -> nn.Module:
    return nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])


def _gemini(**options: Any) -> Callable[[], Plugin]:
    return lambda: GeminiPlugin(precision="fp32", **options)


EARLY = {"level": 3, "precision": "fp32", "update_in_backward": True}
CASES = {
    "schedule": Refused(
        "the schedule 'zbh1' computes the gradients of weights after",
        schedule="zbh1",
        zero={"level": 3},
        plugin=_gemini(),
    ),
    "few chunks": Refused("asks for 2 chunk.* got 1", schedule="interleaved", chunks=2),
    "many chunks": Refused("asks for 1 chunk.* got 2", model=_two),
    "early": Refused("once for each of 4 micro-batches", zero=EARLY, plugin=_gemini(update_in_backward=True)),
    "frozen": Refused(
        "LowLevelZeroPlugin cannot divide the model: .* without parameters to train",
        zero={"level": 1},
        plugin=LowLevelZeroPlugin,
        model=lambda: nn.Linear(4, 4).requires_grad_(False),
    ),
    "frozen under gemini": Refused(
        "GeminiPlugin cannot divide the model: .* without parameters to train",
        zero={"level": 3},
        plugin=_gemini(),
        model=lambda: nn.Linear(4, 4).requires_grad_(False),
    ),
    "max_norm": Refused(
        "LowLevelZeroPlugin cannot divide the model: '0' has max_norm=1.0",
        zero={"level": 2},
        plugin=lambda: LowLevelZeroPlugin(2),
        model=_renormalizing,
    ),
    "lamb": Refused("Lamb needs whole parameters", zero={"level": 3}, plugin=_gemini(), optimizer=Lamb),
}


def _by_booster(booster: Booster, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    boosted, ready, criterion, *_ = booster.boost(model, optimizer, nn.MSELoss())
    booster.execute_pipeline(iter([(torch.ones(8, 4), torch.ones(8, 4))]), boosted, criterion, ready)


def check_doors(rank: int, world_size: int, port: int) -> dict[str, list[str]]:
    """The words of both doors, for each case."""
    launch(CASES["schedule"].config)
    found = {}
    for name, case in CASES.items():
        gpc.load_config(case.config)
        gpc.check_sanity()
        model, optimizer = case.parts()
        with pytest.raises(ValueError, match=case.told) as engine:
            colossalai.initialize(model, optimizer, nn.MSELoss(), verbose=False)
        gpc.load_config(case.plain)
        model, optimizer = case.parts()
        booster = Booster(plugin=None if case.plugin is None else case.plugin())
        with pytest.raises(ValueError, match=case.told) as other:
            _by_booster(booster, model, optimizer)
        found[name] = [str(engine.value), str(other.value)]
    return found


@pytest.fixture(scope="module")
def words() -> dict[str, list[str]]:
    first: dict[str, list[str]] = spawn(check_doors, 4)[0]
    return first


@pytest.mark.parametrize("name", CASES)
def test_the_same_words_at_every_door(words: dict[str, list[str]], name: str) -> None:
    case = CASES[name]
    engine, booster = words[name]
    assert engine == booster

    def parts() -> Parts:
        return Parts(*case.parts(), nn.MSELoss(), (Tensor(8, 4), Tensor(8, 4)))

    with pytest.raises(ValueError, match=case.told) as dry:
        dry_run(case.config, 4, parts)
    # a dry run plays one rank after the other: nobody must be told whose problem it is
    assert engine in (str(dry.value), f"{dry.value} (rank 0 of the pipeline)")


@parameterize("broken", [[0], [1], [0, 1]])
def check_one_stage(rank: int, world_size: int, port: int, broken: list[int]) -> None:
    """What the plugin itself refuses, at one stage or both."""
    if not gpc.is_initialized(ParallelMode.GLOBAL):
        launch(config("1f1b", 2, 4))
    stage = gpc.get_local_rank(ParallelMode.PIPELINE)
    model = nn.Embedding(3, 5, sparse=True) if stage in broken else nn.Linear(5, 3)
    nn.init.ones_(model.weight)
    own = r"TorchFSDPPlugin takes dense gradients, .* use TorchDDPPlugin"
    error, told = ValueError, f"^{own}$"
    if stage not in broken:
        error = RuntimeError
        told = (
            rf"^another stage could not be boosted: ValueError: {own} \(rank {broken[0]} of the pipeline\)$"
        )
    with pytest.raises(error, match=told):
        Booster(plugin=TorchFSDPPlugin()).boost(model)


def test_a_stage_that_cannot_be_boosted_is_an_error_on_every_stage() -> None:
    spawn(check_one_stage, 4)


def check_ranks(rank: int, world_size: int, port: int) -> None:
    launch(config("1f1b", 2, 4))
    from torch.distributed.fsdp import ShardingStrategy

    world: Any = torch.distributed.group.WORLD
    makers: list[Callable[[], Plugin]] = [
        lambda: TorchDDPPlugin(process_group=world),
        lambda: LowLevelZeroPlugin(process_group=world),
        lambda: TorchFSDPPlugin(process_group=world),
        lambda: TorchFSDPPlugin(sharding_strategy=ShardingStrategy.HYBRID_SHARD),
    ]
    for maker in makers:
        model = nn.Linear(4 + rank % 2, 4)
        plugin = maker()
        told = (
            rf"{type(plugin).__name__} would divide or average a stage .* \[0, 1, 2, 3\], of which"
            r" only \[(0, 2|1, 3)\]"
        )
        with pytest.raises(ValueError, match=told):
            Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_ranks_of_other_stages_are_no_replicas() -> None:
    spawn(check_ranks, 4)


def check_room(rank: int, world_size: int, port: int) -> None:
    launch(config("1f1b", 2, 4))
    stage = gpc.get_local_rank(ParallelMode.PIPELINE)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8)) if stage == 0 else nn.Linear(8, 2)
    plugin = GeminiPlugin(device="cpu", placement_policy="cuda", precision="fp32", compute_capacity=5000)
    booster = Booster(plugin=plugin)
    boosted = booster.boost(model, torch.optim.AdamW(model.parameters()))
    batch = torch.ones(4, 16), torch.ones(4, 2)
    booster.execute_pipeline(iter([batch]), boosted.model, nn.functional.mse_loss, boosted.optimizer)
    room = "the compute tier holds .* and has no room for optimizer states"
    told = f"^{room}" if stage == 0 else f"^another stage could not be updated: OutOfCapacity: {room}"
    with pytest.raises(RuntimeError, match=told):
        boosted.optimizer.step()


def test_a_stage_without_room_for_its_states_is_an_error_on_every_stage() -> None:
    spawn(check_room, 2)
