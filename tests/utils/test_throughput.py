"""Counted operations, and the rates that follow from them."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from colossalai.utils import Throughput, checkpoint, count_operations
from colossalai.utils import throughput as module
from colossalai.utils.throughput import OperationCounter, peak_tflops

BATCH, WIDTH = 6, 8
PRODUCT = 2 * BATCH * WIDTH * WIDTH  # of a layer's forward pass


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def step(model: nn.Module, recompute: bool | None = None) -> None:
    x = torch.ones(BATCH, WIDTH, requires_grad=True)
    y = model(x) if recompute is None else checkpoint(model, False, x, use_reentrant=recompute)
    y.sum().backward()


@pytest.mark.parametrize("recompute", [None, True, False])
def test_forward_and_backward_are_counted_and_recomputation_is_not(recompute: bool | None) -> None:
    assert count_operations(step, mlp(), recompute) == 3 * 2 * PRODUCT
    with torch.no_grad():
        assert count_operations(mlp(), torch.ones(BATCH, WIDTH)) == 2 * PRODUCT


def test_attention_is_counted() -> None:
    q, k, v = torch.randn(3, 1, 2, 4, 8, requires_grad=True).unbind()
    products = 2 * (2 * 2 * 4 * 4 * 8)  # two for each of two heads

    def attend() -> None:
        F.scaled_dot_product_attention(q, k, v).sum().backward()

    assert count_operations(attend) == 3 * products


def test_products_of_groups_are_counted() -> None:
    rows, weights = torch.randn(16, 8, requires_grad=True), torch.randn(4, 8, 8, requires_grad=True)
    ends = torch.tensor([4, 4, 12, 16], dtype=torch.int32)

    def multiply() -> None:
        torch._grouped_mm(rows.bfloat16(), weights.bfloat16(), offs=ends).square().sum().backward()

    assert count_operations(multiply) == 3 * 2 * 16 * 8 * 8


def test_a_compiled_model_is_counted_and_compiled_afterwards() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = torch.compile(mlp(), backend=backend)
    assert count_operations(step, model) == 3 * 2 * PRODUCT
    assert not graphs
    step(model)
    assert graphs


def test_counting_ends_when_the_block_fails() -> None:
    with pytest.raises(ZeroDivisionError), OperationCounter() as counter:
        raise ZeroDivisionError
    step(mlp())
    assert counter.operations == 0


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA L40S", 362),
        ("Some GPU 4000", None),
    ],
)
def test_peaks(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


def test_rates_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module, "peak_tflops", lambda: 1e-9)
    model, measured = mlp(), Throughput()
    for seconds, tokens in ((100.0, 12), (2.0, 12), (2.0, 24)):  # the first is counted
        with measured.step(samples=BATCH, tokens=tokens):
            step(model)
            now[0] += seconds
    assert measured.operations == 6 * PRODUCT
    assert (measured.samples_per_second, measured.tokens_per_second) == (3.0, 9.0)
    assert measured.tflops == pytest.approx(3 * 6 * PRODUCT / 4e12)
    assert measured.mfu == pytest.approx(measured.tflops / 1e-9)
    assert re.fullmatch(r"3 samples/s, 9 tokens/s, 3\.456e-09 Tflops, MFU 345\.6%", str(measured))
    with pytest.raises(ValueError, match=r"at least the first step out, .* got ignored_steps=0"):
        Throughput(ignored_steps=0)


def test_attention_with_fewer_heads_of_keys() -> None:
    q, k = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16)
    with OperationCounter() as counter:
        torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    assert counter.operations == 2 * (2 * 4 * 8 * 8 * 16) * 2
