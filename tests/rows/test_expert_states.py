"""Experts under ZeRO and Gemini: their states are divided over the ranks that hold the same ones, and each is
counted once.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.mesh import placement
from colossalai.nn.optimizer import HybridAdam
from colossalai.testing import spawn
from tests.rows.plans import (
    MORE_PLUGINS,
    PLUGINS,
    check_trained,
    differing,
    experts_problem,
    go_on,
    launch,
    save_run,
    sgd,
    to_plan,
)

EP2: dict[str, Any] = {"moe": {"size": 2}}
EP4: dict[str, Any] = {"moe": {"size": 4}}
PLANS: dict[str, tuple[dict[str, Any], int]] = {
    "ep2": (EP2, 2),
    "ep2-dp2": (EP2, 4),
    "ep4": (EP4, 4),
    "ep2-sp2": ({**EP2, "sequence": 2}, 4),
    "ep2-tp2": ({**EP2, "tensor": {"size": 2, "mode": "1d"}}, 4),
    "ep4-dp2": (EP4, 8),
}
MODELS: dict[str, dict[str, Any]] = {
    "all": {},
    "closed": {"open_": 2},  # half of the experts get no token
    "many": {"open_": 2, "experts": (4, 4, 4, 4)},
    "fewer": {"experts": (4, 2, 1)},  # than ranks, in some layers
}
hybrid = partial(HybridAdam, lr=1e-2, weight_decay=0.1, eps=1e-4)
ADAM = ("gemini-early", "gemini-taken-back")  # updates that can be taken back

Case = tuple[str, str, int]  # the plugin, the model, and backward passes for a step
EVERY: list[Case] = [
    (plugin, model, passes)
    for plugin in ("zero1", "zero2", "gemini", *MORE_PLUGINS)
    for model in MODELS
    for passes in (1, 2)
]
SAMPLE: dict[str, list[Case]] = {
    "ep2": [
        ("zero1", "all", 1),
        ("zero2", "closed", 2),
        ("gemini", "closed", 1),
        ("gemini-auto", "all", 2),
        ("gemini-device", "closed", 2),
        ("gemini-early", "closed", 1),
        ("gemini-taken-back", "all", 1),
    ],
    "ep2-dp2": [
        ("zero1-host", "closed", 1),
        ("zero2-small", "many", 1),
        ("gemini", "many", 2),
        ("gemini-taken-back", "closed", 1),
        ("gemini-strict", "all", 1),
    ],
    "ep4": [
        ("zero1", "fewer", 2),
        ("zero2", "fewer", 1),
        ("gemini", "fewer", 1),
        ("gemini-late", "fewer", 2),
    ],
    "ep2-sp2": [("zero2", "closed", 1), ("gemini", "all", 2)],
    "ep2-tp2": [("zero1", "closed", 1), ("gemini-auto", "closed", 1)],
    "ep4-dp2": [],
}


def check_cases(
    rank: int, world_size: int, port: int, folder: str, plan: dict[str, Any], cases: list[Case]
) -> None:
    launch(**plan)
    for plugin, model, passes in cases:
        options = {"optimizer": hybrid} if plugin in ADAM else {}
        task = experts_problem(**MODELS[model], **options)
        check_trained(task, plugin, folder, accumulate=passes)


@pytest.mark.parametrize(
    ("plan", "cases"),
    [pytest.param(name, cases, id=name) for name, cases in SAMPLE.items() if cases]
    + [pytest.param(name, EVERY, id=f"{name}-all", marks=pytest.mark.slow) for name in PLANS],
)
def test_training(plan: str, cases: list[Case], tmp_path: Path) -> None:
    parallel, ranks = PLANS[plan]
    spawn(check_cases, ranks, folder=str(tmp_path), plan=parallel, cases=cases)


def check_shares(rank: int, world_size: int, port: int, folder: str) -> None:
    launch(**EP2)
    run = check_trained(experts_problem(), "zero2", folder)
    for piece in run.optimizer.pieces:  # type: ignore[attr-defined]
        ranks = [rank % 2, rank % 2 + 2] if placement(piece.param).sharded else [0, 1, 2, 3]
        assert torch.distributed.get_process_group_ranks(piece.group) == ranks
        assert piece.layout.parts == len(ranks)
    places = run.model.resting_places().values()  # type: ignore[operator]
    assert {place.words for place in places} == {"states cut over 4 ranks", "states cut over 2 ranks"}
    run = check_trained(experts_problem(), "gemini", folder)
    chunks = run.model.chunk_manager.chunks  # type: ignore[union-attr]
    assert {(chunk.ranks.size, chunk.ranks.pieces) for chunk in chunks} == {(4, 1), (2, 2)}
    with pytest.raises(ValueError, match=r"state_dict\(only_rank_0=True\) .* save by booster.save_model"):
        run.model.state_dict()
    with pytest.raises(ValueError, match=r"state_dict_shard\(only_rank_0=True\)"):
        run.model.state_dict_shard()  # type: ignore[operator]
    state = run.model.state_dict(only_rank_0=False)  # type: ignore[call-arg]
    assert state["2.weight"].shape == (2, 8, 8)
    with pytest.raises(ValueError, match="got weights on some ranks alone, but ranks hold different experts"):
        run.model.load_state_dict(state if rank == 0 else {})
    run.model.load_state_dict(state)
    whole = run.optimizer.state_dict()["state"]
    assert whole[1]["momentum_buffer"].shape == (2, 8, 8), "its own piece, as under tensor parallelism"


def test_who_shares_what(tmp_path: Path) -> None:
    spawn(check_shares, 4, folder=str(tmp_path))


def check_half(rank: int, world_size: int, port: int) -> None:
    """In fp16 all ranks skip a step in which the gradient of one rank's expert overflows, and go on alike."""
    launch(**EP2)
    for plugin in (
        LowLevelZeroPlugin(stage=1, precision="fp16", initial_scale=4, hysteresis=1),
        GeminiPlugin(device="cpu", pin_memory=False, precision="fp16", initial_scale=4, hysteresis=1),
    ):
        model = differing(experts_problem().build()[2])  # type: ignore[index]
        booster = Booster(plugin=plugin)
        model, optimizer, *_ = booster.boost(model, hybrid(model.parameters()))
        x = torch.randn(2, 3, 8)
        for bad in (False, True, False):
            loss = model(x).float().square().mean()
            booster.backward(loss * (float("inf") if bad and rank == 1 else 1.0), optimizer)
            optimizer.step()
            assert optimizer.step_was_skipped is bad
            optimizer.zero_grad()
        assert optimizer.loss_scale == 2
        state = model.state_dict(**({"only_rank_0": False} if isinstance(plugin, GeminiPlugin) else {}))
        weights = [value for name, value in state.items() if "gate" in name]
        for value in weights:
            found = [torch.empty_like(value) for _ in range(world_size)]
            torch.distributed.all_gather(found, value)
            assert all(torch.equal(value, other) for other in found)


