"""What scripts do with a model that runs by a plan: evaluate, checkpoint, call parts, change shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import colossalai
from colossalai.auto_parallel.tensor_shard.options import DataloaderOption, SolverOptions
from colossalai.auto_parallel.tensor_shard.runtime import transform
from colossalai.auto_parallel.tensor_shard.strategies.chosen import sharded_plan
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.device import DeviceMesh
from colossalai.fx import trace_model
from colossalai.lazy import LazyInitContext
from colossalai.mesh import Layout, place
from colossalai.nn import parallelize
from colossalai.testing import spawn
from colossalai.utils import checkpoint
from tests.auto_parallel.tensor_shard.random_plans import check_equal, planned, problem_of, random_choice
from tests.auto_parallel.tensor_shard.small_models import MLP, small_problem

Batch = dict[str, Tensor]


def _start(rank: int, world_size: int, port: int, config: Any = None) -> None:
    torch.set_num_threads(1)
    colossalai.launch(config or {}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)


def _mlp() -> tuple[nn.Module, nn.Module, list[Batch]]:
    """A model, its equal, and batches."""
    problem = small_problem("mlp")
    return problem.build(), problem.build(), list(problem.batches)


# ---- evaluation ----


class Moody(nn.Module):
    """Computes something else in evaluation, by its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(x)
        return result if self.training else result * 2


def _evaluation(rank: int, world_size: int, port: int) -> None:
    _start(rank, world_size, port)
    for seed in range(3):
        model, serial, batches = _mlp()
        model, _ = planned(model, (1, 2), seed, **batches[0])
        model.eval()
        serial.eval()
        with torch.no_grad():
            for batch in batches:  # dropout is off, and batch norms use what they have seen
                torch.testing.assert_close(model(**batch)["loss"], serial(**batch)["loss"])
        check_equal(model, serial)
        model.train()
        model(**batches[0])["loss"].backward()
        assert model.norm.num_batches_tracked == 1  # type: ignore[union-attr]
    model.drop.eval()  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="drop was in training when the plan was made, and is in"):
        model(**batches[0])
    model, serial, batches = _mlp()
    model, _ = planned(model.eval(), (1, 2), 0, **batches[0])
    torch.testing.assert_close(model(**batches[0])["loss"], serial.eval()(**batches[0])["loss"])
    with pytest.raises(RuntimeError, match="the model was in evaluation when the plan was made"):
        model.train()(**batches[0])
    moody, _ = planned(Moody(), (1, 2), 0, x=torch.zeros(4, 8))
    moody(torch.zeros(4, 8))
    with pytest.raises(ValueError, match="requires a gradient, and a plan sums only those of parameters"):
        moody(torch.zeros(4, 8, requires_grad=True))
    with pytest.raises(RuntimeError, match="in evaluation the model does not compute"):
        moody.eval()(torch.zeros(4, 8))


def test_a_plan_of_training_evaluates_without_dropout() -> None:
    spawn(_evaluation, 2)


