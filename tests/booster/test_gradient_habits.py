"""What scripts do with gradients between the backward pass and the step: as in serial training, or
refused.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_  # before colossalai

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.interface import hooks
from colossalai.testing import spawn
from colossalai.zero import zero_model_wrapper, zero_optim_wrapper
from tests.booster.plans import batches, launch, loss_of, mlp


def gemini(policy: str) -> Callable[[], Plugin]:
    return lambda: GeminiPlugin(device="cpu", precision="fp32", placement_policy=policy)


PLUGINS: dict[str, Callable[[], Plugin]] = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero-1": lambda: LowLevelZeroPlugin(1, "fp32"),
    "zero-1 without overlap": lambda: LowLevelZeroPlugin(1, "fp32", overlap_communication=False),
    "zero-2": lambda: LowLevelZeroPlugin(2, "fp32"),
    "gemini cpu": gemini("cpu"),
    "gemini cuda": gemini("cuda"),
}
KEEPERS = [name for name in PLUGINS if name not in ("ddp", "fsdp")]
BATCHES = batches((8, 8, 8))

Habit = Callable[[Any, Any], Any]


def serial(before_step: Habit = lambda model, optimizer: None, lr: float = 0.5) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for batch in BATCHES:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        before_step(model, optimizer)
        optimizer.step()
    return model.state_dict()


class Run:
    """Training under a plugin, on this rank's half of each batch."""

    def __init__(self, rank: int, plugin: Plugin, mixed_precision: str | None = None) -> None:
        torch.manual_seed(0)
        model = mlp()
        self.rank = rank
        self.booster = Booster(plugin=plugin, mixed_precision=mixed_precision)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)

    def backward(self, batch: tuple[Tensor, Tensor]) -> None:
        half = slice(4 * self.rank, 4 * self.rank + 4)
        self.booster.backward(loss_of(self.model, (batch[0][half], batch[1][half])), self.optimizer)

    def train(self, clear: Habit, before_step: Habit) -> dict[str, Tensor]:
        for batch in BATCHES:
            clear(self.model, self.optimizer)
            self.backward(batch)
            before_step(self.model, self.optimizer)
            self.optimizer.step()
        return self.weights()

    def weights(self) -> dict[str, Tensor]:
        if isinstance(self.booster.plugin, GeminiPlugin):
            return self.model.state_dict(only_rank_0=False)  # type: ignore[call-arg]
        found = self.model.state_dict()
        return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text: f"{what}, {name}: {text}")  # noqa: B023


CLIPS: dict[str, Habit] = {
    "norm": lambda m, o: clip_grad_norm_(m.parameters(), 0.1),
    "norm by its module": lambda m, o: torch.nn.utils.clip_grad_norm_(list(m.parameters()), max_norm=0.1),
    "of the groups": lambda m, o: clip_grad_norm_((p for g in o.param_groups for p in g["params"]), 0.1),
    "inf": lambda m, o: clip_grad_norm_(m.parameters(), 0.02, norm_type=float("inf")),
    "value": lambda m, o: clip_grad_value_(m.parameters(), 0.01),
}


