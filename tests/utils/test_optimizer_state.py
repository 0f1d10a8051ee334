"""States of other optimizers and other models are refused before they change anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colossalai.amp.naive_amp import ConstantGradScaler, FP16Optimizer
from colossalai.booster import Booster
from colossalai.interface import OptimizerWrapper
from colossalai.kernel.optimizer.adam import AdamLists
from colossalai.nn.optimizer import FusedAdam, FusedLAMB, FusedSGD, HybridAdam, Lars

MAKE: dict[str, Callable[..., Any]] = {
    "HybridAdam": HybridAdam,
    "FusedAdam": FusedAdam,
    "FusedLAMB": FusedLAMB,
    "FusedSGD": lambda p: FusedSGD(p, lr=0.1, momentum=0.9),
    "Lars": lambda p: Lars(p, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "fp16": lambda p: FP16Optimizer(torch.optim.SGD(p, lr=0.1, momentum=0.9), ConstantGradScaler(1.0)),
}
BOOSTED_ELSEWHERE = ("fp16",)


def _net(width: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2)).to(dtype)


def _stepped(width: int, make: Callable[..., Any], dtype: torch.dtype = torch.float32) -> Any:
    model = _net(width, dtype)
    optimizer = make(model.parameters())
    model(torch.ones(4, 8, dtype=dtype)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("name", MAKE)
def test_a_checkpoint_of_another_model_is_named_with_its_tensors(
    name: str, shard: bool, tmp_path: Path
) -> None:
    booster, make = Booster(), MAKE[name]
    booster.save_optimizer(_stepped(32, make), tmp_path / "o", shard)
    model = _net(64)
    optimizer = make(model.parameters())
    if name not in BOOSTED_ELSEWHERE:
        model, optimizer, *_ = booster.boost(model, optimizer)
    before = optimizer.state_dict()
    with pytest.raises(
        ValueError, match=r"/o.* does not fit the optimizer: .*parameter 0 .*\(32, 8\).*\(64, 8\)"
    ):
        booster.load_optimizer(optimizer, tmp_path / "o")
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    booster.load_optimizer(make(_net(32).parameters()), tmp_path / "o")  # its own model's


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [HybridAdam, FusedAdam, MAKE["FusedSGD"], MAKE["Lars"]])
def test_so_is_a_state_dict_loaded_by_hand(make: Callable[..., Any], dtype: torch.dtype) -> None:
    state = _stepped(32, make, dtype).state_dict()
    with pytest.raises(
        ValueError, match=r"state is of other parameters: .* of parameter 0 has shape \(32, 8\)"
    ):
        make(_net(64, dtype).parameters()).load_state_dict(state)
    with pytest.raises(ValueError, match=r"state is of other parameters"):
        OptimizerWrapper(torch.optim.AdamW(_net(64).parameters())).load_state_dict(
            _stepped(32, torch.optim.AdamW).state_dict()
        )


def test_a_state_of_a_name_of_its_own_is_compared_where_there_is_one() -> None:
    state = _stepped(32, torch.optim.AdamW).state_dict()
    for values in state["state"].values():
        values["own"] = values["exp_avg"]
    optimizer = OptimizerWrapper(torch.optim.AdamW(_net(32).parameters()))
    optimizer.load_state_dict(state)
    state["state"][0]["own"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"own of parameter 0 has shape \(3,\), the parameter \(32, 8\)"):
        optimizer.load_state_dict(state)


def test_states_of_other_shapes_are_no_fault_of_their_own() -> None:
    state = _stepped(32, torch.optim.Adafactor).state_dict()  # rows and columns
    OptimizerWrapper(torch.optim.Adafactor(_net(32).parameters())).load_state_dict(state)


def test_masters_of_another_model_are_refused_before_anything_changes() -> None:
    def make(parameters: Any) -> FP16Optimizer:
        return FP16Optimizer(torch.optim.SGD(parameters, lr=0.1), ConstantGradScaler(1.0))

    model = _net(32, torch.bfloat16)
    state = make(model.parameters()).state_dict()
    optimizer = make(_net(64, torch.bfloat16).parameters())
    optimizer.param_groups[0]["lr"] = 0.7
    with pytest.raises(ValueError, match=r"master weight 0 has shape \(32, 8\), .*\(64, 8\)"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.7


@pytest.mark.parametrize(("saved", "own"), [("AdamW", "SGD"), ("AdamW", "FusedSGD"), ("SGD", "FusedAdam")])
def test_the_state_of_another_kind_of_optimizer_is_refused(saved: str, own: str, tmp_path: Path) -> None:
    booster = Booster()
    booster.save_optimizer(_stepped(32, MAKE[saved]), tmp_path / "o")
    optimizer = MAKE[own](_net(32).parameters())
    with pytest.raises(ValueError, match=rf"/o does not .*another kind of optimizer: .*; but {own} has"):
        booster.load_optimizer(optimizer, tmp_path / "o")
    with pytest.raises(ValueError, match="another kind of optimizer"):
        OptimizerWrapper(optimizer).load_state_dict(_stepped(32, MAKE[saved]).state_dict())


def test_a_file_of_weights_is_no_optimizer(tmp_path: Path) -> None:
    booster = Booster()
    booster.save_model(_net(32), tmp_path / "m")
    with pytest.raises(ValueError, match=r"/m does not .*not the state of an optimizer: it holds 0\.weight"):
        booster.load_optimizer(_stepped(32, HybridAdam), tmp_path / "m")


@pytest.mark.parametrize("variant", ["amsgrad", "maximize"])
def test_variants_that_the_kernels_do_not_have_are_refused(variant: str) -> None:
    refusal = rf"Adam has no {variant} variant"
    with pytest.raises(ValueError, match=refusal):
        HybridAdam(_net(32).parameters(), **{variant: True})
    with pytest.raises(ValueError, match=refusal):
        FusedAdam([{"params": _net(32).parameters(), variant: True}])
    state = _stepped(32, lambda p: torch.optim.AdamW(p, **{variant: True})).state_dict()
    for make in (HybridAdam, FusedAdam):
        with pytest.raises(ValueError, match=refusal):
            make(_net(32).parameters()).load_state_dict(state)
    HybridAdam(_net(32).parameters(), **{variant: False})


def test_kernels_refuse_lists_of_other_sizes() -> None:
    def some(*sizes: int) -> list[torch.Tensor]:
        return [torch.zeros(size) for size in sizes]

    with pytest.raises(
        ValueError, match=r"the exp_avgs of an update have \[3, 5\] elements, the weights \[3, 4\]"
    ):
        AdamLists(weights=some(3, 4), grads=some(3, 4), exp_avgs=some(3, 5), exp_avg_sqs=some(3, 4))
