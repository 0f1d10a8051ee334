"""On a GPU: grouped products, and ranks that share it, compute what the CPU does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from colossalai.core import global_context as gpc
from colossalai.nn.layer.moe import FFNExperts, MoeLayer, MoeRouter
from colossalai.nn.layer.moe.products import RowsPerExpert, grouped_product
from colossalai.testing import spawn
from tests.nn.layer.moe.training import Task, Trained, compare, launch, serial
from tests.nn.layer.moe.training import by_engine as train

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("counts", [[5, 0, 3, 8], [0, 0, 16, 0]])
def test_grouped_products(counts: list[int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(4, 32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)
    results = []
    for dtype in (torch.bfloat16, torch.float64):  # one kernel, and one product after the other
        rows = RowsPerExpert(torch.tensor(counts, device="cuda"))
        y = grouped_product(x.to(dtype), w.to(dtype), rows)
        results.append([t.double() for t in (y, *torch.autograd.grad(y, [x, w], grad.to(dtype)))])
    torch.testing.assert_close(results[0], results[1], rtol=2e-2, atol=0.3)


def test_a_layer_in_bf16() -> None:
    torch.manual_seed(0)
    experts = FFNExperts(8, 32, 64, F.silu, gated=True, bias=False)
    layer = MoeLayer(32, 8, MoeRouter(2, 1.0, min_capacity=0), experts)
    x = torch.randn(4, 16, 32)
    expected = layer(x)
    layer.cuda().bfloat16()
    got = layer(x.cuda().bfloat16())
    torch.testing.assert_close(got.float().cpu(), expected, rtol=5e-2, atol=5e-3)


def _passes(layer: MoeLayer, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and all gradients, in float64 on the CPU."""
    x = x.detach().to(layer.gate_weight).requires_grad_()
    y = layer(x)
    grads = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    return [t.double().cpu() for t in (y, *grads)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drops", [True, False], ids=["drops", "dropless"])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(
    ("gated", "bias", "activation"),
    [(True, False, F.silu), (True, True, F.gelu), (False, True, F.gelu), (False, True, F.relu)],
    ids=["silu-gated", "gelu-gated-bias", "gelu-bias", "relu-bias"],
)
def test_both_passes_with_our_kernels(
    dtype: torch.dtype, drops: bool, k: int, gated: bool, bias: bool, activation: Any
) -> None:
    torch.manual_seed(0)
    experts = FFNExperts(5, 24, 40, activation, gated=gated, bias=bias)
    layer = MoeLayer(24, 5, MoeRouter(k, 0.7, min_capacity=0, drop_tks=drops), experts)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.3)
        p.data = p.data.bfloat16().float()  # no rounding makes the choices differ
    x = torch.randn(3, 11, 24).bfloat16()
    expected = _passes(layer.double(), x)
    got = _passes(layer.to("cuda", dtype), x.cuda())
    assert layer.loads is not None
    assert (int(layer.loads.dropped) > 0) == drops
    unit = 2e-5 if dtype is torch.float32 else 3e-2
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=unit, atol=unit * float(b.abs().max()))


def test_gradients_of_gradients_with_our_kernels() -> None:
    torch.manual_seed(0)
    layer = MoeLayer(8, 3, MoeRouter(2), FFNExperts(3, 8, 16, F.silu, gated=True)).cuda()
    x = torch.randn(2, 5, 8, device="cuda", requires_grad=True)
    found = []
    for dtype in (torch.float32, torch.float64):  # with kernels, and without
        y = layer.to(dtype)(x.to(dtype)).square().sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), layer.experts.w1)[0].double())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def _ranks(parallel: dict[str, Any], want: Trained, **place: Any) -> None:
    launch(Task(), parallel, gradient_accumulation=2)
    compare(train(Task(), "cuda"), want)
    assert gpc.mesh.device_type == "cuda"


@pytest.mark.parametrize(
    "parallel", [{"moe": 2}, {"moe": 2, "tensor": {"size": 2, "mode": "1d"}}], ids=["ep2", "ep2-tp2"]
)
def test_ranks_that_share_the_gpu(parallel: dict[str, Any]) -> None:
    ranks = 4 if "tensor" in parallel else 2
    spawn(partial(_ranks, parallel, serial(Task())), ranks)
