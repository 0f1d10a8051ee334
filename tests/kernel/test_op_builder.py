"""What the documented builders load computes what the optimizers and PyTorch compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from colossalai.kernel import op_builder
from colossalai.nn.optimizer import CPUAdam, FusedAdam, FusedLAMB, FusedSGD
from colossalai.utils import multi_tensor_applier

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_each = pytest.mark.parametrize("device", DEVICES)
SHAPES = [(5, 3), (7,), (2, 2, 4)]


def _tensors(seed: int, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]


def _twins(device: str, dtype: torch.dtype) -> tuple[list[Tensor], list[torch.nn.Parameter]]:
    weights = _tensors(0, device, dtype)
    return weights, [torch.nn.Parameter(w.clone()) for w in weights]


def _moments(weights: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return [torch.zeros_like(w, dtype=torch.float32) for w in weights], [
        torch.zeros_like(w, dtype=torch.float32) for w in weights
    ]


def test_every_builder_loads() -> None:
    for name in op_builder.__all__:
        if name != "Builder":
            module = getattr(op_builder, name)().load()
            assert module is getattr(op_builder, name)().load(verbose=True)
            assert module.__doc__


@on_each
@pytest.mark.parametrize("adamw", [True, False])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_cpu_adam_steps(device: str, adamw: bool, grad_dtype: torch.dtype) -> None:
    weights, params = _twins(device, torch.float32)
    moments = _moments(weights)
    op = op_builder.CPUAdamBuilder().load().CPUAdamOptimizer(1e-2, 0.9, 0.99, 1e-8, 0.1, adamw)
    kind = FusedAdam if device == "cuda" else CPUAdam
    optimizer = kind(params, 1e-2, betas=(0.9, 0.99), weight_decay=0.1, adamw_mode=adamw)
    for step in range(1, 4):
        grads = _tensors(step, device, grad_dtype)
        for w, g, m, v in zip(weights, grads, *moments, strict=True):
            op.step(step, 1e-2, 0.9, 0.99, 1e-8, 0.1, True, w, g.clone(), m, v, 2.0)
        for p, g in zip(params, grads, strict=True):
            p.grad = g.float()
        optimizer.step(div_scale=2.0)
    torch.testing.assert_close(weights, [p.data for p in params])


@on_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fused_adam(device: str, dtype: torch.dtype) -> None:
    """Half-precision weights without a master are updated in float32 and rounded."""
    weights, params = _twins(device, dtype)
    op = op_builder.FusedOptimBuilder().load().multi_tensor_adam
    flag, moments = torch.zeros(1, dtype=torch.int, device=device), _moments(weights)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    for step in range(1, 4):
        for p in wide:
            p.data.copy_(p.to(dtype))  # rounded in every step
        grads = _tensors(step, device, dtype)
        lists = [grads, weights, *moments]
        multi_tensor_applier(op, flag, lists, 1e-2, 0.9, 0.99, 1e-8, step, 1, 1, 0.1)
        for p, g in zip(wide, grads, strict=True):
            p.grad = g.float()
        if step == 1:
            peer = torch.optim.AdamW(wide, 1e-2, betas=(0.9, 0.99), weight_decay=0.1)
        peer.step()
    for w, p in zip(weights, wide, strict=True):
        torch.testing.assert_close(w, p.detach().to(dtype))
    before = [w.clone() for w in weights]
    multi_tensor_applier(op, flag + 1, [grads, weights, *moments], 1e-2, 0.9, 0.99, 1e-8, 4, 1, 1, 0.1)
    assert all(map(torch.equal, before, weights)), "the flag says that there is nothing to do"
    with pytest.raises(ValueError, match=r"mode is 0 .* or 1 .*, got 2"):
        op(1, flag, [grads, weights, *moments], 1e-2, 0.9, 0.99, 1e-8, 4, 2, 1, 0.1)
    with pytest.raises(ValueError, match=r"needs 4 lists of one length .* got lists of \[3, 3, 3\]"):
        op(1, flag, [grads, weights, moments[0]], 1e-2, 0.9, 0.99, 1e-8, 4, 1, 1, 0.1)


@on_each
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("halves", [False, True])
def test_fused_sgd(device: str, nesterov: bool, halves: bool) -> None:
    weights, params = _twins(device, torch.float32)
    op = op_builder.FusedOptimBuilder().load().multi_tensor_sgd
    flag, buffers = torch.zeros(1, dtype=torch.int, device=device), _moments(weights)[0]
    rounded = [w.half() for w in weights]
    optimizer = FusedSGD(params, 0.1, momentum=0.9, weight_decay=0.1, nesterov=nesterov)
    for step in range(3):
        grads = _tensors(step, device)
        lists = [grads, weights, buffers, *([rounded] if halves else [])]
        multi_tensor_applier(op, flag, lists, 0.1, 0.9, 0.0, 0.1, nesterov, step == 0, False, 0.5)
        for p, g in zip(params, grads, strict=True):
            p.grad = g / 2
        optimizer.step()
    torch.testing.assert_close(weights, [p.data for p in params])
    if halves:
        assert all(torch.equal(half, w.half()) for half, w in zip(rounded, weights, strict=True))


@on_each
def test_fused_lamb_and_the_norm(device: str) -> None:
    weights, params = _twins(device, torch.float32)
    ops = op_builder.FusedOptimBuilder().load()
    flag, moments = torch.zeros(1, dtype=torch.int, device=device), _moments(weights)
    optimizer = FusedLAMB(params, 1e-2, max_grad_norm=0.5)
    for step in range(1, 4):
        grads = _tensors(step, device)
        norm, each = multi_tensor_applier(ops.multi_tensor_l2norm, flag, [grads], True)
        torch.testing.assert_close(norm[0], torch.cat([g.flatten() for g in grads]).norm())
        torch.testing.assert_close(each, torch.stack([g.norm() for g in grads]))
        options = (1e-2, 0.9, 0.999, 1e-6, step, 1, 0.01, 1, 1, norm, 0.5, False)
        multi_tensor_applier(ops.multi_tensor_lamb, flag, [grads, weights, *moments], *options)
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        optimizer.step()
    torch.testing.assert_close(weights, [p.data for p in params])


@on_each
def test_scaling_finds_overflows(device: str) -> None:
    op = op_builder.FusedOptimBuilder().load().multi_tensor_scale
    flag = torch.zeros(1, dtype=torch.int, device=device)
    sources, targets = _tensors(0, device, torch.float16), [torch.empty_like(t) for t in _tensors(0, device)]
    multi_tensor_applier(op, flag, [sources, targets], 4.0)
    torch.testing.assert_close(targets, [s.float() * 4 for s in sources], rtol=1e-3, atol=1e-3)
    assert flag.item() == 0
    sources[1][2] = float("inf")
    multi_tensor_applier(op, flag, [sources, targets], 4.0)
    assert flag.item() == 1


@on_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_layer_norm(device: str, dtype: torch.dtype) -> None:
    op = op_builder.LayerNormBuilder().load()
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, device=device, dtype=dtype, requires_grad=True)
    weight, bias = (torch.randn(8, device=device, requires_grad=True) for _ in range(2))
    grad = torch.randn(4, 3, 8, device=device)
    y, mean, inverse = op.forward_affine(x.detach(), (8,), weight.detach(), bias.detach(), 1e-5)
    expected = F.layer_norm(x.float(), (8,), weight, bias)
    expected.backward(grad)
    assert y.dtype is weight.dtype
    close: dict[str, Any] = {} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(y, expected.detach(), **close)
    found = op.backward_affine(grad, mean, inverse, x.detach(), (8,), weight.detach(), bias.detach(), 1e-5)
    for got, leaf in zip(found, (x, weight, bias), strict=True):
        assert got.dtype is leaf.dtype
        torch.testing.assert_close(got, leaf.grad, **close)


@on_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_softmax(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    close: dict[str, Any] = {} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
    for causal in (False, True):
        shape = (6, 5, 5) if causal else (2, 3, 5, 5)
        x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
        grad = torch.randn(shape, device=device, dtype=dtype)
        if causal:
            op = op_builder.ScaledUpperTrainglemaskedSoftmaxBuilder().load()
            mask = torch.ones(5, 5, device=device).triu(1).bool()
            y = op.forward(x.detach(), 0.5)
        else:
            op = op_builder.ScaledMaskedSoftmaxBuilder().load()
            mask = torch.rand(2, 1, 5, 5, device=device) > 0.7
            mask[..., 0] = False
            y = op.forward(x.detach(), mask.to(torch.uint8), 0.5)
        expected = (x.float() * 0.5).masked_fill(mask, float("-inf")).softmax(-1).to(dtype)
        torch.testing.assert_close(y, expected.detach(), **close)
        expected.backward(grad)
        torch.testing.assert_close(op.backward(grad, y, 0.5), x.grad, **close)


@on_each
def test_tokens_go_to_experts_and_back(device: str) -> None:
    op = op_builder.MOEBuilder().load()
    torch.manual_seed(0)
    s, e, c, h = 6, 2, 2, 3
    chosen = torch.tensor([0, 1, 0, 0, 1, 1], device=device)
    hot = F.one_hot(chosen, e)
    place = (op.cumsum_sub_one(hot) * hot).sum(1)
    assert place.tolist() == [0, 0, 1, 2, 1, 2]
    mask, dest = (place < c).int(), (chosen * c + place.clamp(max=c - 1)).int()
    tokens = torch.randn(s, h, device=device, requires_grad=True)
    logits = torch.rand(s, e, device=device, requires_grad=True)
    rows = op.dispatch_forward(s, e * c, h, tokens, mask, dest)
    torch.testing.assert_close(rows.detach(), tokens.detach()[[0, 2, 1, 4]])
    rows.retain_grad()
    out = op.combine_forward(s, e, c, h, rows * 2, logits, mask, dest)
    expected = tokens * 2 * logits.gather(1, chosen[:, None]) * mask[:, None]
    torch.testing.assert_close(out, expected)
    grad = torch.randn(s, h, device=device)
    out.backward(grad)
    rows_grad, logits_grad = op.combine_backward(
        s, e, c, h, grad, 2 * rows.detach(), logits.detach(), mask, dest
    )
    torch.testing.assert_close(2 * rows_grad, rows.grad)
    torch.testing.assert_close(logits_grad, logits.grad)
    assert rows.grad is not None
    torch.testing.assert_close(op.dispatch_backward(s, e * c, h, rows.grad, mask, dest), tokens.grad)