class Target(nn.Module):
    """Takes one tensor with a gradient and without, by the same weights, as methods with a teacher do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        with torch.no_grad():
            target = self.b(hidden).tanh()
        return (hidden - target).square().mean() + self.b(hidden).mean()


def _without_gradients(rank: int, world_size: int, port: int) -> None:
    """A model with a part that runs without gradients leaves the mode of its caller as it is."""
    _start(rank, world_size, port)
    for block in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(0)
        model, x = Target().double(), torch.randn(8, 8, dtype=torch.float64)
        serial = copy.deepcopy(model)
        model, _ = planned(model, (1, 2), 0, x=x)
        for training in (True, False):
            model.train(training)
            with block():
                loss = model(x)
                assert not torch.is_grad_enabled()
                assert not loss.requires_grad
            torch.testing.assert_close(loss, serial(x).detach())
        model.train()
        model(x).backward()
        serial(x).backward()
        check_equal(model, serial, gradients=True)


def test_models_in_blocks_without_gradients() -> None:
    spawn(_without_gradients, 2)


# ---- random numbers ----


def _masks(rank: int, world_size: int, port: int) -> None:
    _start(rank, world_size, port)
    for seed in range(4):
        torch.manual_seed(100 * rank)  # each rank its own, as some scripts do
        drop = nn.Sequential(nn.Dropout(0.5), nn.Identity())
        model, _ = planned(drop, (1, 2), seed, input=torch.ones(64, 64))
        first, second = model(torch.ones(64, 64)), model(torch.ones(64, 64))
        assert 0.4 < (first == 0).float().mean() < 0.6
        assert not torch.equal(first, second)
        for half in (first.chunk(2, 0), first.chunk(2, 1)):
            assert not torch.equal(*half)  # ranks with other elements draw other numbers
        others = [torch.empty_like(first) for _ in range(2)]
        torch.distributed.all_gather(others, first)
        assert torch.equal(*others)  # the result is whole, and the same for all


def _checkpointed(rank: int, world_size: int, port: int) -> None:
    """A whole model inside a checkpoint draws the same numbers again, or is refused."""
    _start(rank, world_size, port)
    x = torch.ones(8, 8, requires_grad=True)
    for seed in range(3):
        model, _ = planned(
            nn.Sequential(nn.Dropout(0.5), nn.Identity()), (1, 2), seed, input=torch.ones(8, 8)
        )
        y = checkpoint(model, False, x * 1.0, use_reentrant=False)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        assert torch.equal(grad == 0, y == 0)
        y = torch.utils.checkpoint.checkpoint(model, x * 1.0, use_reentrant=False)
        with pytest.raises(RuntimeError, match="does not bring its random numbers back"):
            y.square().sum().backward()


def test_a_model_in_a_checkpoint() -> None:
    spawn(_checkpointed, 2)


def test_masks_are_alike_for_copies_and_not_for_pieces() -> None:
    spawn(_masks, 2)


# ---- arguments and results ----


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: Tensor, scale: float = 1.0, bias: Tensor | None = None) -> Tensor:
        y: Tensor = self.body(x) * scale
        return y if bias is None else y + bias


def _arguments(rank: int, world_size: int, port: int) -> None:
    _start(rank, world_size, port)
    torch.manual_seed(0)
    model, x = Scorer(), torch.randn(4, 8)
    serial = copy.deepcopy(model)
    model, _ = planned(model, (1, 2), 1, x=torch.zeros(4, 8))
    for given in (model(x), model(x=x), model(x, 1.0), model(x, bias=None)):
        torch.testing.assert_close(given, serial(x))
    assert isinstance(model, Scorer)
    assert list(model.state_dict()) == list(serial.state_dict())
    with pytest.raises(ValueError, match=r"'x' is torch.float32 of shape \(3, 8\).*drop_last=True"):
        model(x[:3])
    with pytest.raises(ValueError, match=r"'x' is torch[.]float64"):
        model(x.double())
    with pytest.raises(ValueError, match=r"traced without 'scale', which this call gives \(2.0\)"):
        model(x, scale=2.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        model(x, y=x)
    with pytest.raises(RuntimeError, match="was called by itself, but it holds pieces"):
        model.body(x)
    with pytest.raises(RuntimeError, match=r"was torch[.]float32 on cpu when the plan was made"):
        copy.deepcopy(model).double()(x.float())
    twin = copy.deepcopy(model)  # as moving averages of weights are kept
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    torch.testing.assert_close(twin(x), torch.zeros(4, 8))
    torch.testing.assert_close(model(x), serial(x))
    whole = next(name for name, p in model.named_parameters() if p.placement.sharded)
    path, _, attribute = whole.rpartition(".")
    setattr(twin.get_submodule(path), attribute, nn.Parameter(serial.get_parameter(whole).detach()))
    with pytest.raises(RuntimeError, match="another tensor has taken its place"):
        twin(x)
    other = x if rank == 0 else x + 1
    with pytest.raises(ValueError, match=r"were given different batches: .* has other values"):
        planned(copy.deepcopy(serial), (1, 2), 1, x=torch.zeros(4, 8))[0](other)


def test_arguments_are_those_of_the_trace() -> None:
    spawn(_arguments, 2)


def _results(rank: int, world_size: int, port: int) -> None:
    """Scores beside the loss are whole for who looks at them, and may be part of another loss."""
    _start(rank, world_size, port)
    cut = 0
    for seed in range(5):
        model, serial, batches = _mlp()
        model, _ = planned(model.eval(), (1, 2), seed, **batches[0])
        ours, theirs = model(**batches[0]), serial.eval()(**batches[0])
        cut += ours["scores"].shape != theirs["scores"].shape
        for output in (ours, theirs):
            (output["loss"] + output["scores"].square().mean()).backward()
        torch.testing.assert_close(ours["scores"].argmax(-1), theirs["scores"].argmax(-1))
        check_equal(model, serial, gradients=True)
    assert cut


def test_results_beside_the_loss_are_whole() -> None:
    spawn(_results, 2)


def _distributed(rank: int, world_size: int, port: int) -> None:
    """Every rank loads its samples, and has its loss."""
    _start(rank, world_size, port)
    options = SolverOptions(dataloader_option=DataloaderOption.DISTRIBUTED)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    for seed in range(3):
        torch.manual_seed(0)
        model = Scorer()
        serial = copy.deepcopy(model)
        model, _ = planned(model, (2, 2), seed, options=options, x=torch.zeros(8, 8))
        model(x.chunk(4)[rank]).square().mean().backward()
        serial(x).square().mean().backward()
        check_equal(model, serial, gradients=True, rtol=1e-5)


def test_ranks_may_load_their_own_samples() -> None:
    spawn(_distributed, 4)


class Branching(nn.Module):
    """Its code looks at values, so it is one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y if y.sum() > 0 else -y


