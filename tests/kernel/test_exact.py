"""Exact operations are right, and the same for a row alone and among others; what has none is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossalai.kernel import exact
from colossalai.kernel.exact_mode import exact_operations, is_exact

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "columns", "inner"), [(1, 33, 64), (7, 70, 37), (64, 20, 1500)])
def test_a_product_is_right_and_each_row_is_as_if_alone(
    rows: int, columns: int, inner: int, device: str
) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, rows, inner, device=device), torch.randn(2, columns, inner, device=device).mT
    bias = torch.randn(columns, device=device)
    found = exact.product(a, b, bias)
    truth = a.double() @ b.double() + bias
    torch.testing.assert_close(found.double(), truth, atol=1e-4, rtol=1e-5)
    alone = torch.cat([exact.product(a[:, i : i + 1], b, bias) for i in range(rows)], 1)
    assert torch.equal(found, alone)
    assert torch.equal(found, exact.product(a, b.contiguous(), bias))  # whatever lies in memory how


def test_without_a_compiler_products_are_computed_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colossalai.kernel.native.exact.works", lambda: False)
    test_a_product_is_right_and_each_row_is_as_if_alone(7, 70, 37, "cpu")


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, torch.linspace(-1, 1, 50 * 37).view(50, 37).to(x)),
    "matmul": lambda x: x @ torch.linspace(-1, 1, 37 * 3).view(37, 3).to(x),
    "layer_norm": lambda x: F.layer_norm(x, (37,)),
    "rms_norm": lambda x: F.rms_norm(x, (37,), eps=1e-6),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "mean": lambda x: x.pow(2).mean(-1),
    "var": lambda x: x.var(-1),
    "norm": lambda x: x.norm(dim=-1),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "exp_": lambda x: x.clone().exp_(),
    "sin": torch.sin,
    "add": lambda x: torch.add(x, x.flip(-1), alpha=0.3),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(ROWS))
def test_a_row_is_as_if_alone(name: str, device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(1003, 37, device=device)
    with exact_operations():
        whole = ROWS[name](x)
        for first, last in ((0, 1), (5, 6), (1002, 1003), (3, 700)):
            assert torch.equal(ROWS[name](x[first:last]), whole[first:last])
    torch.testing.assert_close(whole, ROWS[name](x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["causal", "boolean mask", "added mask", "all", "narrow values"])
def test_attention_is_torchs_and_each_row_is_as_if_alone(how: str, device: str) -> None:
    torch.manual_seed(0)
    query = torch.randn(3, 4, 19, 32, device=device, requires_grad=True)
    widths = (32, 12 if how == "narrow values" else 32)
    key, value = (torch.randn(3, 2, 19, width, device=device, requires_grad=True) for width in widths)
    lower = torch.ones(19, 19, dtype=torch.bool, device=device).tril()
    mask = {"boolean mask": lower, "added mask": torch.randn(3, 1, 19, 19, device=device)}.get(how)

    def attend(rows: slice) -> Tensor:
        own = mask[rows] if mask is not None and mask.dim() == 4 else mask
        return F.scaled_dot_product_attention(
            query[rows], key[rows], value[rows], attn_mask=own, is_causal=how == "causal", enable_gqa=True
        )

    with exact_operations():
        whole = attend(slice(None))
        assert torch.equal(attend(slice(1, 2)), whole[1:2])
    plain = attend(slice(None))
    torch.testing.assert_close(whole, plain, atol=1e-4, rtol=1e-4)
    for leaf in (query, key, value):
        ours, theirs = (
            torch.autograd.grad(out.square().sum(), leaf, retain_graph=True)[0] for out in (whole, plain)
        )
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_gradients_of_exact_results_are_right() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 11), nn.GELU(), nn.LayerNorm(11), nn.Linear(11, 5))
    x, grads = torch.randn(4, 7), []
    for mode in (True, False):
        model.zero_grad()
        if mode:
            with exact_operations():
                F.cross_entropy(model(x), torch.arange(4)).backward()
        else:
            F.cross_entropy(model(x), torch.arange(4)).backward()
        grads.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_has_no_exact_form_is_refused_by_name() -> None:
    convolution, q = nn.Conv1d(2, 3, 2), torch.randn(1, 2, 5, 8)
    with exact_operations():
        assert is_exact()
        with pytest.raises(NotImplementedError, match="convolution"):
            convolution(q[0, :, :, 0])
        with pytest.raises(NotImplementedError, match="dropout"):
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    assert not is_exact()


def run_in_triton() -> None:
    """The kernels for a GPU, on tensors of the CPU."""
    from contextlib import nullcontext

    from colossalai.kernel import block_sums, triton_block_sums, triton_exact, triton_rows

    torch.cuda.device = lambda _: nullcontext()
    triton_exact.CHUNK = 128
    torch.manual_seed(0)
    for rows, columns, inner in ((3, 70, 300), (150, 70, 300), (64, 33, 128)):
        a, b = torch.randn(2, rows, inner), torch.randn(2, columns, inner).mT
        bias = torch.randn(columns)
        truth = a.double() @ b.double() + bias
        torch.testing.assert_close(triton_exact.product(a, b, bias).double(), truth, atol=1e-4, rtol=1e-5)
    x, w = torch.randn(5, 3000), torch.randn(3000)
    torch.testing.assert_close(triton_exact.over_rows(x, "sum"), x.sum(-1), atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(triton_exact.over_rows(x, "softmax"), x.softmax(-1))
    torch.testing.assert_close(triton_exact.over_rows(x, "log_softmax"), x.log_softmax(-1))
    for centered, truth in ((True, F.layer_norm(x, (3000,), w, w)), (False, F.rms_norm(x, (3000,), w, 1e-5))):
        every = torch.stack([w, w], 1)[:, 0]  # with gaps
        found, *_ = triton_exact.normalize(x, every, every if centered else None, 1e-5, centered, 3000)
        torch.testing.assert_close(found, truth, atol=1e-4, rtol=1e-4)
    values, old = (torch.randn(2, 3, 8, 20).mT for _ in range(2))
    out = torch.empty_like(values)  # like them, with gaps in a row
    triton_block_sums.add_blocks([block_sums.Block(0, values)], old, out, None)
    torch.testing.assert_close(out, values + old)
    weight, bias = torch.randn(70, 300), torch.randn(70)
    row, weights, biases = x[:1, :300].contiguous(), weight.split([33, 20, 17]), bias.split([33, 20, 17])
    truth = F.linear(row, weight, bias)
    for first in range(3):
        found = triton_rows.one_row(row, weights[first:], biases[first:])
        assert [r.size(1) for r in found] == [33, 20, 17][first:]
        torch.testing.assert_close(
            torch.cat(found, 1), truth[:, -len(torch.cat(weights[first:])) :], atol=1e-3, rtol=1e-4
        )


def test_triton_in_its_interpreter() -> None:
    pytest.importorskip("triton", reason="pip install triton")
    code = "from tests.kernel.test_exact import run_in_triton; run_in_triton()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not know this numpy: pip install 'numpy<2.4'")
    assert done.returncode == 0, done.stderr[-3000:]
