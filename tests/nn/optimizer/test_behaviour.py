"""What an optimizer promises besides its formula."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import colossalai
from colossalai.booster import Booster
from colossalai.core import global_context as gpc
from colossalai.mesh import Layout, place
from colossalai.nn import Lamb
from colossalai.nn import optimizer as optim
from colossalai.nn.lr_scheduler import CosineAnnealingLR
from colossalai.registry import OPTIMIZERS
from colossalai.testing import check_state_dict_equal, spawn

KINDS: dict[str, dict[str, Any]] = {
    "FusedAdam": {"lr": 1e-2, "weight_decay": 0.1},
    "CPUAdam": {"lr": 1e-2, "weight_decay": 0.1},
    "HybridAdam": {"lr": 1e-2, "weight_decay": 0.1},
    "FusedSGD": {"lr": 1e-2, "momentum": 0.9},
    "FusedLAMB": {"lr": 1e-2},
    "Lamb": {"lr": 1e-2, "weight_decay": 0.1},
    "Lars": {"lr": 1.0, "momentum": 0.9, "weight_decay": 0.1},
}
each = pytest.mark.parametrize("name", KINDS)
DTYPES = [torch.float32, torch.bfloat16]


def _model(dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device, dtype)


def _make(name: str, parameters: Any, **more: Any) -> torch.optim.Optimizer:
    return getattr(optim, name)(parameters, **KINDS[name], **more)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    first = next(model.parameters())
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).to(first.device, first.dtype)
    optimizer.zero_grad()
    model(x).float().pow(2).sum().backward()
    optimizer.step()


def _weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@each
def test_it_is_registered(name: str) -> None:
    assert OPTIMIZERS.get_module(name) is getattr(optim, name)


def test_the_documented_place_of_lamb() -> None:
    assert Lamb is optim.Lamb


@each
def test_parameters_without_gradient_or_frozen_stay(name: str) -> None:
    model = _model()
    model[0].requires_grad_(False)
    unused = nn.Parameter(torch.ones(3))
    optimizer = _make(name, [*model.parameters(), unused])
    before = _weights(model)
    _step(model, optimizer, 1)
    after = _weights(model)
    assert all(torch.equal(a, b) for a, b in zip(before[:2], after[:2], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(before[2:], after[2:], strict=True))
    assert torch.equal(unused, torch.ones(3))
    assert unused not in optimizer.state
    optimizer.zero_grad()
    optimizer.step()  # nobody has a gradient


@each
def test_a_parameter_that_misses_a_step_has_its_own_count(name: str) -> None:
    together, alone = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    late = nn.Parameter(torch.full((4,), 2.0))
    a = _make(name, [together, late], **({"max_grad_norm": 0.0} if name == "FusedLAMB" else {}))
    b = _make(name, [alone], **({"max_grad_norm": 0.0} if name == "FusedLAMB" else {}))
    for step in range(4):
        together.grad = alone.grad = torch.linspace(-1, 1, 4) + step
        late.grad = torch.ones(4) if step % 2 else None
        a.step(), b.step()
    assert torch.equal(together, alone)
    assert int(a.state[late]["step"]) == 2


@each
def test_groups_have_their_own_options(name: str) -> None:
    model = _model()
    optimizer = _make(name, [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}])
    before = _weights(model)
    _step(model, optimizer, 1)
    after = _weights(model)
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, True, False, False]


@each
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_resumed_training_goes_on_exactly(name: str, dtype: torch.dtype, tmp_path: Any) -> None:
    booster = Booster(device="cpu")
    results = []
    for resume in (False, True):
        model = _model(dtype)
        optimizer = _make(name, model.parameters())
        scheduler = CosineAnnealingLR(optimizer, 10)
        for step in range(6):
            if resume and step == 3:
                booster.save_optimizer(optimizer, tmp_path / "optimizer")
                booster.save_lr_scheduler(scheduler, tmp_path / "scheduler")
                weights = copy.deepcopy(model.state_dict())
                model = _model(dtype)
                optimizer = _make(name, model.parameters())
                scheduler = CosineAnnealingLR(optimizer, 10)
                model.load_state_dict(weights)
                booster.load_optimizer(optimizer, tmp_path / "optimizer")
                booster.load_lr_scheduler(scheduler, tmp_path / "scheduler")
            _step(model, optimizer, step)
            scheduler.step()
        results.append(_weights(model))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@each
def test_a_copy_of_the_optimizer_is_as_good(name: str) -> None:
    model = _model()
    optimizer = _make(name, model.parameters())
    _step(model, optimizer, 0)
    twin_model, twin = copy.deepcopy((model, optimizer))
    _step(model, optimizer, 1), _step(twin_model, twin, 1)
    assert all(torch.equal(a, b) for a, b in zip(_weights(model), _weights(twin_model), strict=True))


PEERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "FusedAdam": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "CPUAdam": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "HybridAdam": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "FusedSGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
}


@pytest.mark.parametrize("name", PEERS)
def test_states_go_from_torch_to_us_and_back(name: str) -> None:
    peer, options = PEERS[name]
    model, ours = _model(), _model()
    theirs = peer(model.parameters(), **options)
    for step in range(3):
        _step(model, theirs, step)
    ours.load_state_dict(model.state_dict())
    optimizer = _make(name, ours.parameters())
    optimizer.load_state_dict(theirs.state_dict())
    for step in range(3, 6):
        _step(model, theirs, step), _step(ours, optimizer, step)
    torch.testing.assert_close(_weights(ours), _weights(model))
    model.load_state_dict(ours.state_dict())
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch does not copy
    for step in range(6, 9):
        _step(model, theirs, step), _step(ours, optimizer, step)
    torch.testing.assert_close(_weights(ours), _weights(model))


@each
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_loaded_state_is_the_one_that_was_saved(name: str, dtype: torch.dtype) -> None:
    model, other = _model(dtype), _model(dtype)
    optimizer, fresh = _make(name, model.parameters()), _make(name, other.parameters())
    _step(model, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(saved)
    check_state_dict_equal(fresh.state_dict(), saved)
    assert fresh.state_dict()["param_groups"] == saved["param_groups"]
    fresh.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=dtype))]})
    assert fresh.param_groups[0].keys() == fresh.param_groups[1].keys() == saved["param_groups"][0].keys()
    again = copy.deepcopy(optimizer)
    assert again.state_dict()["param_groups"] == saved["param_groups"]


def test_a_state_of_sgd_without_momentum() -> None:
    model = _model()
    theirs = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model, theirs, 0)
    optimizer = _make("FusedSGD", model.parameters())
    state = theirs.state_dict()
    state["state"] = {0: {"momentum_buffer": None}}
    optimizer.load_state_dict(state)
    _step(model, optimizer, 1)


@each
def test_half_precision_weights_do_not_lose_small_steps(name: str) -> None:
    p = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    options = KINDS[name] | {"lr": 1e-4 if name != "Lars" else 0.1, "weight_decay": 0.0}
    optimizer = getattr(optim, name)([p], **options)
    for _ in range(300):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert optimizer.master(p).dtype == torch.float32
    assert torch.equal(p, optimizer.master(p).bfloat16())
    assert (p < 0.99).all()  # a step of 1e-4 from 1 is nothing in bfloat16


@each
def test_masters_follow_weights_that_are_loaded_later(name: str) -> None:
    def run(reload_first: bool) -> torch.Tensor:
        p = nn.Parameter(torch.linspace(0.1, 1, 8).bfloat16())
        optimizer = _make(name, [p])
        for step in range(6):
            if step == 3:
                state, weights = copy.deepcopy(optimizer.state_dict()), p.detach().clone()
                p = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
                optimizer = _make(name, [p])
                with torch.no_grad():
                    if reload_first:
                        p.copy_(weights)
                    optimizer.load_state_dict(state)
                    if not reload_first:
                        p.copy_(weights)
            p.grad = torch.linspace(-1, 1, 8).bfloat16() + step
            optimizer.step()
        with torch.no_grad():
            p.fill_(64.0)
        p.grad = torch.full_like(p, 1e-3)
        before = optimizer.master(p).clone()
        optimizer.step()
        assert (p > 32).all()
        return before

    assert torch.equal(
        run(True), run(False)
    )  # masters keep the digits that the parameter lacks, in either order


@each
def test_strange_strides(name: str) -> None:
    results = []
    for kind in ("plain", "channels last", "gaps"):
        weight = torch.linspace(-1, 1, 2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
        if kind == "channels last":
            weight = weight.to(memory_format=torch.channels_last)
        if kind == "gaps":
            weight = torch.stack([weight, weight], dim=-1)[..., 0]
        p = nn.Parameter(weight)
        optimizer = _make(name, [p])
        for step in range(3):
            p.grad = (torch.arange(120.0).reshape(2, 3, 4, 5) - 50).sin() + step
            optimizer.step()
            if step == 1:
                state = optimizer.state_dict()
                state["state"] = {
                    0: {
                        k: v.clone(memory_format=torch.contiguous_format)
                        for k, v in state["state"][0].items()
                    }
                }
                optimizer.load_state_dict(state)
        results.append(p.detach().contiguous())
    torch.testing.assert_close(results[1:], [results[0]] * 2)


def test_div_scale_divides_the_gradients() -> None:
    for name in ("FusedAdam", "CPUAdam", "HybridAdam"):
        for dtype in DTYPES:
            results = []
            for scale in (-1, 8.0):
                p = nn.Parameter(torch.ones(5, dtype=dtype))
                optimizer = getattr(optim, name)([p], eps=1.0)
                for step in range(3):
                    p.grad = (torch.linspace(0.5, 1, 5) * max(scale, 1) * (step + 1)).to(dtype)
                    optimizer.step(div_scale=scale)
                results.append(optimizer.master(p).detach())
            torch.testing.assert_close(*results)


def test_set_grad_none() -> None:
    for kind in (optim.FusedAdam, optim.FusedLAMB):
        for none in (True, False):
            p = nn.Parameter(torch.ones(2))
            p.grad = torch.ones(2)
            optimizer = kind([p], set_grad_none=none)
            optimizer.zero_grad()
            assert (p.grad is None) == none
            p.grad = torch.ones(2)
            optimizer.zero_grad(set_to_none=True)
            assert p.grad is None


@each
def test_a_closure_is_called_first_and_its_loss_returned(name: str) -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = _make(name, [p])

    def closure() -> float:
        loss = (p * torch.arange(1.0, 4.0)).sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 6.0
    assert (p < 1).all()


@each
def test_sparse_gradients_are_refused_before_anything_changes(name: str) -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    dense = nn.Parameter(torch.ones(2))
    dense.grad = torch.ones(2)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(
        RuntimeError, match=rf"{name} does not take sparse gradients; the parameter of shape \(4, 2\)"
    ):
        _make(name, [dense, embedding.weight]).step()
    assert torch.equal(dense, torch.ones(2))


def test_what_makes_no_sense_is_refused() -> None:
    p = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match=r"FusedAdam has no AMSGrad variant; use torch\.optim\.AdamW"):
        optim.FusedAdam(p, amsgrad=True)
    with pytest.raises(ValueError, match="FusedLAMB has no AMSGrad variant"):
        optim.FusedLAMB(p, amsgrad=True)
    with pytest.raises(
        ValueError, match="FusedSGD with nesterov needs a momentum and no dampening; got momentum=0"
    ):
        optim.FusedSGD(p, lr=1.0, nesterov=True)
    with pytest.raises(
        TypeError, match=r"Lamb updates parameters of .*; got one of torch.complex64, shape \(2,\)"
    ):
        optim.Lamb([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    for name in KINDS:
        with pytest.raises(ValueError, match=rf"{name} needs lr of at least 0; got -1.0"):
            getattr(optim, name)(p, lr=-1.0)
    for kind in (optim.FusedAdam, optim.CPUAdam, optim.HybridAdam, optim.Lamb, optim.FusedLAMB):
        with pytest.raises(ValueError, match=r"needs beta2 of at least 0 and below 1; got 1.0"):
            kind(p, betas=(0.9, 1.0))
    meta = nn.Parameter(torch.ones(2, device="meta"))
    meta.grad = torch.ones(2, device="meta")
    with pytest.raises(
        RuntimeError, match=r"CPUAdam updates parameters on cpu; .* is on meta. HybridAdam takes both"
    ):
        optim.CPUAdam([meta]).step()


def test_further_entries_of_the_groups() -> None:
    optimizer = optim.HybridAdam([nn.Parameter(torch.ones(2))], name="mine", nvme_offload_fraction=0.0)
    assert optimizer.param_groups[0]["name"] == "mine"


def test_schedulers_and_wrappers_work_without_a_warning() -> None:
    model = _model()
    optimizer = optim.HybridAdam(model.parameters())
    scheduler = CosineAnnealingLR(optimizer, 3)
    booster = Booster(device="cpu")
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            _step(model, optimizer, step)
            scheduler.step()


def _cut(rank: int, world_size: int, port: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    mesh = init_device_mesh("cpu", (world_size,))
    weight, grad = torch.arange(12.0).reshape(4, 3), torch.linspace(-1, 1, 12).reshape(4, 3)
    for name in ("FusedAdam", "FusedSGD"):
        whole = nn.Parameter(weight.clone())
        part = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
        a, b = _make(name, [whole]), _make(name, [part])
        for step in range(3):
            whole.grad = grad + step
            part.grad = distribute_tensor(grad + step, mesh, [Shard(0)])
            a.step(), b.step()
        assert torch.equal(whole, part.full_tensor())
    for name in ("Lamb", "Lars"):
        with pytest.raises(
            RuntimeError, match=rf"{name} needs the norm of whole parameters; .*cut over ranks"
        ):
            _make(name, [part]).step()


def test_parameters_cut_over_ranks() -> None:
    spawn(_cut, 2)


def test_norms_of_tensor_parallel_parameters_are_refused() -> None:
    part = nn.Parameter(torch.ones(2, 4))
    place(part, Layout((("tp",), ())), (4, 4))
    part.grad = torch.ones_like(part)
    with pytest.raises(RuntimeError, match=r"Lamb needs the norm .*cut over ranks .* such as HybridAdam"):
        _make("Lamb", [part]).step()
    _make("HybridAdam", [part]).step()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_hybrid_adam_on_cpu_and_gpu(dtype: torch.dtype) -> None:
    weight, grad = torch.linspace(-1, 1, 9), torch.linspace(1, 2, 9)
    parameters = [nn.Parameter(weight.clone().to(device, dtype)) for device in ("cpu", "cuda", "cpu")]
    optimizer = optim.HybridAdam(parameters, weight_decay=0.1)
    for step in range(10):
        for p in parameters:
            p.grad = (grad + step).to(p.device, p.dtype)
        optimizer.step()
    masters = [optimizer.master(p).detach().cpu() for p in parameters]
    torch.testing.assert_close(masters[0], masters[1])
    assert torch.equal(masters[0], masters[2])
    assert [p.device.type for p in parameters] == ["cpu", "cuda", "cpu"]
    copied = [nn.Parameter(p.detach().clone()) for p in parameters]
    twin = optim.HybridAdam(copied, weight_decay=0.1)
    twin.load_state_dict(optimizer.state_dict())
    for p, q in zip(parameters, copied, strict=True):
        p.grad = q.grad = torch.ones_like(p)
    optimizer.step(), twin.step()
    assert all(torch.equal(p, q) for p, q in zip(parameters, copied, strict=True))


@pytest.mark.gpu
@each
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_on_the_gpu_as_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    if name == "CPUAdam":
        pytest.skip("for the CPU only")
    results = []
    for device in ("cpu", "cuda"):
        model = _model(torch.float32, device)
        twin = [nn.Parameter(p.detach().to(dtype)) for p in model.parameters()]
        optimizer = _make(name, twin)
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            for p in twin:
                p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
            optimizer.step()
        results.append([optimizer.master(p).detach().cpu() for p in twin])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_sgd_goes_on_with_a_momentum_that_torch_did_not_count() -> None:
    """torch.optim.SGD has no count of steps; a state of a parameter that was
    never stepped gets none either.
    """
    weight = torch.nn.Parameter(torch.ones(3))
    idle = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = optim.FusedSGD([weight, idle], lr=1.0, momentum=0.5, dampening=0.5)
    optimizer.state[weight] = {"momentum_buffer": torch.full((3,), 4.0)}  # as booster.load puts it there
    optimizer.state[idle] = {"master": torch.ones(2)}
    optimizer.load_state_dict(optimizer.state_dict())
    weight.grad = torch.full((3,), 2.0)
    optimizer.step()
    assert torch.equal(weight.detach(), torch.full((3,), 1.0 - (0.5 * 4.0 + 0.5 * 2.0)))
    assert "step" not in optimizer.state[idle]


def _clip_stages(rank: int, world_size: int, port: int) -> None:
    config = {"parallel": {"pipeline": 2}}
    colossalai.launch(config, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(3, 4, generator=generator) for _ in range(2)]
    grads = [torch.randn(3, 4, generator=generator) * scale for scale in (1.0, 5.0)]

    def train(stages: Sequence[int]) -> list[torch.Tensor]:
        params = [nn.Parameter(values[i].clone()) for i in stages]
        optimizer = optim.FusedLAMB(params, lr=0.1, max_grad_norm=1.0)
        for _ in range(2):
            for p, i in zip(params, stages, strict=True):
                p.grad = grads[i].clone()
            optimizer.step()
        return [p.detach() for p in params]

    own = train([rank])
    gpc.destroy()
    torch.testing.assert_close(own[0], train([0, 1])[rank])


def test_clipping_inside_of_lamb_sees_all_stages_of_a_pipeline() -> None:
    spawn(_clip_stages, 2)


def test_fused_adam_takes_the_arguments_of_apex() -> None:
    models = _model(), _model()
    optimizers = _make("FusedAdam", models[0].parameters()), _make("HybridAdam", models[1].parameters())
    for model in models:
        model(torch.ones(4, 6)).sum().backward()
    optimizers[0].step(None, None, None, None, None, 2.0)
    optimizers[1].step(None, 2.0)  # type: ignore[call-arg]
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    with pytest.raises(RuntimeError, match=r"takes no grads, scale: it steps the gradients in p\.grad"):
        optimizers[0].step(grads=[], scale=2.0)  # type: ignore[call-arg]
