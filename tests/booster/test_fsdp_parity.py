"""Training with everything cut over the ranks equals serial training with the ranks' batches joined."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from colossalai.booster.plugin import TorchFSDPPlugin, fsdp
from colossalai.testing import RankError, spawn
from colossalai.testing.parity import ParityError, Tolerance, check_plan
from tests.booster.plans import Case, PluginRun, clipping, launch, mlp, problem
from tests.booster.towers import Block, TiedTower, Tower, groups


def frozen_tower() -> nn.Module:
    model = Tower()
    model.first.requires_grad_(False)
    model.blocks[1].norm.requires_grad_(False)
    model.blocks[2].requires_grad_(False)
    return model


class HalfUsed(Tower):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks[1](self.first(x)))


class Shared(Tower):
    """A block that is the first two of the list, a layer that is also in another block, and one that is also
    the model's own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.blocks[0]
        self.blocks.append(Block(7))
        self.blocks[3].inner = self.blocks[2].inner
        self.blocks.append(self.first)
        self.middle = nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks[:4]:
            x = block(x)
        return self.last(self.blocks[4](self.middle(x)))


tower = partial(problem, Tower)


CASES = {
    "AdamW": Case(tower),
    "no blocks": Case(lambda: problem(mlp)),
    "fused AdamW": Case(
        lambda: tower(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, fused=True))
    ),
    "several groups": Case(lambda: tower(optimizer=groups)),
    "accumulation": Case(lambda: tower(sizes=(16, 16, 8)), run={"accumulate": 2}),
    "clipping by norm": clipping(
        lambda p: clip_grad_norm_(p, 0.05),
        lambda o: o.clip_grad_by_norm(0.05),
        partial(tower, sizes=(8, 16)),
        accumulate=2,
    ),
    "clipping by 1-norm": clipping(
        lambda p: clip_grad_norm_(p, 0.5, 1), lambda o: o.clip_grad_by_norm(0.5, 1), tower
    ),
    "clipping by largest": clipping(
        lambda p: clip_grad_norm_(p, 0.01, float("inf")),
        lambda o: o.clip_grad_by_norm(0.01, float("inf")),
        tower,
    ),
    "clipping by value": clipping(
        lambda p: clip_grad_value_(p, 0.01), lambda o: o.clip_grad_by_value(0.01), tower
    ),
    "unused parameters": Case(lambda: problem(HalfUsed)),
    "frozen parameters": Case(lambda: problem(frozen_tower)),
    "tied parameters": Case(lambda: problem(TiedTower)),
    "modules in two places": Case(lambda: problem(Shared)),
    "modules in two places, kept whole": Case(
        lambda: problem(Shared), plugin={"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    ),
    "weights kept whole": Case(tower, plugin={"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
    "units by class": Case(tower, plugin={"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}),
    "units by size": Case(
        tower, plugin={"auto_wrap_policy": partial(size_based_auto_wrap_policy, min_num_params=40)}
    ),
    "offload": Case(tower, plugin={"cpu_offload": True}),
}


# those in which an uneven cut can go wrong; the others do not depend on the number of ranks
ON_FOUR = (
    "AdamW",
    "several groups",
    "accumulation",
    "clipping by 1-norm",
    "clipping by largest",
    "tied parameters",
    "modules in two places",
)


def _check(case: Case, tolerance: Tolerance | None = None) -> None:
    plugin = TorchFSDPPlugin(**{"sync_module_states": True, **case.plugin})
    check_plan(case.problem(), lambda p: PluginRun(p, plugin, **case.run), tolerance=tolerance or Tolerance())


def _all_cases(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    for name, case in CASES.items():
        if world_size == 4 and name not in ON_FOUR:
            continue
        try:
            _check(case)
        except Exception as error:
            raise ParityError(f"{name}: {error}") from error


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_fsdp_equals_serial(world_size: int) -> None:
    spawn(_all_cases, world_size)


def _hybrid(rank: int, world_size: int, port: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    launch(rank, world_size, port)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "part"))
    _check(Case(tower, plugin={"process_group": mesh}))
    clip = CASES["clipping by 1-norm"]
    _check(Case(clip.problem, {"process_group": mesh}, clip.run))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        _check(Case(tower, plugin={"sharding_strategy": ShardingStrategy.HYBRID_SHARD}))
    flat = {
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        "process_group": init_device_mesh("cpu", (4,)),
    }
    with pytest.raises(ValueError, match="HYBRID_SHARD needs a mesh of two dims, copies and parts"):
        _check(Case(tower, flat))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "3")
        with pytest.raises(ValueError, match=r"over the 3 ranks of each node, which does not fit 4 ranks"):
            _check(Case(tower, plugin={"sharding_strategy": ShardingStrategy.HYBRID_SHARD}))


def test_copies_of_a_cut_model() -> None:
    spawn(_hybrid, 4)


def _bf16_policy(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    case = Case(tower, plugin={"mixed_precision": policy})
    _check(case, Tolerance(loss=0.02, gradient=0.1, weight=0.1))
    with pytest.raises(ParityError, match="loss at step 0 differs"):  # it does compute in bf16
        _check(case)


def test_bf16_by_policy_is_close_to_serial_and_not_equal() -> None:
    spawn(_bf16_policy, 2)


class _Scaling(TorchFSDPPlugin):
    """Computes with gradients that are too large on one rank."""

    def configure(self, model: nn.Module, *args: Any) -> Any:
        boosted, *rest = super().configure(model, *args)
        boosted.register_forward_hook(lambda _, __, out: out + self.rank * (out - out.detach()))
        return boosted, *rest


class _Forgetful(TorchFSDPPlugin):
    """Leaves the optimizer with the parameters of before."""

    def configure(self, model: nn.Module, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fsdp, "_point_to", lambda *_: None)
            return super().configure(model, *args)


def _broken(rank: int, world_size: int, port: int, plugin: type[TorchFSDPPlugin]) -> None:
    launch(rank, world_size, port)
    check_plan(tower(), lambda p: PluginRun(p, plugin(sync_module_states=True)))


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (_Scaling, r"gradient at step 0 of .* differs from the serial model's"),
        (_Forgetful, "'first.weight' that the model had before boost"),
    ],
)
def test_the_check_notices_wrong_plugins(plugin: type[TorchFSDPPlugin], message: str) -> None:
    with pytest.raises(RankError, match=message):
        spawn(_broken, 2, plugin=plugin)


def _unclipped(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    _check(clipping(lambda p: clip_grad_norm_(p, 0.05), lambda o: None, tower))


def test_the_check_notices_missing_clipping() -> None:
    with pytest.raises(RankError, match="differs from the serial model's"):
        spawn(_unclipped, 2)
