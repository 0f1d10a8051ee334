"""TorchFSDPPlugin beyond parity: what is where, its arguments, precisions, and what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.utils.data import TensorDataset

from colossalai.booster import Booster
from colossalai.booster.mixed_precision import BF16MixedPrecision
from colossalai.booster.plugin import TorchFSDPPlugin
from colossalai.booster.plugin.fsdp_model import find_units
from colossalai.testing import spawn
from tests.booster.plans import batches, launch, loss_of, mlp
from tests.booster.towers import TiedTower, Tower, groups


def test_a_plugin_needs_the_distributed_environment() -> None:
    with pytest.raises(RuntimeError, match="TorchFSDPPlugin needs the distributed environment"):
        TorchFSDPPlugin()


def test_units() -> None:
    tower = Tower()
    assert find_units(tower, None, set()) == list(tower.blocks)
    assert find_units(TiedTower(), None, set()) == []  # a tied weight belongs to what holds both
    nested = nn.Sequential(mlp(), nn.ModuleDict({"a": nn.ModuleList([nn.ModuleList([Tower()]), nn.Tanh()])}))
    assert [type(unit) for unit in find_units(nested, None, set())] == [Tower]
    by_class = find_units(tower, ModuleWrapPolicy({nn.Linear, nn.ModuleList}), set())
    assert by_class == [m for m in tower.modules() if isinstance(m, nn.Linear)]
    with pytest.raises(ValueError, match=r"policy cuts 'blocks.0.inner' by itself.*'weight' is tied"):
        find_units(TiedTower(), ModuleWrapPolicy({nn.Linear}), set())


def _arguments(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"process_group": 3}, TypeError, "process_group to be a ProcessGroup or DeviceMesh of torch, got 3"),
        (
            {"process_group": init_device_mesh("cpu", (1, 2))},
            ValueError,
            r"shape \(1, 2\) with dim names None",
        ),
        (
            {"sharding_strategy": "FULL"},
            TypeError,
            "sharding_strategy to be a ShardingStrategy of torch, got 'FULL'",
        ),
        (
            {"sharding_strategy": fsdp.ShardingStrategy.NO_SHARD},
            ValueError,
            "cuts nothing; use TorchDDPPlugin",
        ),
        ({"cpu_offload": "yes"}, TypeError, "cpu_offload to be a CPUOffload or OffloadPolicy"),
        ({"auto_wrap_policy": CustomPolicy(lambda m: True)}, TypeError, "auto_wrap_policy is called as"),
        (
            {"backward_prefetch": fsdp.BackwardPrefetch.BACKWARD_POST},
            ValueError,
            "has no equivalent in FSDP2",
        ),
        (
            {"mixed_precision": "bf16"},
            TypeError,
            "mixed_precision to be a MixedPrecision or MixedPrecisionPolicy",
        ),
        (
            {"mixed_precision": fsdp.MixedPrecision(buffer_dtype=torch.half)},
            ValueError,
            "buffer_dtype.* has no equivalent",
        ),
        ({"ignored_modules": ["head"]}, TypeError, "ignored_modules to be a Module of torch, got 'head'"),
        ({"param_init_fn": print}, ValueError, "takes no param_init_fn"),
    ]
    for options, error, message in refused:
        with pytest.raises(error, match=message):
            TorchFSDPPlugin(**options)
    plugin = TorchFSDPPlugin(
        dist.group.WORLD,
        fsdp.ShardingStrategy.FULL_SHARD,
        fsdp.CPUOffload(offload_params=True),
        None,
        fsdp.BackwardPrefetch.BACKWARD_PRE,
        fsdp.MixedPrecision(torch.bfloat16, torch.float32),
    )
    assert plugin.options.offload
    assert plugin.options.precision == fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    assert plugin.control_precision()
    assert Booster("cpu", "bf16", plugin).mixed_precision is None  # they say the same
    with pytest.raises(
        ValueError, match=r"given mixed_precision=.*bfloat16.* the Booster mixed_precision='fp16'"
    ):
        Booster("cpu", "fp16", plugin)
    with pytest.raises(
        ValueError, match="TorchFSDPPlugin does not support mixed_precision='fp16', only bf16"
    ):
        Booster("cpu", "fp16", TorchFSDPPlugin(cpu_offload=True))
    assert not TorchFSDPPlugin(cpu_offload=fsdp.CPUOffload()).options.offload
    alone = [dist.new_group([0]), dist.new_group([1])]
    with pytest.raises(ValueError, match=rf"rank {rank} is not in process_group"):
        TorchFSDPPlugin(alone[1 - rank])
    mine = TorchFSDPPlugin(alone[rank])
    assert (mine.rank, mine.world_size) == (0, 1)
    assert len(mine.prepare_dataloader(TensorDataset(torch.ones(8)), batch_size=2)) == 4
    assert len(plugin.prepare_dataloader(TensorDataset(torch.ones(8)), batch_size=2)) == 2


def test_arguments_are_translated_or_refused() -> None:
    spawn(_arguments, 2)


def _boost(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    half = Booster("cpu", BF16MixedPrecision(half_weights=True), TorchFSDPPlugin())
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        torch.manual_seed(0)
        model = Tower()
        with pytest.raises(
            ValueError, match=rf"cannot cut the fp32 masters .* {kind.__name__}; use HybridAdam, "
        ):
            half.boost(model, kind(model.parameters(), lr=0.1))
    booster = Booster("cpu", plugin=TorchFSDPPlugin())
    model = Tower()
    names = [name for name, _ in model.named_parameters()]
    optimizer = groups(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    boosted, wrapped, _, _, scheduler_after = booster.boost(model, optimizer, lr_scheduler=scheduler)
    assert boosted.unwrap() is model
    assert wrapped.unwrap() is optimizer
    assert scheduler_after is scheduler
    assert [name for name, _ in boosted.named_parameters()] == names
    held = sum(p.to_local().numel() for p in boosted.parameters())  # type: ignore[operator]
    assert held < 0.7 * sum(
        p.numel() for p in boosted.parameters()
    )  # a half, and the rows that cannot be halved
    shapes = [[tuple(p.shape) for p in group["params"]] for group in wrapped.param_groups]
    assert shapes[0][0] == (3, 7)
    assert shapes[0][-1] == (7, 6)  # the order of the user's group
    assert {p for group in wrapped.param_groups for p in group["params"]} == set(model.parameters())
    for batch in batches((4, 4)):
        booster.backward(loss_of(boosted, batch), wrapped)
        wrapped.step()
        scheduler.step()
    assert [group["lr"] for group in wrapped.param_groups] == pytest.approx([1e-4, 3e-4])
    moments: list[Any] = [state["exp_avg"] for state in wrapped.state.values()]
    assert all(moment.to_local().numel() < moment.numel() for moment in moments)
    with pytest.raises(TypeError, match=r"no_sync needs the model that booster.boost returned.*got Tanh"):
        booster.no_sync(nn.Tanh())
    frozen, none, *_ = booster.boost(mlp().requires_grad_(False))
    assert none is None
    assert frozen(torch.ones(2, 6)).shape == (2, 3)
    without, *_ = booster.boost(nn.Tanh())
    assert without(torch.zeros(1)).item() == 0
    other = mlp()
    foreign = torch.optim.SGD([*other.parameters(), nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ValueError, match=r"holds a parameter of shape \(2,\) that is not"):
        booster.boost(other, foreign)


def test_names_groups_and_states() -> None:
    spawn(_boost, 2)


def _late(rank: int, world_size: int, port: int) -> None:
    """An optimizer that has states when it is boosted goes on with them."""
    launch(rank, world_size, port)
    torch.manual_seed(0)
    weights = []
    for plugin in (None, TorchFSDPPlugin()):
        torch.manual_seed(0)
        model = Tower()
        optimizer = groups(model.parameters())
        first, second = batches((4, 4))
        loss_of(model, first).backward()
        optimizer.step()
        optimizer.zero_grad()
        booster = Booster("cpu", plugin=plugin)
        boosted, wrapped, *_ = booster.boost(model, optimizer)
        booster.backward(loss_of(boosted, second), wrapped)
        wrapped.step()
        values: list[Any] = [p.detach() for p in boosted.parameters()]
        weights.append([v.full_tensor() if plugin else v for v in values])
    for serial, cut in zip(*weights, strict=True):
        torch.testing.assert_close(serial, cut, rtol=1e-5, atol=1e-6)


def test_states_from_before_are_kept() -> None:
    spawn(_late, 2)


def _starts(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    torch.manual_seed(rank)
    with pytest.raises(
        RuntimeError, match=r"ranks start from different values of '0.weight'.*sync_module_states=True"
    ):
        Booster("cpu", plugin=TorchFSDPPlugin()).boost(mlp())
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(rank + 5)  # type: ignore[operator, union-attr]
    boosted, *_ = Booster("cpu", plugin=TorchFSDPPlugin(sync_module_states=True)).boost(model)
    assert boosted.state_dict()["1.running_mean"].tolist() == [5] * 3
    torch.manual_seed(0)
    assert torch.equal(boosted.state_dict()["0.weight"].full_tensor(), _first_linear_of(0))


def _first_linear_of(seed: int) -> Tensor:
    torch.manual_seed(seed)
    mlp()
    return nn.Linear(6, 3).weight.detach()


def test_ranks_that_start_differently_are_refused_or_made_alike() -> None:
    spawn(_starts, 2)


def _ignored(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    torch.manual_seed(0)
    model = Tower()
    booster = Booster("cpu", plugin=TorchFSDPPlugin(ignored_modules=[model.last]))
    with pytest.raises(ValueError, match=r"of ignored_modules, whose gradient is not averaged: freeze it"):
        booster.boost(model, groups(model.parameters()))
    model.last.requires_grad_(False)
    boosted, optimizer, *_ = booster.boost(model, groups(model.parameters()))
    assert type(model.last.weight) is nn.Parameter
    booster.backward(loss_of(boosted, batches((4,))[0]), optimizer)
    assert optimizer.clip_grad_by_norm(1.0) > 0
    optimizer.step()


def test_ignored_modules_stay_whole() -> None:
    spawn(_ignored, 2)


def _precisions(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    for precision, tolerance in (("bf16", 2e-2), ("fp16", 5e-3)):
        results = []
        for plugin in (None, TorchFSDPPlugin()):
            torch.manual_seed(0)
            model = Tower()
            booster = Booster("cpu", precision, plugin)
            boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in batches((8, 8)):
                part = batch if plugin is None else tuple(t[rank::2] for t in batch)
                booster.backward(loss_of(boosted, part), optimizer)  # type: ignore[arg-type]
                norm = optimizer.clip_grad_by_norm(0.1)
                assert type(norm) is Tensor
                optimizer.step()
                optimizer.zero_grad()
            weights: list[Any] = [p.detach() for p in boosted.parameters()]
            results.append([norm, *(w.full_tensor() if plugin else w for w in weights)])
        for serial, cut in zip(*results, strict=True):
            torch.testing.assert_close(serial, cut, rtol=tolerance, atol=tolerance)


def test_mixed_precision_of_the_booster() -> None:
    spawn(_precisions, 2)


def _overflow(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    torch.manual_seed(0)
    model = Tower()
    booster = Booster("cpu", "fp16", TorchFSDPPlugin())
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.backward(loss_of(boosted, batches((4,))[0]), optimizer)
    before: list[Any] = [p.detach().clone() for p in boosted.parameters()]
    if rank == 1:  # an inf in a part that only this rank holds
        next(boosted.parameters()).grad.to_local()[-1, 0] = float("inf")  # type: ignore[union-attr, operator]
    optimizer.step()
    scale = optimizer.optim.scaler.get_scale()
    assert scale == 2.0**15  # every rank skipped, and reduced the scale
    for p, old in zip(boosted.parameters(), before, strict=True):
        assert torch.equal(p.to_local(), old.to_local())  # type: ignore[operator]


def test_all_ranks_skip_a_step_that_overflows_on_one() -> None:
    spawn(_overflow, 2)


def _norms(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    model = nn.Linear(1, 1, bias=False)  # rank 1 holds nothing
    nn.init.ones_(model.weight)
    booster = Booster("cpu", plugin=TorchFSDPPlugin())
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert optimizer.clip_grad_by_norm(1.0) == 0  # no gradients yet
    for value, norm_type in (
        (float("nan"), 2.0),
        (float("inf"), 2.0),
        (float("nan"), float("inf")),
        (3.0, 1.0),
    ):
        optimizer.zero_grad()
        booster.backward(boosted(torch.full((1, 1), value)).sum(), optimizer)
        norm = optimizer.clip_grad_by_norm(1e9, norm_type)
        torch.testing.assert_close(norm, torch.tensor(value), equal_nan=True)
        if not norm.isfinite():
            with pytest.raises(RuntimeError, match=r"norm of all gradients is (nan|inf)"):
                optimizer.clip_grad_by_norm(1.0, norm_type, error_if_nonfinite=True)


def test_norms_that_are_not_finite_are_known_to_every_rank() -> None:
    spawn(_norms, 2)


def _evaluation(rank: int, world_size: int, port: int) -> None:
    """A forward pass without a backward pass must not leave weights behind that later ones take for the
    current.
    """
    launch(rank, world_size, port)
    for strategy in (None, fsdp.ShardingStrategy.SHARD_GRAD_OP):
        for gradients in (False, True):
            torch.manual_seed(0)
            model = Tower()
            serial = copy.deepcopy(model)
            booster = Booster("cpu", plugin=TorchFSDPPlugin(sharding_strategy=strategy))
            boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
            serial_optimizer = torch.optim.SGD(serial.parameters(), lr=0.5)
            batch = batches((4,))[0]
            booster.backward(loss_of(boosted, batch), optimizer)
            loss_of(serial, batch).backward()
            with torch.set_grad_enabled(gradients):
                boosted(batch[0])
            if not gradients:
                assert all(hasattr(p, "full_tensor") for p in boosted.parameters())
            optimizer.step()
            serial_optimizer.step()
            torch.testing.assert_close(boosted(batch[0]), serial(batch[0]), rtol=1e-5, atol=1e-5)


def test_weights_are_current_after_an_evaluation() -> None:
    spawn(_evaluation, 2)


def _dtypes(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    booster = Booster("cpu", plugin=TorchFSDPPlugin())
    model = Tower()
    model.last.bfloat16()
    words = (
        r"gathers first.weight \(torch.float32\) and last.weight \(torch.bfloat16\) together"
        r".* auto_wrap_policy"
    )
    with pytest.raises(ValueError, match=words):
        booster.boost(model)
    one = nn.Sequential(nn.Linear(6, 3), nn.Linear(1, 1, bias=False).half())
    nn.init.zeros_(one[1].weight)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"gathers 0.weight \(torch.float32\) and 1.weight \(torch.float16\)"
    ):
        booster.boost(one)
    policy = TorchFSDPPlugin(auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), sync_module_states=True)
    boosted, *_ = Booster("cpu", plugin=policy).boost(model)
    assert {p.dtype for p in boosted.parameters()} == {torch.float32, torch.bfloat16}


def test_a_unit_has_one_dtype() -> None:
    spawn(_dtypes, 2)


class OwnRprop(torch.optim.Rprop):
    """Also an optimizer of a script's own that goes on from one of torch."""

    elementwise = True


def _optimizers(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    written = "writes to elements that it chooses, which torch cannot do with the DTensors of TorchFSDPPlugin"
    refused: list[tuple[type[torch.optim.Optimizer], str]] = [
        (torch.optim.Rprop, f"^Rprop {written}; use .* such as AdamW$"),
        (OwnRprop, f"^OwnRprop {written}"),
        (torch.optim.LBFGS, "^LBFGS looks at the gradients of the whole model at once"),
    ]
    for kind, words in refused:
        model = mlp()
        with pytest.raises(ValueError, match=words):
            Booster("cpu", plugin=TorchFSDPPlugin()).boost(model, kind(model.parameters()))  # type: ignore[call-arg]


def test_optimizers_that_cannot_step_parts_are_refused() -> None:
    spawn(_optimizers, 2)
