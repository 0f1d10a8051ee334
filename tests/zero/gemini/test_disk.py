"""The disk as third tier: parity when the host is small, capacities that hold, errors that lose nothing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from colossalai.testing import sample_cases, spawn
from tests.zero.gemini.runs import Case, Training, compare, launch, net

BYTES = {torch.float32: 16, torch.bfloat16: 14}  # of an element: weight, gradient, moments, tail


def small_host(folder: str, share: float, case: Case, ranks: int = 1, **options: Any) -> Case:
    """``case`` with a host that has ``share`` of what the model needs there; few gradients wait there if they need not."""
    needed = sum(p.numel() for p in net().parameters()) * BYTES[case.dtype] // ranks
    few = {"host_buffers": 2} if case.early else {}
    more = {"disk_dir": folder, "host_capacity": int(share * needed), **few, **options}
    fields = {name: getattr(case, name) for name in case.__dataclass_fields__}
    return Case(**{**fields, "options": tuple(more.items())})


def check_tiers(run: Training) -> None:
    for tier in run.model.chunk_manager.tiers:
        assert tier.peak <= tier.limit, tier


GRID = [
    (share, case)
    for share, case in itertools.product(
        (1 / 2, 1 / 4),
        (
            Case(*row)
            for row in itertools.product(
                ("cpu", "auto", "const"),
                (torch.float32, torch.bfloat16),
                (None, 1 / 4),
                (1, 4),
                (0.0, 0.5),
                (None, True),
                (False, True),
            )
        ),
    )
    # a quarter of what fp32 needs is just its gradients, which all wait for the norm
    if case.is_possible and (case.early or share == 1 / 2 or case.dtype is torch.bfloat16)
]


def _train(rank: int, world_size: int, port: int, folder: str, cases: list[Any], steps: int) -> None:
    launch(rank, world_size, port)
    for share, case in cases:
        run = compare(small_host(folder, share, case, world_size), steps)
        shelf = run.model.chunk_manager.shelf
        assert shelf is not None
        assert shelf.tier.peak > 0, "nothing rests on the disk"
        check_tiers(run)


@pytest.mark.parametrize("ranks", [1, 2])
def test_parity(ranks: int, tmp_path: Path) -> None:
    spawn(_train, ranks, folder=str(tmp_path), cases=sample_cases(GRID, 4), steps=3, timeout=120)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_whole_grid(ranks: int, tmp_path: Path) -> None:
    spawn(_train, ranks, folder=str(tmp_path), cases=GRID, steps=100, timeout=3600)
