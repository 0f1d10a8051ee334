"""Any plan's checkpoint under any other plan: same weights and states, bit for bit, and the losses of an
undisturbed run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from colossalai.testing import spawn
from tests.checkpoint_io.families import FAMILIES, Job, batches, start, stored_tensors

BEFORE, AFTER = 2, 2
# What CI runs: each goes on from itself, its neighbour and one further on.  All pairs take `make test-all`.
SAMPLE = ("serial", "fsdp2-1d2", "gemini-2", "zero1-2-1d2", "2d-4", "interleaved")


def _save(rank: int, world_size: int, port: int, name: str, folder: Path) -> list[float]:
    family = FAMILIES[name]
    start(family)
    job = Job(family)
    data = batches(BEFORE + AFTER)
    job.train(data[:BEFORE])
    job.booster.save(folder / name, {"step": BEFORE}, size_per_shard=1e-3)
    return job.train(data[BEFORE:])


def _load(
    rank: int, world_size: int, port: int, name: str, sources: list[str], folder: Path
) -> list[list[float]]:
    family = FAMILIES[name]
    start(family)
    losses = []
    for source in sources:
        job = Job(family, seed=1)
        assert job.booster.load(folder / source) == {"step": BEFORE}
        job.booster.save(folder / f"{source} again by {name}")
        losses.append(job.train(batches(BEFORE + AFTER)[BEFORE:]))
        if rank == 0:
            again = dict(stored_tensors(folder / f"{source} again by {name}"))
            for key, value in stored_tensors(folder / source):
                assert torch.equal(value, again.pop(key)), key
            assert not again
    return losses


def test_any_plan_goes_on_from_any_other(tmp_path: Path) -> None:
    folder, undisturbed = tmp_path, None
    for source in SAMPLE:
        losses = spawn(_save, FAMILIES[source].ranks, name=source, folder=folder)[0]
        undisturbed = undisturbed or losses
        assert losses == pytest.approx(undisturbed, rel=1e-5)
    for place, target in enumerate(SAMPLE):
        sources = [SAMPLE[(place + further) % len(SAMPLE)] for further in (0, 1, 3)]
        found = spawn(_load, FAMILIES[target].ranks, name=target, sources=sources, folder=folder)[0]
        for source, losses in zip(sources, found, strict=True):
            assert losses == pytest.approx(undisturbed, rel=1e-5), f"{source} to {target}"


@pytest.mark.slow
@pytest.mark.parametrize("target", list(FAMILIES))
def test_all_pairs(tmp_path_factory: pytest.TempPathFactory, target: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "all-plans"
    if not folder.exists():
        folder.mkdir()
        for source in FAMILIES:
            spawn(_save, FAMILIES[source].ranks, name=source, folder=folder)
    serial = folder / "serial"
    assert serial.exists()
    reference = spawn(_load, 1, name="serial", sources=["serial"], folder=folder)[0][0]
    ranks = FAMILIES[target].ranks
    found = spawn(_load, ranks, timeout=300, name=target, sources=list(FAMILIES), folder=folder)[0]
    for source, losses in zip(FAMILIES, found, strict=True):
        assert losses == pytest.approx(reference, rel=1e-5), f"{source} to {target}"