class Nests(Branching):
    """One operation with tensors in a dict, in a tuple, and beside these."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return (y.mean(0), {"total": y.sum()}), y


class TakesNests(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), Nests(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        (mean, rest), y = self.second(self.first(x))
        result: Tensor = self.third(y) * mean + rest["total"]
        return result.square().mean()


class SharesWeight(nn.Module):
    """A product and a module that is one operation take the same weight; a comparison gives no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), Branching()
        self.second.fc.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x)
        hidden = torch.where(hidden > 0, hidden, 0.5 * hidden)
        result: Tensor = self.second(hidden)
        return result.square().mean()


def _shared(rank: int, world_size: int, port: int) -> None:
    _start(rank, world_size, port)
    for number in range(8):
        torch.manual_seed(0)
        seed, kind = number // 2, (SharesWeight, TakesNests)[number % 2]
        model, x = kind().double(), torch.randn(8, 8, dtype=torch.float64)
        serial = copy.deepcopy(model)
        model, _ = planned(model, (1, 2), seed, x=x)
        for one in (model, serial):
            one(x).backward()
        check_equal(model, serial, gradients=True)


def test_modules_of_one_operation_share_weights_and_return_nests() -> None:
    spawn(_shared, 2)


class WritesInPlace(nn.Module):
    """Writes by views: into what has a gradient, into what gets one by it, and into buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 4), nn.BatchNorm1d(8)
        self.table = nn.Embedding(8, 8, max_norm=1.0)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("steps", torch.zeros(8))
        self.register_buffer("seen", torch.zeros(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(self.norm(x))
        y.view(4, 16).add_(1.0)
        y[:, 0].mul_(2.0)
        turned = y.t().contiguous()
        turned.relu_()
        filled = torch.zeros_like(x)
        filled[:, :4] = self.b(y)
        with torch.no_grad():
            self.steps.add_(1)
            self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1).mul_(self.steps)
        self.seen[:, 1:3] += 1
        z = self.norm(self.a(filled) + self.table(torch.arange(8)) + turned * self.seen)
        z += y
        return (z.relu_() - self.mean).square().mean()


class AddsOnto(nn.Module):
    """Adds in place onto products, whose sums over ranks may be handed on in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(2, 4, 8)
        y = x
        for layer in self.layers:
            y = layer(y.tanh())
            y += x
        return y.square().mean()


