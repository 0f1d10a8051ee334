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
