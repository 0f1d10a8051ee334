"""Models, optimizers and schedulers through GeneralCheckpointIO, alone and with rank 0 writing for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

from colossalai.checkpoint_io import GeneralCheckpointIO, ReplicatedCheckpointIO
from colossalai.checkpoint_io.files import state_file
from colossalai.interface import ModelWrapper, OptimizerWrapper
from colossalai.testing import spawn

FORMATS = pytest.mark.parametrize("use_safetensors", [False, True])
SHARDED = pytest.mark.parametrize("shard", [False, True])


def _model() -> nn.Module:
    model = nn.Sequential(nn.Embedding(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 7))
    model[2].weight = model[0].weight  # tied
    return model


def _equal(a: nn.Module, b: nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


@FORMATS
@SHARDED
def test_models_round_trip_also_when_wrapped(shard: bool, use_safetensors: bool, tmp_path: Path) -> None:
    io = GeneralCheckpointIO()
    model, other = _model(), _model()
    io.save_model(
        ModelWrapper(model), tmp_path / "m", shard, size_per_shard=1e-4, use_safetensors=use_safetensors
    )
    wrapped = ModelWrapper(other)
    assert io.load_model(wrapped, tmp_path / "m") is wrapped
    assert _equal(model, other)
    assert other[2].weight is other[0].weight  # type: ignore[index]


def test_a_name_says_safetensors_and_the_content_is_what_counts(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    io, model, path = GeneralCheckpointIO(), _model(), tmp_path / "x.safetensors"
    io.save_model(model, path)
    assert load_file(path)  # others take it for what it says
    io.load_model(model, path)
    optimizer = torch.optim.Adam(model.parameters())
    _step(model, optimizer)
    io.save_optimizer(optimizer, path)  # not of tensors alone, so in torch's format
    io.load_optimizer(optimizer, path)


def test_weights_of_hugging_face_without_the_tied_name_load(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = _model()
    state = {name: value for name, value in model.state_dict().items() if name != "2.weight"}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    other = _model()
    GeneralCheckpointIO().load_model(other, tmp_path)
    assert _equal(model, other)


@FORMATS
@SHARDED
def test_what_does_not_fit_is_named(shard: bool, use_safetensors: bool, tmp_path: Path) -> None:
    io = GeneralCheckpointIO()
    path = tmp_path / "m"
    io.save_model(_model(), path, shard, size_per_shard=1e-4, use_safetensors=use_safetensors)
    larger = nn.Sequential(*_model(), nn.Linear(2, 2))
    with pytest.raises(
        RuntimeError, match=rf"{path}.* does not fit Sequential: it lacks 3.weight, 3.bias\. Pass strict"
    ):
        io.load_model(larger, path)
    smaller = nn.Sequential(*_model()[:2])  # type: ignore[index]
    with pytest.raises(
        RuntimeError, match=r"does not fit Sequential: the model does not know 2.(weight|bias)"
    ):
        io.load_model(smaller, path)
    io.load_model(larger, path, strict=False)
    io.load_model(smaller, path, strict=False)
    assert torch.equal(larger[0].weight, smaller[0].weight)
    other = nn.Sequential(nn.Embedding(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 7))
    with pytest.raises(
        RuntimeError, match=rf"(?s){path}\S* does not fit the model: .*size mismatch for 0.weight"
    ):
        io.load_model(other, path)


class _Counting(nn.Linear):
    """Keeps something in the state that is no tensor."""

    calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


@SHARDED
def test_extra_state_of_modules(shard: bool, tmp_path: Path) -> None:
    io = GeneralCheckpointIO()
    model, other = _Counting(4, 4), _Counting(4, 4)
    model.calls = 5
    io.save_model(model, tmp_path / "m", shard, size_per_shard=1e-5)
    io.load_model(other, tmp_path / "m")
    assert other.calls == 5
    with pytest.raises(TypeError, match=r"cannot write _extra_state .*save with use_safetensors=False"):
        io.save_model(model, tmp_path / "n", use_safetensors=True)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "groups": lambda p: torch.optim.Adam([{"params": [q], "lr": 0.1 * (i + 1)} for i, q in enumerate(p)]),
}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(7)).square().mean().backward()
    optimizer.step()


@SHARDED
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_go_on_exactly(shard: bool, make: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    io = GeneralCheckpointIO()
    model = _model()
    optimizer = OptimizerWrapper(make(model.parameters()))
    for _ in range(2):
        _step(model, optimizer)
    io.save_model(model, tmp_path / "m")
    io.save_optimizer(optimizer, tmp_path / "o", shard, size_per_shard=1e-4)
    other = _model()
    other_optimizer = OptimizerWrapper(make(other.parameters()))
    io.load_model(other, tmp_path / "m")
    assert io.load_optimizer(other_optimizer, tmp_path / "o") is other_optimizer
    for _ in range(2):
        _step(model, optimizer)
        _step(other, other_optimizer)
    assert _equal(model, other)


@SHARDED
def test_an_optimizer_of_another_model_is_refused(shard: bool, tmp_path: Path) -> None:
    io = GeneralCheckpointIO()
    model = _model()
    optimizer = torch.optim.Adam(model.parameters())
    _step(model, optimizer)
    io.save_optimizer(optimizer, tmp_path / "o", shard)
    with pytest.raises(
        ValueError, match=rf"{tmp_path}/o.* does not fit the optimizer: .*groups hold \[\d\] .* Adam \[2\]"
    ):
        io.load_optimizer(torch.optim.Adam(nn.Linear(1, 1).parameters()), tmp_path / "o")
    io.save_model(model, tmp_path / "m")
    with pytest.raises(ValueError, match=r"/m does not fit the optimizer"):
        io.load_optimizer(optimizer, tmp_path / "m")


SCHEDULERS: dict[str, Any] = {
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=10),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers_go_on_exactly(make: Any, tmp_path: Path) -> None:
    io = GeneralCheckpointIO()
    rates = []
    for resume in (False, True):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
        scheduler = make(optimizer)
        for step in range(6):
            if step == 3 and resume:
                io.save_optimizer(optimizer, tmp_path / "o")
                io.save_lr_scheduler(scheduler, tmp_path / "s")
                optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
                scheduler = make(optimizer)
                io.load_optimizer(optimizer, tmp_path / "o")
                io.load_lr_scheduler(scheduler, tmp_path / "s")
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
    assert rates[:6] == rates[6:]


def test_paths_and_sizes_that_cannot_be_are_refused(tmp_path: Path) -> None:
    io = GeneralCheckpointIO()
    model = _model()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"save_model\(shard=True\) writes a folder, but .*file is a file"):
        io.save_model(model, tmp_path / "file", shard=True)
    with pytest.raises(
        ValueError, match=r"save_optimizer\(shard=False\) writes one file, but .* is a folder"
    ):
        io.save_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    with pytest.raises(
        ValueError, match=r"save_model needs size_per_shard, a number of MB, to be more than 0; got 0"
    ):
        io.save_model(model, tmp_path / "m", shard=True, size_per_shard=0)
    with pytest.raises(ValueError, match="must not hold a path separator"):
        io.save_model(model, tmp_path / "m", shard=True, variant="a/b")


def _replicated(rank: int, world_size: int, port: int, folder: Path) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    io = ReplicatedCheckpointIO()
    torch.manual_seed(rank)  # to see whose weights are in the file
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1))
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    io.save_model(model, folder / "file")
    io.save_model(model, folder / "folder", shard=True, size_per_shard=1e-4)
    io.save_optimizer(optimizer, folder / "optimizer")
    io.save_lr_scheduler(scheduler, folder / "scheduler")
    torch.manual_seed(0)
    expected = _model()
    for name in ("file", "folder"):  # complete as soon as the call returns, on every rank
        io.load_model(model, folder / name)
        assert _equal(model, expected)
    io.load_optimizer(optimizer, folder / "optimizer")
    assert optimizer.param_groups[0]["lr"] == 0.1

    if rank == 0:

        def full(*_: Any) -> None:
            raise OSError("No space left on device")

        state_file.write_file = full  # type: ignore[assignment]
    kind, text = (
        (OSError, "No space left")
        if rank == 0
        else (RuntimeError, "rank 0 could not write.*OSError: No space")
    )
    with pytest.raises(kind, match=text):
        io.save_model(model, folder / "file")


def test_rank_0_writes_for_all_and_all_learn_of_its_failure(tmp_path: Path) -> None:
    spawn(_replicated, 3, folder=tmp_path)


def _cut_tensor(rank: int, world_size: int, port: int, folder: Path) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    model = nn.Linear(2, 2)
    cut = distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (world_size,)), [Shard(0)])
    model.weight = nn.Parameter(cut)
    with pytest.raises(
        TypeError, match=r"cannot write weight to .*: it is a part of a tensor cut over several ranks"
    ):
        GeneralCheckpointIO().save_model(model, folder / "x")


def test_a_cut_tensor_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    spawn(_cut_tensor, 2, folder=tmp_path)
