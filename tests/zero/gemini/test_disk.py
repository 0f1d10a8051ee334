"""The disk as third tier: parity when the host is small, capacities that hold, errors that lose nothing."""

from __future__ import annotations

import errno
import itertools
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin
from colossalai.nn.optimizer import HybridAdam
from colossalai.testing import check_state_dict_equal, sample_cases, spawn
from colossalai.utils.disk import ScratchFile
from colossalai.zero.gemini import ChunkManager
from colossalai.zero.gemini.chunk_manager import STAGES
from colossalai.zero.gemini.tiers import OutOfCapacity
from tests.zero.gemini.runs import Case, Training, batch, compare, launch, loss_of, net

BYTES = {torch.float32: 16, torch.bfloat16: 14}  # of an element: weight, gradient, moments, tail


def shallow(reentrant: bool | None = None) -> Any:
    """The model of ``runs`` with fewer blocks, since each access to a disk takes its time."""
    model: Any = net(reentrant)
    model.blocks = model.blocks[:8]
    return model


def small_host(
    folder: str, share: float, case: Case, ranks: int = 1, build: Any = net, **options: Any
) -> Case:
    """``case`` with a host that has ``share`` of what the model needs there; few gradients wait there if they
    need not.
    """
    needed = sum(p.numel() for p in build().parameters()) * BYTES[case.dtype] // ranks
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
    if not (case.early and case.clip)  # what might be taken back has no room
]


def _train(rank: int, world_size: int, port: int, folder: str, cases: list[Any], steps: int) -> None:
    launch(rank, world_size, port)
    for share, case in cases:
        run = compare(small_host(folder, share, case, world_size), steps)
        shelf = run.model.chunk_manager.shelf
        assert shelf is not None
        assert shelf.tier.peak > 0, "nothing rests on the disk"
        check_tiers(run)


