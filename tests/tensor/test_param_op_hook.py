"""Hooks around operations with ColoParameters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from colossalai.tensor import (
    ColoParameter,
    ColoParamOpHook,
    ColoParamOpHookManager,
    ColoTensor,
    ColoTensorSpec,
    ProcessGroup,
    post_process_colo_init_ctx,
)
from colossalai.testing import spawn
from tests.tensor.net import build, lay_out, loss
from tests.tensor.world import start


class Diary(ColoParamOpHook):
    def __init__(self, names: dict[int, str], diary: list[str]) -> None:
        self.names, self.diary = names, diary

    def _write(self, what: str, params: list[Tensor]) -> None:
        assert all(type(p) is ColoParameter for p in params)
        self.diary.append(f"{what} {'+'.join(self.names[id(p)] for p in params)}")

    def pre_forward(self, params: list[Tensor]) -> None:
        self._write("before", params)

    def post_forward(self, params: list[Tensor]) -> None:
        self._write("after", params)

    def pre_backward(self, params: list[Tensor]) -> None:
        self._write("before backward", params)

    def post_backward(self, params: list[Tensor]) -> None:
        self._write("after backward", params)


def _diary(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    spec = ColoTensorSpec(ProcessGroup())
    a, b, c = (ColoParameter(torch.randn(n), spec=spec) for n in ((3, 3), (3,), (3, 3)))
    diary: list[str] = []
    hook = Diary({id(a): "a", id(b): "b", id(c): "c"}, diary)
    with ColoParamOpHookManager.use_hooks(hook):
        with ColoParamOpHookManager.use_hooks():
            F.linear(torch.ones(2, 3), c)  # unseen
        y = F.linear(torch.tanh(F.linear(torch.ones(2, 3), a, b)), c)
        assert type(y) is ColoTensor  # as without hooks
        _ = a.shape, a.grad, a.numel()  # no operations
    assert diary == ["before a+b", "after a+b", "before c", "after c"]
    diary.clear()
    y.sum().backward()
    assert diary == ["before backward c", "after backward c", "before backward a+b", "after backward a+b"]
    diary.clear()
    F.linear(torch.ones(2, 3), a)
    assert not diary
    with ColoParamOpHookManager.use_hooks(hook), torch.no_grad():
        F.linear(torch.ones(2, 3), a)
    assert diary == ["before a", "after a"]
    with pytest.raises(TypeError, match="use_hooks takes objects of class ColoParamOpHook, got list"):
        ColoParamOpHookManager.use_hooks(diary).__enter__()  # type: ignore[arg-type]


def test_order() -> None:
    spawn(_diary, 1)


def _nothing_changes(rank: int, world_size: int, port: int) -> None:
    """Loss and gradients of a model that is cut are the same with and without hooks."""
    start(rank, world_size, port)
    pg, ids = ProcessGroup(tp_degree=2), torch.arange(10).view(2, 5)
    for plan in ("megatron", "hidden"):
        model = build()
        post_process_colo_init_ctx(model)
        lay_out(model, pg, plan)
        diary: list[str] = []
        hook = Diary({id(p): n for n, p in model.named_parameters()}, diary)
        expected = loss(model, ids)
        grads = torch.autograd.grad(expected, [p for p in model.parameters() if p.requires_grad])
        with ColoParamOpHookManager.use_hooks(hook):
            result = loss(model, ids)
        result.backward()
        assert torch.equal(result, expected)
        for param, grad in zip((p for p in model.parameters() if p.requires_grad), grads, strict=True):
            assert torch.equal(param.grad, grad)
        backward = sorted(d.removeprefix("after backward ") for d in diary if d.startswith("after backward"))
        forward = sorted(
            d.removeprefix("after ") for d in diary if d.startswith("after ") and "backward" not in d
        )
        assert forward == backward
        assert len(forward) > 4


def test_hooks_change_nothing() -> None:
    spawn(_nothing_changes, 2)