class OwnBackward(nn.Module):
    """A function with a backward pass of its own, and calls whose arguments are places or vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.vector = nn.Linear(8, 24), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        class Half(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, y: Tensor) -> Tensor:
                return y.clone()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return grad * 0.5

        a, b, c = torch.tensor_split(Half.apply(self.up(x)), [8, 16], dim=1)
        return (a + 2 * b.square() + 3 * c).mean() + nn.functional.linear(x, self.vector).square().mean()


class TwoLosses(nn.Module):
    """A second loss whose branch is no part of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Batch:
        h = self.a(x).relu()
        return {"loss": self.c(h).square().mean(), "other": self.b(h).abs().mean()}


class Energy(nn.Module):
    """Asks for gradients itself, so all of it is one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.b(self.a(x).tanh()).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force.square().mean() + energy


class EnergyOfWeights(Energy):
    """Asks for the gradient of a weight."""

    def forward(self, x: Tensor) -> Tensor:
        energy = self.b(self.a(x).tanh()).sum()
        (slope,) = torch.autograd.grad(energy, self.a.weight, create_graph=True)
        return slope.square().mean() + energy


class Slopes(nn.Module):
    """Its code depends on values, and asks for the gradient of a sum with respect to its second tensor.

    It asks for it always, where the values say so (``hidden``), or puts a hook there instead (``hook``).
    """

    def __init__(self, hidden: bool, hook: bool) -> None:
        super().__init__()
        self.fc, self.hidden, self.hook = nn.Linear(8, 8), hidden, hook

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        depends = bool((y != 0).any())  # False while it is traced
        if (depends or not self.hidden) and self.hook:
            x.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        elif depends or not self.hidden:
            total = (y.square() + self.fc(x).tanh()).sum()
            (x,) = torch.autograd.grad(total, x, create_graph=True)
        result: Tensor = self.fc(x)
        return result.square().mean()


class AsksSlopes(nn.Module):
    """``Slopes`` of tensors of other modules, one of them perhaps made of the other (``chained``)."""

    def __init__(self, *, chained: bool, hidden: bool = False, hook: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.slopes = nn.Linear(8, 8), nn.Linear(8, 8), Slopes(hidden, hook)
        self.chained = chained

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        y = self.b(hidden if self.chained else x)
        found: Tensor = self.slopes(y, hidden) + hidden.square().mean()
        return found


def _odd_code(rank: int, world_size: int, port: int) -> None:
    _start(rank, world_size, port)
    kinds: tuple[Callable[[], nn.Module], ...] = (
        *(WritesInPlace, AddsOnto, OwnBackward, TwoLosses, Energy, EnergyOfWeights, Target),
        partial(AsksSlopes, chained=True),
        partial(AsksSlopes, chained=False, hidden=True),
        partial(AsksSlopes, chained=True, hook=True),
    )
    for kind in kinds:
        for seed in range(3):
            torch.manual_seed(0)
            model = kind().double()
            serial = copy.deepcopy(model)
            model, _ = planned(model, (1, 2), seed, x=torch.zeros(8, 8, dtype=torch.float64))
            for step in range(2):
                x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
                for one in (model, serial):
                    loss = one(x)
                    (sum(loss.values()) if isinstance(loss, dict) else loss).backward()
                    torch.optim.SGD(one.parameters(), lr=0.1).step()
            check_equal(model, serial, gradients=True)
            check_equal(model, serial)


def _hidden_slopes(rank: int, world_size: int, port: int) -> None:
    """What the trace did not see is refused by name: gradients, and hooks, of what others have made."""
    _start(rank, world_size, port)
    refusals = (
        (False, r"module 'slopes' is one operation .* asks for gradients \(torch.autograd.grad\) that pass"),
        (
            True,
            "module 'slopes' is one operation .* puts a hook on the gradient of a tensor that it is given",
        ),
    )
    for hook, match in refusals:
        x = torch.ones(8, 8)
        model, _ = planned(AsksSlopes(chained=True, hidden=True, hook=hook), (1, 2), 0, x=x)
        with pytest.raises(RuntimeError, match=match):
            model(x)


def test_gradients_that_a_module_asks_for_by_values_are_refused() -> None:
    spawn(_hidden_slopes, 2)


def test_models_that_write_in_place_or_have_gradients_of_their_own() -> None:
    spawn(_odd_code, 2)


# ---- gradients ----


def _gradients(rank: int, world_size: int, port: int) -> None:
    """Passes add up, hooks see each complete gradient once, and a pass that fails leaves nothing behind."""
    _start(rank, world_size, port)
    for seed in range(4):
        model, serial, batches = _mlp()
        model, _ = planned(model.eval(), (2, 2), seed, **batches[0])
        serial.eval()
        seen: list[Tensor] = []
        weight = model.up.weight  # type: ignore[union-attr]
        weight.register_hook(lambda grad, seen=seen: seen.append(grad.clone()))
        stepped: list[Tensor] = []
        weight.register_post_accumulate_grad_hook(lambda p, stepped=stepped: stepped.append(p.grad.clone()))
        broken = model(**batches[0])["loss"]
        broken.register_hook(_fail)
        with pytest.raises(ArithmeticError):
            broken.backward()
        for batch in batches:
            model(**batch)["loss"].backward()
            serial(**batch)["loss"].backward()
        check_equal(model, serial, gradients=True)
        assert len(seen) == len(stepped) == len(batches)
        torch.testing.assert_close(torch.stack(seen).sum(0), stepped[-1])
        serial.embed.weight.requires_grad_(False)  # type: ignore[union-attr]
        model.embed.weight.requires_grad_(False)  # type: ignore[union-attr]
        for one in (model, serial):
            one.zero_grad()
            one(**batches[0])["loss"].backward()
        check_equal(model, serial, gradients=True)


def _fail(_: Tensor) -> None:
    raise ArithmeticError


def test_gradients_are_those_of_any_backward_pass() -> None:
    spawn(_gradients, 4)


def _doors(rank: int, world_size: int, port: int) -> None:
    """Engine, booster with DDP, autocast: each trains it as the serial model."""
    _start(rank, world_size, port)
    model, serial, batches = _mlp()
    model, _ = planned(model.eval(), (1, 2), 1, **batches[0])
    engine, *_ = colossalai.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
    engine.backward(engine(**batches[0])["loss"])
    serial.eval()(**batches[0])["loss"].backward()
    check_equal(model, serial, gradients=True)
    engine.step()
    for precision in (None, "bf16", "fp16"):
        problem = small_problem("mlp")
        model, serial = problem.build().float().eval(), problem.build().float().eval()
        model, _ = planned(model, (1, 2), 1, **batches[0])
        booster = Booster(device="cpu", mixed_precision=precision, plugin=TorchDDPPlugin())
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert len(booster.plugin.prepare_dataloader(range(8), 4)) == 1  # type: ignore[arg-type, union-attr]
        loss = boosted(**batches[0])["loss"]
        booster.backward(loss, optimizer)
        norm = optimizer.clip_grad_by_norm(1e9)
        serial(**batches[0])["loss"].backward()
        theirs = nn.utils.clip_grad_norm_(serial.parameters(), 1e9)
        torch.testing.assert_close(norm.float(), theirs, rtol=1e-5 if precision is None else 3e-2, atol=0)
        optimizer.step()
        if precision is None:
            torch.optim.SGD(serial.parameters(), lr=0.1).step()
            check_equal(model, serial, rtol=1e-5)


def test_engine_booster_and_precisions() -> None:
    spawn(_doors, 2)


def _plain_loop(rank: int, world_size: int, port: int) -> None:
    """Clipping by torch sees whole gradients; what would see pieces is refused."""
    _start(rank, world_size, port)
    for seed in range(3):
        model, serial, batches = _mlp()
        model, _ = planned(model.eval(), (1, 2), seed, **batches[0])
        norms = []
        for one in (model, serial.eval()):
            optimizer = torch.optim.AdamW(one.parameters(), lr=0.1, eps=1e-3)
            one(**batches[0])["loss"].backward()
            norms.append(nn.utils.clip_grad_norm_(one.parameters(), 0.1))
            optimizer.step()
        torch.testing.assert_close(*norms)
        check_equal(model, serial)
    model(**batches[0])["loss"].backward()
    for refused in (torch.optim.LBFGS(model.parameters()), torch.optim.Adafactor(model.parameters())):
        with pytest.raises(ValueError, match="may look at whole parameters, but the plan"):
            refused.step(lambda: model(**batches[0])["loss"])
    with pytest.raises(RuntimeError, match="not needed when a module doesn't have any param"):
        nn.parallel.DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match=r"given a norm of what p[.]grad shows"):
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norms[0])
    with pytest.warns(UserWarning, match="has the pieces of this rank"):
        model.state_dict()
    with pytest.raises(RuntimeError, match=r"(?s)size mismatch.*are pieces.*load_model\(model, path\)"):
        model.load_state_dict(serial.state_dict())
    model.load_state_dict(model.state_dict())
    loss = model(**batches[0])["loss"]
    weight = model.up.weight  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=r"call loss[.]backward\(\) and read p[.]grad"):
        torch.autograd.grad(loss, weight)
    with pytest.raises(RuntimeError, match="cannot be asked for gradients of chosen parameters"):
        loss.backward(inputs=[weight])
    _scaled(rank)


def _scaled(rank: int) -> None:
    """A gradient that overflows on one rank makes all skip the step, and lower the scale."""
    for fused in (False, True):
        model, _, batches = _mlp()
        model = model.float().eval()
        model, _ = planned(model, (1, 2), 1, **batches[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for overflows in (False, True):
            scaler.scale(model(**batches[0])["loss"]).backward()
            first = next(p.grad for p in model.parameters() if p.grad is not None)
            if overflows and rank == 1:
                first.view(-1)[0] = float("inf")
            before = [p.detach().clone() for p in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            changed = any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
            assert changed is not overflows
        assert scaler.get_scale() == 2.0


def test_a_loop_in_plain_pytorch() -> None:
    spawn(_plain_loop, 2)


# ---- checkpoints ----


def _steps(booster: Booster, model: nn.Module, optimizer: Any, batches: list[Batch]) -> list[float]:
    losses = []
    for batch in batches:
        loss = model(**batch)["loss"]
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _checkpoints(rank: int, world_size: int, port: int, folder: str) -> None:
    _start(rank, world_size, port)
    runs: list[list[float]] = []
    for seed, shape in ((None, ()), (0, (2, 2)), (1, (1, 4))):
        model, _, batches = _mlp()
        model.drop.p = 0.0  # type: ignore[union-attr]
        if seed is not None:
            model, _ = planned(model, shape, seed, **batches[0])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        booster = Booster(device="cpu")
        boosted, optimizer, *_ = booster.boost(model, optimizer)
        if seed == 1:  # written under another plan
            booster.load(f"{folder}/run")
        else:
            runs.append(_steps(booster, boosted, optimizer, batches))
        if seed == 0:
            booster.save(f"{folder}/run")
            booster.save_model(boosted, f"{folder}/model.pt")
        runs.append(_steps(booster, boosted, optimizer, batches))
    for one, other in zip(runs[:2] + runs[1:2], runs[2:], strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other))
    plain, *_ = _mlp()
    state = torch.load(f"{folder}/model.pt", weights_only=True)
    plain.load_state_dict(state)
    again, _, batches = _mlp()
    again, _ = planned(again, (2, 2), 2, **batches[0])
    Booster(device="cpu").load_model(again, f"{folder}/model.pt")
    check_equal(again, plain)


def test_checkpoints_go_from_plan_to_plan(tmp_path: Path) -> None:
    spawn(_checkpoints, 4, folder=str(tmp_path), timeout=120)


def _by_hand(rank: int, world_size: int, port: int, folder: str) -> None:
    """From a plan to one of parallelize, and back."""
    _start(rank, world_size, port, {"parallel": {"tensor": {"size": 2, "mode": "1d"}}})
    problem = small_problem("gpt2")
    booster = Booster(device="cpu")
    serial = problem.build()
    one, _ = planned(problem.build(), (1, 2), 0, **problem.batches[0])
    with torch.no_grad():
        for part in (one, serial):
            for p in part.parameters():
                p.mul_(1.5)
    one, *_ = booster.boost(one)
    booster.save(f"{folder}/run")
    two, *_ = (hand := Booster(device="cpu")).boost(parallelize(problem.build()))
    hand.load(f"{folder}/run")
    with torch.no_grad():
        two.eval()
        torch.testing.assert_close(two(**problem.batches[0]).loss, serial.eval()(**problem.batches[0]).loss)
        for p in two.parameters():
            p.mul_(2.0)
        for p in serial.parameters():
            p.mul_(2.0)
    hand.save(f"{folder}/back")
    booster.load(f"{folder}/back")
    check_equal(one.unwrap(), serial)
    one.save_pretrained(f"{folder}/pretrained")
    loaded = type(serial).from_pretrained(f"{folder}/pretrained", dtype=torch.float64)
    for p, q in zip(loaded.parameters(), serial.parameters(), strict=True):
        assert torch.equal(p, q)


def test_checkpoints_go_to_plans_by_hand_and_back(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    spawn(_by_hand, 2, folder=str(tmp_path), timeout=120)


def _lazy(rank: int, world_size: int, port: int) -> None:
    _start(rank, world_size, port)
    torch.manual_seed(7)
    serial = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    torch.manual_seed(7)
    with LazyInitContext():
        model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    model, _ = planned(model, (1, 2), 0, input=torch.zeros(4, 64))
    check_equal(model, serial, rtol=0)
    x = torch.randn(4, 64)
    torch.testing.assert_close(model(x), serial(x))


def test_models_without_memory_are_filled() -> None:
    spawn(_lazy, 2)


# ---- refusals ----


def _refusals(rank: int, world_size: int, port: int) -> None:
    _start(rank, world_size, port)
    mesh = DeviceMesh(torch.arange(2), (1, 2)).mesh
    model, serial, batches = _mlp()
    graph = trace_model(model, **batches[0])
    problem = problem_of(graph, (1, 2))

    def refused(match: str, change: Any, tried: nn.Module = model, whole: bool = True) -> None:
        plan = sharded_plan(problem, random_choice(problem, 1))
        change(plan)
        with pytest.raises(ValueError, match=match):
            transform(tried, graph, plan, mesh)
        if whole:
            for mine, theirs in zip(model.parameters(), serial.parameters(), strict=True):
                assert torch.equal(mine, theirs)  # nothing was changed
            assert type(model) is MLP

    odd = Layout((("1",), ()))
    refused("the plan is for a mesh of {'0': 2, '1': 1}", lambda p: p.axes.update({"0": 2, "1": 1}))
    refused("places 'other', which MLP does not have", lambda p: p.parameters.update(other=odd))
    refused(
        "rank 1 has another plan or another graph than rank 0",
        lambda p: p.parameters.update({"up.bias": Layout(((("1",) if rank else ()),))}),
    )
    with torch.device("meta"):
        empty = MLP()
    refused(
        "is on the meta device and nothing says which values it has",
        lambda p: None,
        empty.double(),
        whole=False,
    )
    refused(r"wrong here \(rank 1\)", partial(_break, rank))
    boosted, *_ = Booster(device="cpu").boost(MLP().double())
    refused("was boosted already", lambda p: None, boosted.unwrap(), whole=False)
    plan = sharded_plan(problem, random_choice(problem, 1))
    done = transform(model, graph, plan, mesh)
    refused("autoparallelize was called on this model before", lambda p: None, done, whole=False)
    cut = nn.Linear(4, 4)
    place(cut.weight, odd, (4, 8), mesh=None)
    refused("'weight' is cut already", lambda p: p.parameters.clear(), cut, whole=False)


def _break(rank: int, plan: Any) -> None:
    if rank == 1:

        def broken(*_: Any) -> Any:
            raise ValueError("wrong here")

        plan.nodes = type("Broken", (dict,), {"get": broken})(plan.nodes)


def test_what_does_not_fit_is_refused_on_all_ranks() -> None:
    spawn(_refusals, 2)