def cases_for(ranks: int) -> list[tuple[float, Case]]:
    """Sums that ranks have not averaged yet (under ``no_sync``, or for want of room on the compute tier) wait
    on the host, whole.
    """
    return [(s, c) for s, c in GRID if ranks == 1 or (c.accumulate == 1 and c.share is None)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_parity(ranks: int, tmp_path: Path) -> None:
    cases = sample_cases(cases_for(ranks), 2)
    spawn(_train, ranks, folder=str(tmp_path), cases=cases, steps=3, timeout=120)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_whole_grid(ranks: int, tmp_path: Path) -> None:
    spawn(_train, ranks, folder=str(tmp_path), cases=cases_for(ranks), steps=100, timeout=3600)


def _weights_and_states(run: Training, steps: int) -> tuple[Any, Any]:
    for step in range(steps):
        run.step(batch(step))
    return run.model.state_dict(), run.optimizer.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoints_are_those_of_memory(tmp_path: Path, dtype: torch.dtype) -> None:
    case = Case(dtype=dtype, clip=0.1)
    on_disk = small_host(str(tmp_path), 1 / 2, case, build=shallow)
    weights, states = _weights_and_states(Training(case, shallow), 3)
    for got, expected in zip(
        _weights_and_states(Training(on_disk, shallow), 3), (weights, states), strict=True
    ):
        check_state_dict_equal(got, expected)
    again = Training(on_disk, shallow)
    again.step(batch(9))
    again.model.load_state_dict(weights)
    again.optimizer.load_state_dict(states)
    check_state_dict_equal(again.optimizer.state_dict()["state"], states["state"])
    full = Training(case, shallow)
    full.model.load_state_dict(weights)
    full.optimizer.load_state_dict(states)
    for got, expected in zip(_weights_and_states(again, 2), _weights_and_states(full, 2), strict=True):
        check_state_dict_equal(got, expected)
    check_tiers(again)


@pytest.mark.parametrize("share", [None, 1 / 2])
def test_states_are_loaded_chunk_by_chunk(tmp_path: Path, share: float | None) -> None:
    """The optimizer before the model, in bf16: the digits that the weights lack are there, and the host never
    holds too much.
    """
    case = Case(dtype=torch.bfloat16)
    first = Training(case, shallow)
    weights, states = _weights_and_states(first, 2)
    if share is None:
        again = Training(case, shallow, offloaded(1.0, str(tmp_path)))
    else:
        again = Training(small_host(str(tmp_path), share, case, build=shallow), shallow)
    again.step(batch(7))
    again.optimizer.load_state_dict(states)
    check_state_dict_equal(again.optimizer.state_dict()["state"], states["state"])
    check_tiers(again)
    assert again.model.chunk_manager.total_mem["disk"] > 0
    again.model.load_state_dict(weights)
    assert torch.equal(again.step(batch(2)), first.step(batch(2)))
    check_state_dict_equal(again.model.state_dict(), first.model.state_dict())
    check_state_dict_equal(again.optimizer.state_dict()["state"], first.optimizer.state_dict()["state"])


def _checkpoints(rank: int, world_size: int, port: int, folder: str) -> None:
    launch(rank, world_size, port)
    sizes = {"min_chunk_size_mb": 0.001, "search_range_mb": 0.001}

    def boosted(fraction: float) -> tuple[Booster, Any, Any]:
        booster, model = (
            Booster(plugin=GeminiPlugin(placement_policy="cpu", precision="bf16", **sizes)),
            shallow(),
        )
        return booster, *booster.boost(model, offloaded(fraction, folder)(model.parameters()))[:2]

    def step(model: Any, optimizer: Any, number: int) -> None:
        optimizer.backward(loss_of(model, batch(number).to(model.chunk_manager.device)))
        optimizer.step()
        optimizer.zero_grad()

    booster, model, optimizer = boosted(1.0)
    step(model, optimizer, 0)
    booster.save_model(model, f"{folder}/model")
    booster.save_optimizer(optimizer, f"{folder}/optimizer")
    step(model, optimizer, 1)
    for fraction in (0.0, 1.0):
        other, again, loaded = boosted(fraction)
        step(again, loaded, 5)  # something to be replaced
        other.load_model(again, f"{folder}/model")
        other.load_optimizer(loaded, f"{folder}/optimizer")
        step(again, loaded, 1)
        check_state_dict_equal(again.state_dict(), model.state_dict())
        check_state_dict_equal(loaded.state_dict()["state"], optimizer.state_dict()["state"])


def test_checkpoints_of_the_booster(tmp_path: Path) -> None:
    """States on the disk are saved, and those that are loaded go there."""
    spawn(_checkpoints, 1, folder=str(tmp_path))


def _all_of_a_step(run: Training, number: int) -> None:
    run.step(batch(number))
    run.model.settle()
    disk = run.optimizer._disk
    assert disk is not None
    disk.shelf.finish()


def offloaded(fraction: float, folder: str) -> Any:
    return lambda params: HybridAdam(params, lr=1e-2, nvme_offload_fraction=fraction, nvme_offload_dir=folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvme_fraction(tmp_path: Path, dtype: torch.dtype) -> None:
    case = Case(dtype=dtype, early=True)
    expected = _weights_and_states(Training(case, shallow, offloaded(0.0, "")), 3)
    sizes = []
    for fraction in (0.5, 1.0):
        run = Training(case, shallow, offloaded(fraction, str(tmp_path)))
        for got, wanted in zip(_weights_and_states(run, 3), expected, strict=True):
            check_state_dict_equal(got, wanted)
        disk = run.optimizer._disk
        assert disk is not None
        assert disk.share is not None
        sizes.append(disk.share)
        largest = max(slot.nbytes for slot in disk.table.slots_of(disk.table.slots))
        assert abs(disk.share.on_disk - fraction * disk.share.total) <= largest
    assert sizes[0].total == sizes[1].total == sizes[1].on_disk > 0
    with pytest.raises(
        ValueError, match=r"HybridAdam has nvme_offload_fraction=0.5, and the model has disk_dir"
    ):
        Training(small_host(str(tmp_path), 1 / 2, case), optimizer=offloaded(0.5, str(tmp_path)))


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case()
    expected = _weights_and_states(Training(case, shallow), 4)
    run = Training(small_host(str(tmp_path), 1 / 2, case, build=shallow), shallow)
    run.step(batch(0))
    run.step(batch(1))
    write, broken = ScratchFile.write, True

    def fails(self: ScratchFile, data: memoryview, offset: int) -> None:
        if broken:
            raise OSError(errno.ENOSPC, "no space")
        write(self, data, offset)

    monkeypatch.setattr(ScratchFile, "write", fails)
    with pytest.raises(
        OSError,
        match=r"the (weights|gradients|optimizer states) of chunk \d+ .* could not be written .*Nothing is"
        " lost",
    ):
        _all_of_a_step(run, 2)
    run.optimizer.zero_grad()
    run.model.settle()
    with suppress(OSError):  # the others, once
        run.optimizer._disk.shelf.finish()
    broken = False
    run.step(batch(3))
    for got, wanted in zip((run.model.state_dict(), run.optimizer.state_dict()), expected, strict=True):
        check_state_dict_equal(got, wanted)


def test_a_failed_read_names_the_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Training(small_host(str(tmp_path), 1 / 2, Case()))
    run.step(batch(0))
    run.model.settle()

    def fails(self: ScratchFile, data: memoryview, offset: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(ScratchFile, "read", fails)
    with pytest.raises(RuntimeError, match=r"the update of chunk \d+ \(.*\) failed: OSError"):
        _all_of_a_step(run, 1)
    assert run.model.chunk_manager.total_mem["host"] > 0


def test_writing_weights_that_fails_returns_its_buffer(tmp_path: Path) -> None:
    run = Training(small_host(str(tmp_path), 0.25, Case()))
    chunks = run.model.chunk_manager
    chunk = next(c for c in chunks.chunks if chunks.is_on_disk(c))
    before = chunks.read_shard(chunk)
    for _ in range(STAGES + 1):
        with pytest.raises(RuntimeError, match="must match the size"), chunks.edited(chunk) as shard:
            shard.zero_().add_(torch.ones(chunk.shard_size + 1))
    assert torch.equal(chunks.read_shard(chunk), before)
    with chunks.edited(chunk) as shard:
        shard.fill_(3)
    assert torch.equal(chunks.read_shard(chunk), torch.full_like(before, 3))


def test_nowhere(tmp_path: Path) -> None:
    case = small_host(str(tmp_path), 1 / 4, Case(early=True), disk_capacity=20_000)
    with pytest.raises(
        OutOfCapacity,
        match=r"no tier has room for the weights of chunk .*the host tier holds .*the disk tier holds",
    ):
        Training(case)
    run = Training(small_host(str(tmp_path), 1 / 2, Case(early=True), disk_capacity=40_000))
    with pytest.raises(
        RuntimeError,
        match=r"no tier has room for the optimizer states of chunk .* bytes\): the host tier holds",
    ):
        _all_of_a_step(run, 0)
    with pytest.raises(
        OutOfCapacity, match="the host tier has a capacity of 100 bytes, but gradients and what passes"
    ):
        Training(Case(options=(("disk_dir", str(tmp_path)), ("host_capacity", 100))))


def test_options(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="disk_capacity=5 needs disk_dir"):
        ChunkManager(64, disk_capacity=5)
    with pytest.raises(ValueError, match="needs host_capacity: the bytes of host memory"):
        ChunkManager(64, disk_dir=str(tmp_path))
    case = small_host(str(tmp_path), 1 / 2, Case(dtype=torch.bfloat16))
    with pytest.raises(
        ValueError, match="the disk tier has no place for the float32 weights that AdamW needs"
    ):
        Training(case, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3))


def test_other_optimizers(tmp_path: Path) -> None:
    run = compare(
        small_host(str(tmp_path), 1 / 2, Case()),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4),
    )
    check_tiers(run)
    run.optimizer.backward(loss_of(run.model, batch(0)))
    with pytest.raises(RuntimeError, match="clip_grad_by_value needs all gradients on the host"):
        run.optimizer.clip_grad_by_value(0.1)


class Eager(torch.optim.Optimizer):
    """Adagrad as torch 2.11 has it: all states are made by the constructor, and a step finds them there."""

    elementwise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for p in self.param_groups[0]["params"]:
            self.state[p]["sum"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    total = self.state[p]["sum"].addcmul_(p.grad, p.grad)
                    p.addcdiv_(p.grad, total.sqrt().add_(1e-2), value=-group["lr"])


class Gained(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gain, self.layer = torch.nn.Parameter(torch.tensor(1.5)), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).tanh() * self.gain


def check_eager(rank: int, world_size: int, port: int, folder: str) -> None:
    launch(rank, world_size, port)
    plugin = GeminiPlugin(
        device="cpu", placement_policy="cpu", precision="fp32", disk_dir=folder, host_capacity=100_000
    )
    booster = Booster(plugin=plugin)
    serial, model = Gained(), Gained()
    expected, optimizer = Eager(serial.parameters()), Eager(model.parameters())
    boosted = booster.boost(model, optimizer)
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        serial(x).square().mean().backward()
        expected.step()
        expected.zero_grad()
        booster.backward(boosted.model(x).square().mean(), boosted.optimizer)
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
    found = boosted.model.state_dict()
    if rank == 0:
        check_state_dict_equal(found, serial.state_dict())


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_that_a_constructor_made_of_a_weight_without_dims(ranks: int, tmp_path: Path) -> None:
    spawn(check_eager, ranks, folder=str(tmp_path))