def test_ranks_skip_a_step_together() -> None:
    spawn(check_half, 2)


RUNS = [
    (("zero2", EP2, 4), ("ddp", EP4, 4)),
    (("ddp", EP2, 2), ("gemini", EP2, 4)),
    (("gemini", EP2, 4), ("zero1", {}, 2)),
    (("zero1", {"tensor": {"size": 2, "mode": "1d"}}, 2), ("zero2", {**EP2, "sequence": 2}, 4)),
]


@pytest.mark.parametrize(("before", "after"), RUNS, ids=lambda run: run[0])
def test_a_run_goes_on_under_another_plan(before: Any, after: Any, tmp_path: Path) -> None:
    (tmp_path / "run-end").mkdir()
    make = partial(experts_problem, experts=(4, 2))
    for check, (plugin, plan, ranks) in ((save_run, before), (go_on, after)):
        spawn(check, ranks, folder=str(tmp_path / "run"), plugin=plugin, plan=plan, make=make)


def check_refusals(rank: int, world_size: int, port: int) -> None:
    launch(**EP2)
    model = to_plan(experts_problem().build()[2])  # type: ignore[index]

    def boost(plugin: Any, optimizer: Any = sgd) -> None:
        Booster(device=None if isinstance(plugin, GeminiPlugin) else "cpu", plugin=plugin).boost(
            model, optimizer(model.parameters())
        )

    with pytest.raises(ValueError, match=r"cuts weight over ranks .* nothing would average them"):
        boost(None)
    with pytest.raises(ValueError, match=r"TorchFSDPPlugin divides .* but weight is cut"):
        boost(PLUGINS["fsdp"]())
    alone = gpc.get_group(ParallelMode.PIPELINE)
    with pytest.raises(ValueError, match=r"would average over the ranks \[\d\], but weight is cut"):
        boost(TorchDDPPlugin(process_group=alone))
    with pytest.raises(ValueError, match=r"may look at whole matrices, but the parallel plan has cut some"):
        boost(PLUGINS["zero1"](), torch.optim.Adafactor)


def test_what_is_refused() -> None:
    spawn(check_refusals, 2)
