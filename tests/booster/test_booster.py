"""Booster without a plugin, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

import colossalai
from colossalai.booster import Accelerator, Booster
from colossalai.booster.plugin import Plugin, TorchDDPPlugin
from colossalai.booster.plugin.base import Configured
from colossalai.checkpoint_io import CheckpointIO, GeneralCheckpointIO
from colossalai.interface import OptimizerWrapper
from tests.booster.plans import batches, mlp


class Foreign(Plugin):
    """A plugin as a third party might write it: it controls what it is told to."""

    def __init__(self, controls: bool = False, devices: tuple[str, ...] = ("cpu", "cuda")) -> None:
        self.controls = controls
        self.devices = devices

    def supported_devices(self) -> list[str]:
        return list(self.devices)

    def supported_precisions(self) -> list[str]:
        return ["bf16"]

    def control_precision(self) -> bool:
        return self.controls

    def control_device(self) -> bool:
        return self.controls

    def control_checkpoint_io(self) -> bool:
        return self.controls

    def support_no_sync(self) -> bool:
        return False

    def configure(self, model: nn.Module, *rest: Any) -> Configured:
        return model, *rest  # type: ignore[return-value]

    def get_checkpoint_io(self) -> CheckpointIO:
        return _IO()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        raise AssertionError("the booster must not ask")

    def prepare_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the booster must not ask")


class _IO(GeneralCheckpointIO):
    pass


def test_serial_training_is_what_torch_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = mlp()
    model = copy.deepcopy(plain)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    raw = torch.optim.AdamW(model.parameters(), lr=0.01)
    booster = Booster(device="cpu")
    boosted, optimizer, criterion, loader, scheduler = booster.boost(
        model, raw, F.cross_entropy, None, StepLR(raw, step_size=1)
    )
    plain_scheduler = StepLR(plain_optimizer, step_size=1)
    assert loader is None
    assert criterion is not None
    assert scheduler is not None
    for x, y in batches((8, 8, 4)):
        plain_optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        plain_optimizer.step()
        plain_scheduler.step()
        optimizer.zero_grad()
        with booster.no_sync(boosted):  # nothing to synchronize
            booster.backward(criterion(boosted(x), y), optimizer)
        optimizer.clip_grad_by_norm(0.1)
        optimizer.step()
        scheduler.step()
    for p, q in zip(boosted.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
    assert optimizer.param_groups[0]["lr"] == plain_optimizer.param_groups[0]["lr"]


def test_all_but_the_model_may_be_left_out() -> None:
    model = mlp()
    boosted = Booster(device="cpu").boost(model)
    assert boosted.model.unwrap() is model
    assert boosted[1:] == (None, None, None, None)


def test_the_documented_names_resolve() -> None:
    assert colossalai.Booster is Booster
    from colossalai.booster.mixed_precision import FP16TorchMixedPrecision as home
    from colossalai.mixed_precision import FP16TorchMixedPrecision

    assert FP16TorchMixedPrecision is home


def test_the_default_device_is_what_the_machine_has() -> None:
    assert Accelerator().device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert "cpu" in repr(Accelerator("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda_is_an_error() -> None:
    with pytest.raises(
        RuntimeError, match=r"device 'cuda' was asked for, but torch sees no CUDA.*device='cpu'"
    ):
        Booster(device="cuda")


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"device 'npu' is not supported; choose one of cpu, cuda"):
        Booster(device="npu")
    with pytest.raises(ValueError, match=r"Foreign does not run on 'cpu', only on cuda"):
        Booster(device="cpu", plugin=Foreign(devices=("cuda",)))


def test_unknown_precisions_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown mixed precision 'fp17'; choose one of fp16, .*bf16"):
        Booster(mixed_precision="fp17")
    with pytest.raises(ValueError, match=r"Foreign does not support mixed_precision='fp16', only bf16"):
        Booster(device="cpu", mixed_precision="fp16", plugin=Foreign())


def test_fp32_is_the_precision_of_the_model() -> None:
    for plugin in (None, Foreign()):
        booster = Booster(device="cpu", mixed_precision="fp32", plugin=plugin)
        model, *_ = booster.boost(torch.nn.Linear(2, 2))
        assert model(torch.ones(1, 2)).dtype is torch.float32


@pytest.mark.parametrize(
    ("plugin", "text"),
    [(3, "got 3"), (TorchDDPPlugin, r"TorchDDPPlugin'> \(the class: call it\)")],
)
def test_a_plugin_of_the_wrong_type_is_refused(plugin: Any, text: str) -> None:
    with pytest.raises(TypeError, match=f"plugin must be an instance of a colossalai Plugin.*{text}"):
        Booster(plugin=plugin)


def test_what_a_plugin_controls_is_left_to_it_and_said() -> None:
    with pytest.warns(UserWarning, match="Foreign chooses the device; device='cpu' has no effect"):
        booster = Booster(device="cpu", plugin=Foreign(controls=True))
    assert booster.accelerator.device == Accelerator().device
    plugin = Foreign(controls=True)
    plugin.device = torch.device("meta")
    booster = Booster(plugin=plugin)
    assert booster.accelerator.device.type == "meta"
    assert next(booster.boost(mlp()).model.parameters()).device.type == "cpu"  # the plan places the model
    assert isinstance(booster.checkpoint_io, _IO)
    with pytest.warns(
        UserWarning, match="Foreign controls the precision; mixed_precision='fp16' has no effect"
    ):
        booster = Booster(mixed_precision="fp16", plugin=Foreign(controls=True))
    assert booster.mixed_precision is None


def test_a_plain_plugin_gets_wrapped_optimizers_and_general_checkpoints() -> None:
    booster = Booster(device="cpu", plugin=Foreign())
    assert type(booster.checkpoint_io) is GeneralCheckpointIO
    model = mlp()
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(optimizer, OptimizerWrapper)
    with pytest.raises(RuntimeError, match="Foreign does not support no_sync"):
        booster.no_sync(boosted)


def test_an_optimizer_of_another_model_is_refused() -> None:
    optimizer = torch.optim.SGD(mlp().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"the optimizer \(SGD\) holds no parameter of the model"):
        Booster(device="cpu").boost(mlp(), optimizer)


def test_boosting_twice_is_an_error() -> None:
    model = mlp()
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    booster = Booster(device="cpu", mixed_precision="bf16")
    boosted, optimizer, *_ = booster.boost(model, raw)
    for args, what in (
        ((boosted,), r"model \(AutocastModel\)"),
        ((model,), r"model \(Sequential\)"),
        ((mlp(), optimizer), r"optimizer \(OptimizerWrapper\)"),
        ((mlp(), raw), r"optimizer \(SGD\)"),
    ):
        with pytest.raises(RuntimeError, match=f"this {what} was boosted before; go on with what"):
            booster.boost(*args)
    booster.boost(copy.deepcopy(model))


def test_boost_refuses_what_is_no_model_or_optimizer() -> None:
    booster = Booster(device="cpu")
    with pytest.raises(
        TypeError,
        match=r"boost needs a model of type torch\.\S*Module, got <class.*\(a class: pass an instance",
    ):
        booster.boost(nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"boost needs an optimizer of type torch\.\S*Optimizer, got 3"):
        booster.boost(mlp(), 3)  # type: ignore[arg-type]


def test_backward_needs_a_boosted_optimizer() -> None:
    model = mlp()
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"needs the optimizer that booster.boost returned, got SGD"):
        Booster(device="cpu").backward(model(torch.ones(1, 6)).sum(), raw)


def test_backward_needs_one_tensor() -> None:
    model = mlp()
    booster = Booster(device="cpu")
    _, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(
        TypeError, match=r"needs the loss as one tensor, got tuple; what does the criterion return\?"
    ):
        booster.backward((torch.ones(1), 3), optimizer)  # type: ignore[arg-type]


FORMS: list[Callable[[Booster, nn.Module, Path], None]] = [
    lambda b, m, p: b.save_model(m, p, True, True, "", 10, use_safetensors=True),  # page 14
    lambda b, m, p: b.save_model(m, p, True, True, "v", 10, True),
    lambda b, m, p: b.save_model(m, p, None, True, 10),  # api.md
    lambda b, m, p: b.save_model(m, p, "v", True, 0.0005),
    lambda b, m, p: b.save_model(m, p, shard=True, size_per_shard=0.0005, use_safetensors=True),
    lambda b, m, p: b.save_model(m, p, prefix="v", shard=True),
    lambda b, m, p: b.save_model(m, str(p / "file.bin")),
    lambda b, m, p: b.save_model(m, p / "file.bin", use_safetensors=True),
]


@pytest.mark.parametrize("form", range(len(FORMS)))
def test_every_documented_form_of_saving_can_be_loaded(form: int, tmp_path: Path) -> None:
    booster = Booster(device="cpu")
    model, other = mlp(), mlp()
    FORMS[form](booster, model, tmp_path / "model")
    path = tmp_path / "model"
    booster.load_model(other, path / "file.bin" if (path / "file.bin").exists() else path)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((True,), {"shard": True}, "got shard by position and by name"),
        ((), {"shards": True}, "does not know shards; it takes prefix, shard"),
        (("a", True, 10, 4), {}, "takes at most prefix, shard, size_per_shard after the path"),
        (("a",), {"variant": "b"}, "prefix='a' and variant='b', which mean the same"),
    ],
)
def test_save_model_refuses_arguments_it_cannot_place(
    args: Any, kwargs: Any, text: str, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=text):
        Booster(device="cpu").save_model(mlp(), tmp_path / "x", *args, **kwargs)


def test_saving_and_loading_check_what_they_get(tmp_path: Path) -> None:
    booster = Booster(device="cpu")
    optimizer = torch.optim.SGD(mlp().parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"save_model needs a model of type torch\.\S*Module, got"):
        booster.save_model(optimizer, tmp_path / "x")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"load_model needs a model of type torch\.\S*Module, got"):
        booster.load_model(optimizer, tmp_path / "x")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"save_optimizer needs an optimizer of type torch\.\S*Optimizer, got"
    ):
        booster.save_optimizer(mlp(), tmp_path / "x")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"load_optimizer needs an optimizer of type torch\.\S*Optimizer, got"
    ):
        booster.load_optimizer(mlp(), tmp_path / "x")  # type: ignore[arg-type]


@pytest.mark.parametrize("shard", [False, True])
def test_a_run_goes_on_from_its_checkpoint_as_if_nothing_had_happened(shard: bool, tmp_path: Path) -> None:
    def objects(seed: int) -> Any:
        torch.manual_seed(seed)
        model = mlp()
        raw = torch.optim.AdamW(model.parameters(), lr=0.01)
        return booster.boost(model, raw, None, None, StepLR(raw, step_size=2, gamma=0.5))

    def train(run: Any, data: Any) -> None:
        for x, y in data:
            run.optimizer.zero_grad()
            booster.backward(F.cross_entropy(run.model(x), y), run.optimizer)
            run.optimizer.step()
            run.lr_scheduler.step()

    booster = Booster(device="cpu", mixed_precision="bf16")
    data = batches((8,) * 6)
    first = objects(0)
    train(first, data[:3])
    booster.save_model(first.model, tmp_path / "model", shard=shard)
    booster.save_optimizer(first.optimizer, tmp_path / "optimizer", shard, 0.001)
    booster.save_lr_scheduler(first.lr_scheduler, tmp_path / "lr_scheduler")
    second = objects(1)
    booster.load_model(second.model, tmp_path / "model")
    booster.load_optimizer(second.optimizer, tmp_path / "optimizer")
    booster.load_lr_scheduler(second.lr_scheduler, tmp_path / "lr_scheduler")
    train(first, data[3:])
    train(second, data[3:])
    for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert first.optimizer.param_groups[0]["lr"] == second.optimizer.param_groups[0]["lr"]
