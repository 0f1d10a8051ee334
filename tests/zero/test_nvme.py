"""ZeRO with optimizer states on a disk: bit-equal to ZeRO with all of them in
memory, whose parity others test.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from colossalai.nn.optimizer import HybridAdam, nvme_pipeline
from colossalai.testing import check_state_dict_equal, spawn
from tests.zero.low_level.problems import (
    DTYPES,
    OPTIMIZERS,
    Case,
    Net,
    batches,
    boost,
    groups,
    launch,
    train_part,
)

CASES = [
    Case(stage=1, clip=0.3),
    Case(stage=1, precision="bf16"),
    Case(stage=2, precision="bf16", accumulate=4, clip=0.3, steps=2),
]


def _train(case: Case, fraction: float, folder: str, state: Any = None) -> tuple[dict[str, Tensor], Any, Any]:
    OPTIMIZERS["hybrid"] = lambda model: HybridAdam(
        groups(model), lr=1e-2, nvme_offload_fraction=fraction, nvme_offload_dir=folder
    )
    booster, model, optimizer = boost(case, Net().to(DTYPES[case.precision]))
    if state is not None:
        optimizer.load_state_dict(state)
    for batch in batches(case.steps):
        train_part(case, booster, model, optimizer, batch)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), optimizer.state_dict(), optimizer.unwrap()


def _check(rank: int, world_size: int, port: int, folder: str) -> None:
    launch()
    nvme_pipeline.LEAST = 1 << 10
    for case in CASES:
        weights, state, _ = _train(case, 0.0, folder)
        _, other_state, _ = _train(case, 0.0, folder, state)
        for fraction in (0.5, 1.0):
            offloaded_weights, offloaded_state, inner = _train(case, fraction, folder)
            check_state_dict_equal(weights, offloaded_weights)
            check_state_dict_equal(state, offloaded_state)
            placed = inner._offload
            assert 0 < placed.disk_bytes <= placed.total_bytes
            assert placed.disk_bytes == placed.total_bytes or fraction < 1.0
            check_state_dict_equal(_train(case, fraction, folder, state)[1], other_state)


def test_zero(tmp_path: Any) -> None:
    spawn(_check, 2, folder=str(tmp_path), timeout=120)
    assert list(tmp_path.iterdir()) == []
