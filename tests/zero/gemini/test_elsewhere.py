"""Weights that are elsewhere are brought or refused, and never read or written where they are not."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from colossalai.nn.optimizer import HybridAdam
from colossalai.zero.gemini import GeminiDDP, GeminiOptimizer
from tests.zero.gemini.runs import SMALL, batch, loss_of, net


def trained(policy: str = "cpu", **options: Any) -> tuple[GeminiDDP, GeminiOptimizer]:
    size = SMALL * 4
    model = GeminiDDP(
        net(), "cpu", policy, dtype=torch.float32, min_chunk_size_mb=size, search_range_mb=size, **options
    )
    optimizer = GeminiOptimizer(HybridAdam(model.parameters(), lr=1e-2), model)
    step(model, optimizer)
    return model, optimizer


def step(model: GeminiDDP, optimizer: GeminiOptimizer) -> None:
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, batch(0)))
    optimizer.step()


def give_new_memory(model: Any) -> None:
    model.embed.weight.data = torch.ones(24, 8)


def average(model: Any) -> None:
    mean = [torch.zeros_like(p) for p in model.parameters()]
    for m, p in zip(mean, model.parameters(), strict=True):
        m.mul_(0.9).add_(p, alpha=0.1)


# What users do with the weights of a model, outside of its forward.
HABITS: dict[str, Callable[[Any], Any]] = {
    "state_dict": lambda m: m.unwrap().state_dict(),
    "load_state_dict": lambda m: m.unwrap().load_state_dict(net().state_dict()),
    "zero_": lambda m: m.embed.weight.zero_(),
    "init": lambda m: nn.init.xavier_uniform_(m.embed.weight),
    "data.copy_": lambda m: m.embed.weight.data.copy_(torch.ones(24, 8)),
    "data": give_new_memory,
    "half": lambda m: m.half(),
    "double": lambda m: m.unwrap().double(),
    "as_subclass": lambda m: m.embed.weight.as_subclass(torch.Tensor),
    "deepcopy": lambda m: copy.deepcopy(m.unwrap()),
    "deepcopy of a layer": lambda m: copy.deepcopy(m.blocks[0].inner),
    "pickle": lambda m: pickle.dumps(m.embed.weight),
    "save": lambda m: torch.save(list(m.parameters()), io.BytesIO()),
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "from a vector": lambda m: nn.utils.vector_to_parameters(torch.zeros(10**4), m.parameters()),
    "average": average,
    "norm": lambda m: sum(p.norm() for p in m.parameters()),
    "loss": lambda m: (m.embed.weight**2).sum(),
    "foreach": lambda m: torch._foreach_norm(list(m.parameters())),
    "functional": lambda m: F.embedding(torch.tensor([0]), m.embed.weight),
    "forward by hand": lambda m: m.frozen.forward(torch.ones(1, 8)),
    "item": lambda m: m.embed.weight[0, 0].item(),
    "list": lambda m: m.embed.weight.tolist(),
    "compare": lambda m: torch.equal(m.embed.weight, torch.ones(24, 8)),
}


@pytest.fixture(scope="module")
def boosted() -> GeminiDDP:
    return trained()[0]


@pytest.mark.parametrize("habit", HABITS)
def test_reading_and_writing_is_refused(boosted: GeminiDDP, habit: str) -> None:
    with pytest.raises(RuntimeError, match=r"needs the values of '[\w.]+', which lie in a chunk") as caught:
        HABITS[habit](boosted)
    assert "whole_parameters()" in str(caught.value)


def test_refused_habits_leave_the_weights_as_they_were(boosted: GeminiDDP) -> None:
    expected = boosted.state_dict()
    for habit in HABITS.values():
        with pytest.raises(RuntimeError, match="needs the values of"):
            habit(boosted)
    found = boosted.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    boosted(batch(0))


def test_questions_about_the_form_are_answered(boosted: GeminiDDP) -> None:
    plain = net().embed.weight
    weight: Any = boosted.embed.weight
    for name in (
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "ndim",
        "is_leaf",
        "layout",
        "is_cuda",
        "nbytes",
    ):
        assert getattr(weight, name) == getattr(plain, name), name
    for name in ("size", "numel", "dim", "stride", "element_size", "is_floating_point", "get_device"):
        if name != "stride":
            assert getattr(weight, name)() == getattr(plain, name)(), name
    assert len(weight) == 24
    assert isinstance(weight, nn.Parameter)
    assert torch.zeros_like(weight).shape == (24, 8)
    assert sum(p.numel() for p in boosted.parameters()) == sum(p.numel() for p in net().parameters())
    assert "elsewhere" in repr(weight)
    assert weight in {weight: 1}
    assert "Linear" in repr(boosted)
    boosted.zero_grad()
    assert weight.grad is None


def test_inside_whole_parameters_all_is_as_ever(boosted: GeminiDDP) -> None:
    expected = boosted.state_dict()
    with boosted.whole_parameters():
        found = boosted.unwrap().state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert "elsewhere" not in repr(boosted.embed.weight)


def test_weights_that_never_leave_can_be_read_and_computed_with() -> None:
    model, optimizer = trained("cuda")
    serial = net()
    plain = HybridAdam(serial.parameters(), lr=1e-2)
    serial.load_state_dict(model.state_dict())
    plain.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, batch(1)) + (model.embed.weight**2).sum())
    optimizer.step()
    (loss_of(serial, batch(1)) + (serial.embed.weight**2).sum()).backward()
    plain.step()
    for name, value in serial.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
