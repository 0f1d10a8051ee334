"""``LowLevelZeroPlugin`` in a booster: precision, no_sync, data, errors and checkpoints at any number of
ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.mesh.collectives import count_communication
from colossalai.nn.optimizer import FusedSGD, HybridAdam
from colossalai.testing import spawn
from colossalai.utils import load_checkpoint, save_checkpoint
from tests.zero.low_level.problems import OPTIMIZERS, Case, Net, batches, boost, launch, loss_of, train_part


def steps(case: Case, parts: tuple[Any, ...], some: list[Any]) -> None:
    booster, model, optimizer = parts
    for batch in some:
        train_part(case, booster, model, optimizer, batch)
        optimizer.step()
        optimizer.zero_grad()


SHARDED = (False, True)
KINDS = [
    Case(precision="fp32", optimizer="adamw"),
    Case(precision="bf16", optimizer="hybrid", stage=2),
    Case(precision="bf16", optimizer="adamw", offload=True),
]


def save(rank: int, world_size: int, port: int, folder: str) -> None:
    launch()
    for i, case in enumerate(KINDS):
        parts = boost(case, Net())
        steps(case, parts, batches(4)[:2])
        for shard in SHARDED:
            parts[0].save_model(parts[1], f"{folder}/{i}/model{shard}", shard=shard)
            parts[0].save_optimizer(parts[2], f"{folder}/{i}/optim{shard}", shard=shard, size_per_shard=0.001)
        steps(case, parts, batches(4)[2:])
        parts[0].save_model(parts[1], f"{folder}/{i}/end")


def go_on(rank: int, world_size: int, port: int, folder: str) -> None:
    launch()
    for i, case in enumerate(KINDS):
        for shard in SHARDED:
            parts = boost(case, Net())
            parts[0].load_optimizer(parts[2], f"{folder}/{i}/optim{shard}")
            parts[0].load_model(parts[1], f"{folder}/{i}/model{shard}")
            steps(case, parts, batches(4)[2:])
            expected = torch.load(f"{folder}/{i}/end")
            tolerance = 1e-5 if case.precision == "fp32" else 5e-2
            for name, weight in parts[1].state_dict().items():
                torch.testing.assert_close(weight, expected[name], rtol=tolerance, atol=tolerance)


def serially(folder: str) -> None:
    """An fp32 checkpoint of ZeRO goes on in a plain training loop, and one of that in ZeRO."""
    model = Net()
    optimizer = OPTIMIZERS["adamw"](model)
    booster = Booster(device="cpu")
    booster.load_model(model, f"{folder}/0/modelTrue")
    booster.load_optimizer(optimizer, f"{folder}/0/optimTrue")
    for batch in batches(4)[2:]:
        loss_of(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = torch.load(f"{folder}/0/end")
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-5)


def save_serially(folder: str) -> None:
    model = Net()
    optimizer = OPTIMIZERS["adamw"](model)
    booster = Booster(device="cpu")
    for i, batch in enumerate(batches(4)):
        if i == 2:
            booster.save_model(model, f"{folder}/0/modelFalse")
            booster.save_optimizer(optimizer, f"{folder}/0/optimFalse")
            booster.save_model(model, f"{folder}/0/modelTrue", shard=True)
            booster.save_optimizer(optimizer, f"{folder}/0/optimTrue", shard=True)
        loss_of(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    booster.save_model(model, f"{folder}/0/end")


def go_on_from_serial(rank: int, world_size: int, port: int, folder: str) -> None:
    launch()
    case = KINDS[0]
    for shard in SHARDED:
        parts = boost(case, Net())
        parts[0].load_model(parts[1], f"{folder}/0/model{shard}")
        parts[0].load_optimizer(parts[2], f"{folder}/0/optim{shard}")
        steps(case, parts, batches(4)[2:])
        expected = torch.load(f"{folder}/0/end")
        for name, weight in parts[1].state_dict().items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-5)


def test_a_checkpoint_goes_on_at_another_number_of_ranks_and_serially(tmp_path: Path) -> None:
    for i in range(len(KINDS)):
        (tmp_path / str(i)).mkdir()
    spawn(save, 2, folder=str(tmp_path))
    spawn(go_on, 4, folder=str(tmp_path))
    spawn(go_on, 1, folder=str(tmp_path))
    serially(str(tmp_path))


def test_a_serial_checkpoint_goes_on_under_zero(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    save_serially(str(tmp_path))
    spawn(go_on_from_serial, 2, folder=str(tmp_path))


def check_behaviour(rank: int, world_size: int, port: int) -> None:
    launch()
    torch.manual_seed(rank)  # replicas that begin differently get the weights of the first
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    booster = Booster(device="cpu", plugin=LowLevelZeroPlugin(stage=2, precision="bf16"))
    optimizer = HybridAdam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    weight = model.state_dict()["0.weight"]
    assert weight.dtype == torch.bfloat16
    assert model.module[1].weight.dtype == model.module[1].running_mean.dtype == torch.float32
    gathered = [torch.empty_like(weight) for _ in range(world_size)]
    torch.distributed.all_gather(gathered, weight)
    assert all(torch.equal(g, gathered[0]) for g in gathered)
    x = torch.randn(8, 4)
    out = model(x)
    assert out.dtype == torch.float32
    with booster.no_sync(model):  # the forward pass decides, as with DDP
        out = model(x)
    with count_communication() as log:
        booster.backward(out.mean(), optimizer)
    assert log.calls() == 0
    booster.backward(model(x).mean(), optimizer)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
    loader = booster.plugin.prepare_dataloader(torch.utils.data.TensorDataset(torch.arange(8)), batch_size=2)
    assert len(loader) * 2 * world_size == 8
    with pytest.raises(TypeError, match="under LowLevelZeroPlugin, got Linear"):
        booster.no_sync(nn.Linear(1, 1))


def test_behaviour() -> None:
    spawn(check_behaviour, 2)


def check_refusals(rank: int, world_size: int, port: int) -> None:
    launch()
    for options, message in (
        ({"stage": 3}, r"stages 1 and 2, got stage=3; GeminiPlugin"),
        ({"precision": "int8"}, "precision as one of fp16, bf16, fp32, got 'int8'"),
        ({"reduce_bucket_size_in_m": 0}, "reduce_bucket_size_in_m of more than 0"),
        ({"max_norm": -1}, "max_norm of at least 0"),
        ({"initial_scale": 2**40}, "min_scale <= initial_scale <= max_scale"),
    ):
        with pytest.raises(ValueError, match=message):
            LowLevelZeroPlugin(**options)
    model = Booster(device="cpu", plugin=TorchDDPPlugin()).boost(nn.Linear(2, 2)).model
    with pytest.raises(TypeError, match="no_sync needs the model"):
        LowLevelZeroPlugin().no_sync(model)
    only = Booster(device="cpu", plugin=LowLevelZeroPlugin(precision="bf16")).boost(nn.Linear(2, 2))
    assert only.optimizer is None
    assert only.model(torch.ones(1, 2)).dtype == torch.float32


def test_refusals() -> None:
    spawn(check_refusals, 1)


def test_it_needs_a_launch() -> None:
    with pytest.raises(RuntimeError, match="LowLevelZeroPlugin needs the distributed environment"):
        LowLevelZeroPlugin()


def check_one_file(rank: int, world_size: int, port: int, file: Path) -> None:
    launch()
    case = Case(stage=2, precision="bf16", optimizer="adamw")
    ends = []
    for resumed in (False, True):
        booster, model, optimizer = boost(case, Net())
        if resumed:
            assert load_checkpoint(file, model, optimizer) == 7
        else:
            steps(case, (booster, model, optimizer), batches(4)[:2])
            save_checkpoint(file, 7, model, optimizer)
        steps(case, (booster, model, optimizer), batches(4)[2:])
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_one_file_for_a_whole_training(tmp_path: Path) -> None:
    spawn(check_one_file, 2, file=tmp_path / "training.pt")


class Spare(nn.Module):
    """A layer in use, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def check_unused(rank: int, world_size: int, port: int, folder: Path) -> None:
    """A weight without a gradient that was loaded is saved as it was loaded, also where the optimizer keeps
    further digits.
    """
    launch()
    torch.manual_seed(77)
    other = Spare().state_dict()
    torch.save(other, folder / f"other{rank}.pt")
    for precision in ("fp16", "bf16"):
        torch.manual_seed(0)
        booster = Booster(device="cpu", plugin=LowLevelZeroPlugin(2, precision, initial_scale=64))
        raw = Spare()
        model, optimizer, *_ = booster.boost(raw, HybridAdam(raw.parameters(), lr=0.01))
        for i in range(2):
            booster.backward(model(torch.ones(2, 4)).square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            if i == 0:
                booster.load_model(model, folder / f"other{rank}.pt")
        booster.save(folder / precision)
        again = Booster(device="cpu")
        plain = again.boost(Spare()).model
        again.load(folder / precision, strict=False)
        torch.testing.assert_close(
            plain.unwrap().spare.weight,
            other["spare.weight"],
            rtol=1e-2,
            atol=1e-3,  # type: ignore[union-attr]
        )


def test_an_unused_weight_is_saved_as_it_was_loaded(tmp_path: Path) -> None:
    spawn(check_unused, 2, folder=tmp_path)


def check_edited(rank: int, world_size: int, port: int, folder: Path) -> None:
    """What a script wrote to the weights after the last step is saved, whatever further digits the optimizer
    keeps.
    """
    launch()
    for kind in (HybridAdam, FusedSGD):
        for offload in (False, True):
            torch.manual_seed(0)
            booster = Booster(device="cpu", plugin=LowLevelZeroPlugin(1, "bf16", cpu_offload=offload))
            raw = nn.Linear(4, 4)
            model, optimizer, *_ = booster.boost(raw, kind(raw.parameters(), lr=0.01))
            booster.backward(model(torch.ones(2, 4)).square().mean(), optimizer)
            optimizer.step()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.5)
            path = folder / f"{kind.__name__} {offload}"
            booster.save(path)
            again = Booster(device="cpu")
            plain = again.boost(nn.Linear(4, 4)).model
            again.load(path, strict=False)
            torch.testing.assert_close(plain.unwrap().weight, raw.weight.float(), rtol=1e-2, atol=1e-3)


def test_edited_weights_are_saved(tmp_path: Path) -> None:
    spawn(check_edited, 2, folder=tmp_path)