def check_clipping(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    for clip, habit in CLIPS.items():
        expected = serial(habit)
        for name, plugin in PLUGINS.items():
            same(
                Run(rank, plugin()).train(lambda m, o: o.zero_grad(), habit), expected, f"{clip} under {name}"
            )


def test_clipping_by_torch_is_as_in_serial_training() -> None:
    spawn(check_clipping, 2)


def check_norm(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    norms: list[Tensor] = []
    serial(lambda m, o: norms.append(clip_grad_norm_(m.parameters(), 1e9)), lr=0.0)
    for name, plugin in PLUGINS.items():
        run = Run(rank, plugin())
        run.backward(BATCHES[0])
        norm: Any = clip_grad_norm_(run.model.parameters(), 1e9)
        assert abs(float(norm) - float(norms[0])) < 1e-6, name


def test_the_norm_that_torch_returns_is_that_of_the_model() -> None:
    spawn(check_norm, 2)


CLEARS: dict[str, Habit] = {
    "model": lambda m, o: m.zero_grad(),
    "user's model": lambda m, o: m.unwrap().zero_grad(),
    "optimizer": lambda m, o: o.zero_grad(),
    "user's optimizer": lambda m, o: o.unwrap().zero_grad(),
    "None": lambda m, o: [setattr(p, "grad", None) for p in m.parameters()],
}


def check_clearing(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    expected = serial()
    for clear, habit in CLEARS.items():
        for name, plugin in PLUGINS.items():
            same(Run(rank, plugin()).train(habit, lambda m, o: None), expected, f"{clear} under {name}")


def test_gradients_are_cleared_whoever_does_it() -> None:
    spawn(check_clearing, 2)


def add_noise(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.add_(torch.randn_like(p.grad))


READS: dict[str, Habit] = {
    "norm": lambda m, o: [p.grad.norm() for p in m.parameters()],
    "total norm": lambda m, o: torch.nn.utils.get_total_norm([p.grad for p in m.parameters()]),
    "scale": lambda m, o: next(m.parameters()).grad.mul_(2),
    "noise": add_noise,
    "give": lambda m, o: setattr(next(m.parameters()), "grad", torch.ones(16, 6)),
    "groups": lambda m, o: [p.grad.norm() for g in o.param_groups for p in g["params"]],
    "step of the optimizer inside": lambda m, o: o.unwrap().step(),
    "another optimizer": lambda m, o: torch.optim.SGD(m.parameters(), lr=1.0).step(),
    "half of the parameters": lambda m, o: clip_grad_norm_(list(m.parameters())[:2], 1.0),
    "with a norm": lambda m, o: torch.nn.utils.clip_grads_with_norm_(m.parameters(), 1.0, torch.tensor(2.0)),
}


REFUSALS = r"needs the (gradient|values) of|under this plan|under \w+ is not all|step\(\) past"


def check_reading(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    expected = serial()
    for name in KEEPERS:
        run = Run(rank, PLUGINS[name]())
        for batch in BATCHES:
            run.optimizer.zero_grad()
            assert all(p.grad is None for p in run.model.parameters())
            run.backward(batch)
            assert all(p.grad is not None and p.grad.shape == p.shape for p in run.model.parameters())
            for habit, read in READS.items():
                print(habit, "under", name)
                with pytest.raises(RuntimeError, match=REFUSALS):
                    read(run.model, run.optimizer)
            run.optimizer.step()
        same(run.weights(), expected, name)


def test_gradients_that_are_elsewhere_refuse_to_be_read_and_written() -> None:
    spawn(check_reading, 2)


def check_some(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    for name in KEEPERS:
        run = Run(rank, PLUGINS[name]())
        run.backward(BATCHES[0])
        first = next(iter(run.model.parameters()))
        first.grad = None
        assert first.grad is None
        with pytest.raises(
            RuntimeError, match=r"set to None for some parameters, but 5 others have gradients"
        ):
            run.optimizer.step()
        run.optimizer.zero_grad()
        run.backward(BATCHES[0])
        run.optimizer.step()


def test_clearing_some_gradients_is_refused() -> None:
    spawn(check_some, 2)


def check_written(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    run = Run(rank, TorchDDPPlugin())
    before = [p.detach().clone() for p in run.model.parameters()]
    for p in run.model.parameters():
        p.grad = torch.full_like(p, rank)  # 0.5 on average
    norm = clip_grad_norm_(run.model.parameters(), 1.0)
    whole = 0.5 * sum(p.numel() for p in before) ** 0.5
    torch.testing.assert_close(norm, torch.tensor(whole))
    run.optimizer.step()
    for p, old in zip(run.model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), old - 0.5 * 0.5 / whole)


def test_gradients_written_by_hand_are_averaged_before_torch_clips_them() -> None:
    spawn(check_written, 2)


def check_fp16(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    run = Run(rank, TorchDDPPlugin(), "fp16_naive")
    run.backward(BATCHES[0])
    norm = clip_grad_norm_(run.model.parameters(), 1e9)
    assert 0.05 < float(norm) < 5  # of gradients that are scaled by 65536


def test_scaled_gradients_are_unscaled_before_they_are_clipped() -> None:
    spawn(check_fp16, 2)


def alone(stage: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = zero_model_wrapper(mlp(), stage)
    return model, zero_optim_wrapper(model, torch.optim.SGD(model.parameters(), lr=0.5))


def halve(model: nn.Module, optimizer: Any) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad *= 0.5


def test_one_process_under_stage_1_has_the_true_gradients() -> None:
    expected = serial(halve)
    model, optimizer = alone(1)
    for batch in BATCHES:
        model.zero_grad()
        optimizer.backward(loss_of(model, batch))
        halve(model, optimizer)
        optimizer.step()
    same(dict(model.state_dict()), expected, "alone")


def test_copies_of_guarded_parameters_are_ordinary() -> None:
    model, optimizer = alone(2)
    optimizer.backward(loss_of(model, BATCHES[0]))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(type(p) is nn.Parameter for p in copied.parameters())
        loss_of(copied, BATCHES[0]).backward()
        clip_grad_norm_(copied.parameters(), 1.0)
        assert all(p.grad.norm() >= 0 for p in copied.parameters())
    assert next(model.parameters()).grad is not None
    del optimizer
    assert type(next(model.parameters())).__name__ == "Parameter"


TENSOR = {"parallel": {"tensor": {"mode": "1d", "size": 2}}}


def check_tensor_parallel(rank: int, world_size: int, port: int) -> None:
    from colossalai.nn.layer import Linear

    colossalai.launch(TENSOR, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    torch.manual_seed(0)
    model = nn.Sequential(Linear(4, 8), nn.Tanh(), Linear(8, 4))
    model, optimizer, *_ = Booster().boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for clip in (
        lambda: clip_grad_norm_(model.parameters(), 1e9),
        lambda: optimizer.clip_grad_by_norm(1e9),  # type: ignore[union-attr]
    ):
        optimizer.zero_grad()  # type: ignore[union-attr]
        optimizer.backward(model(torch.ones(2, 4)).square().sum())  # type: ignore[union-attr]
        norm = clip()
        norms = [torch.zeros_like(norm) for _ in range(world_size)]
        torch.distributed.all_gather(norms, norm)
        assert norms[0] == norms[1]
        local = sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5  # type: ignore[union-attr]
        assert float(norm) > local
    with pytest.raises(RuntimeError, match="are not just those that OptimizerWrapper trains"):
        clip_grad_norm_(next(iter(model.parameters())), 1.0)
    optimizer.step()  # type: ignore[union-attr]
    for p in model.parameters():
        p.grad.div_(1.0 + local + rank)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=r"before a step, 1 of 1 .* 2.bias \(norms .* a norm of p.grad"):
        optimizer.step()  # type: ignore[union-attr]


def test_clipping_by_torch_under_tensor_parallelism() -> None:
    spawn(check_tensor_parallel, 2)


def check_stages(rank: int, world_size: int, port: int) -> None:
    config = {"parallel": {"pipeline": 2}}
    colossalai.launch(config, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    model, optimizer, *_ = Booster().boost(
        stage := nn.Linear(2, 1), torch.optim.SGD(stage.parameters(), lr=0.1)
    )
    assert optimizer is not None
    optimizer.backward(model(torch.ones(1, 2)).sum())  # three gradients of 1 on each of two stages
    norm = clip_grad_norm_(model.parameters(), 1.0)
    torch.testing.assert_close(norm, torch.tensor(6.0**0.5))
    for p in model.parameters():
        torch.testing.assert_close(p.grad, torch.full_like(p, 6.0**-0.5))


def test_clipping_by_torch_sees_all_stages_of_a_pipeline() -> None:
    spawn(check_stages, 2)


def check_hooks(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    for name, plugin in PLUGINS.items():
        if name == "fsdp":  # whose hooks find the average
            continue
        for hooked in (False, True):
            told: list[str] = []
            booster = Booster(plugin=plugin(), **({} if "gemini" in name else {"device": "cpu"}))
            model, optimizer, *_ = booster.boost(inner := mlp(), torch.optim.SGD(inner.parameters(), lr=0.1))
            if hooked:
                next(iter(model.parameters())).register_hook(lambda grad: grad.clamp(-0.01, 0.01))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(hooks.get_dist_logger(), "warning", lambda text, **_: told.append(text))  # noqa: B023
                for batch in batches([4, 4]):
                    booster.backward(loss_of(model, batch), optimizer)
                    optimizer.step()
                    optimizer.zero_grad()
            assert len(told) == hooked, (name, told)
            assert all("1 parameters have hooks" in text for text in told)


def test_hooks_that_see_the_gradients_of_one_rank_are_told_of() -> None:
    spawn(check_hooks, 2)
