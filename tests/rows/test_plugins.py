"""Sequences that are cut over ranks, under every plugin: the ranks of one sequence average, share states and
read the same data.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.mesh import Layout, place
from colossalai.testing import RankError, spawn
from colossalai.testing.parity import Problem, assert_equal_to_serial
from colossalai.trainer.hooks.metrics import data_size
from colossalai.utils.parallel import is_first_of_stage
from tests.rows.plans import (
    PLUGINS,
    CutRun,
    build,
    check_trained,
    go_on,
    launch,
    problem,
    save_run,
    sgd,
)


def ddp(task: Problem, **plan: Any) -> CutRun:
    launch(**plan)
    return CutRun(task, TorchDDPPlugin())


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ({"sequence": 2}, 4),
        ({"sequence": {"size": 4, "attention": "both"}}, 4),
        ({"tensor": {"size": 2, "mode": "sequence"}}, 2),
        ({"sequence": 2, "tensor": {"size": 2, "mode": "1d"}}, 4),
    ],
    ids=["sp2-dp2", "sp2-su2", "mode-sequence", "sp2-tp2"],
)
def test_every_gradient_under_ddp(plan: dict[str, Any], ranks: int) -> None:
    assert_equal_to_serial(problem, partial(ddp, **plan), ranks)


def unaveraged(task: Problem) -> CutRun:
    launch(sequence=2)
    return CutRun(task, TorchDDPPlugin(process_group=gpc.get_group(ParallelMode.DATA)), differ=False)


def test_without_the_average_over_the_sequence_gradients_are_wrong() -> None:
    with pytest.raises(RankError, match=r"ParityError: gradient at step 0 of .* differs"):
        assert_equal_to_serial(problem, unaveraged, 2)


def check_sharded(rank: int, world_size: int, port: int, folder: str, **plan: Any) -> None:
    launch(**plan)
    rows = gpc.get_world_size(ParallelMode.SEQUENCE_DP)
    task = problem()
    for name in ("zero1", "zero2"):
        run = check_trained(task, name, folder)
        pieces = [piece.value for piece in run.optimizer.pieces]  # type: ignore[attr-defined]
        held = sum(p.numel() for p in run.model.parameters())
        own = sum(piece.numel() for piece in pieces)
        assert own <= held / rows + 4 * len(pieces), "all ranks of rows share the states"
    run = check_trained(task, "gemini", folder)
    assert run.model.chunk_manager.ranks.size == rows
    run = check_trained(task, "fsdp", folder)
    cut: Any = list(run.model.parameters())
    assert all(p.to_local().numel() * rows == p.numel() for p in cut if p.dim() == 2)


@pytest.mark.parametrize(
    "plan", [{"sequence": 2}, {"sequence": 2, "tensor": {"size": 2, "mode": "1d"}}], ids=["dp2", "tp2"]
)
def test_sharded_plans(plan: dict[str, Any], tmp_path: Path) -> None:
    spawn(check_sharded, 4, folder=str(tmp_path), **plan)


def check_data(rank: int, world_size: int, port: int) -> None:
    launch(sequence=2)
    plugin = TorchDDPPlugin()
    assert (plugin.rank, plugin.world_size) == (rank // 2, 2)
    assert plugin.divided_over() == [0, 1, 2, 3]
    loader = plugin.prepare_dataloader(TensorDataset(torch.arange(8.0)), batch_size=2)
    assert torch.cat([batch for (batch,) in loader]).tolist() == [n for n in range(8) if n % 2 == rank // 2]
    loader = plugin.prepare_dataloader(Stream(), batch_size=2)
    assert torch.cat(list(loader)).tolist() == [n for n in range(8) if n % 2 == rank // 2]
    assert data_size() == 2, "throughput counts samples of different ranks once"
    assert is_first_of_stage() is (rank == 0)
    # a group of one replica's own ranks reads one part
    alone = TorchDDPPlugin(process_group=gpc.get_group(ParallelMode.SEQUENCE))
    assert (alone.rank, alone.world_size) == (0, 1)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_ranks_of_one_sequence_read_the_same_data() -> None:
    spawn(check_data, 4)


def check_refusals(rank: int, world_size: int, port: int) -> None:
    launch(sequence=2)
    model = build()
    with pytest.raises(ValueError, match=r"cuts sequences, .* nothing would average them; pass plugin="):
        Booster(device="cpu").boost(model, sgd(model.parameters()))
    Booster(device="cpu").boost(build())  # to evaluate
    place(model[1].weight, Layout((("sp",), ())), (32, 8))  # type: ignore[index]
    with pytest.raises(ValueError, match=r"TorchFSDPPlugin divides .* but 1\.weight is cut"):
        Booster(device="cpu", plugin=PLUGINS["fsdp"]()).boost(model, sgd(model.parameters()))
    model = CutRun(problem(), TorchDDPPlugin()).model
    tokens = torch.full((4, 8), rank)
    with pytest.raises(ValueError, match=r"ranks 0 and 1 share one model \(sp=2\) and were given different"):
        model(tokens)


def test_what_is_refused() -> None:
    spawn(check_refusals, 2)


RUNS = [
    (("zero2", {"sequence": 2}, 4), ("ddp", {"sequence": {"size": 2, "attention": "ulysses"}}, 2)),
    (("gemini", {"sequence": 2}, 2), ("fsdp", {"sequence": {"size": 4, "attention": "both"}}, 4)),
    (("ddp", {"sequence": 2, "tensor": {"size": 2, "mode": "1d"}}, 4), ("zero1", {"sequence": 2}, 2)),
]


@pytest.mark.parametrize(("before", "after"), RUNS, ids=lambda run: run[0])
def test_a_run_goes_on_under_another_plan(before: Any, after: Any, tmp_path: Path) -> None:
    (tmp_path / "run-end").mkdir()
    for check, (plugin, plan, ranks) in ((save_run, before), (go_on, after)):
        spawn(check, ranks, folder=str(tmp_path / "run"), plugin=plugin, plan=plan)
