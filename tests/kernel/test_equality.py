"""Every implementation of a kernel against plain PyTorch, on tensors of awkward sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from colossalai.kernel import _compat, implementations
from colossalai.kernel.native import adam as native
from colossalai.kernel.optimizer import adam, lamb, lars, sgd, split
from colossalai.kernel.optimizer.lists import Lists, covers_its_memory

SIZES = (1, 7, 1000, 40_000, 70_001)
SHAPES = [(size,) for size in SIZES] + [(0,), (), (3, 5)]
# name -> lists of tensors besides weights, grads and halves
STATES = {"adam": ("exp_avgs", "exp_avg_sqs"), "lamb": ("exp_avgs", "exp_avg_sqs"), "lars": ("buffers",)}


def make(kind: type[Lists], names: tuple[str, ...], grad: torch.dtype, half: bool, device: str) -> Any:
    generator = torch.Generator().manual_seed(3)

    def some() -> list[Tensor]:
        return [torch.randn(shape, generator=generator).abs_().to(device) for shape in SHAPES]

    weights, grads = some(), some()
    weights[2].zero_()
    return kind(
        weights=weights,
        grads=[g.sub_(1).to(grad) for g in grads],
        halves=[w.to(grad) for w in weights] if half else [],
        **{name: some() for name in names},
    )


def run_adam(way: str, grad: torch.dtype, half: bool, device: str, decoupled: bool) -> Any:
    lists = make(adam.AdamLists, STATES["adam"], grad, half, device)
    options = adam.AdamOptions(
        lr=0.01,
        beta1=0.9,
        beta2=0.99,
        eps=1e-8,
        weight_decay=0.1,
        decoupled=decoupled,
        bias_correction=decoupled,
        div_scale=2.0 if decoupled else -1.0,
    )
    adam.ADAM[way](lists, 3, options)
    return lists


def run_adam_with_tails(way: str, device: str) -> Any:
    lists = make(adam.AdamLists, STATES["adam"], torch.bfloat16, True, device)
    lists.tails = [torch.empty_like(h, dtype=torch.int16) for h in lists.halves]
    for w, h, tail in zip(lists.weights, lists.halves, lists.tails, strict=True):
        split.split_(w, h, tail)
    lists.weights, lists.halves = lists.halves, []
    options = adam.AdamOptions(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)
    adam.ADAM[way](lists, 3, options)
    return lists


def compare_with_tails(way: str, device: str) -> None:
    """Adam on weights in two halves against Adam on the same weights in one."""
    found = run_adam_with_tails(way, device)
    plain = make(adam.AdamLists, STATES["adam"], torch.bfloat16, True, device)
    options = adam.AdamOptions(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)
    adam.adam_foreach_(plain, 3, options)
    whole = [split.join(w, tail) for w, tail in zip(found.weights, found.tails, strict=True)]
    torch.testing.assert_close(whole, plain.weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.exp_avg_sqs, plain.exp_avg_sqs, rtol=1e-5, atol=1e-6)


def run_lamb(way: str, grad: torch.dtype, half: bool, device: str, decoupled: bool) -> Any:
    lists = make(lamb.LambLists, STATES["lamb"], grad, half, device)
    options = lamb.LambOptions(
        lr=0.01,
        beta1=0.9,
        beta2=0.99,
        eps=1e-6,
        weight_decay=0.1,
        decoupled=decoupled,
        bias_correction=decoupled,
        averaging=decoupled,
        adaptive=True,
    )
    lamb.LAMB[way](lists, 3, options, torch.tensor(2.0, device=device) if decoupled else None)
    return lists


def run_lars(way: str, grad: torch.dtype, half: bool, device: str, decoupled: bool) -> Any:
    lists = make(lars.LarsLists, STATES["lars"] if decoupled else (), grad, half, device)
    options = lars.LarsOptions(lr=0.1, momentum=0.9 * decoupled, eeta=0.1, weight_decay=0.1, epsilon=0.01)
    lars.LARS[way](lists, lars.rates(lists, options), options)
    return lists


RUNS: dict[str, Callable[..., Any]] = {"adam": run_adam, "lamb": run_lamb, "lars": run_lars}


def compare(name: str, way: str, grad: torch.dtype, half: bool, device: str) -> None:
    for decoupled in (True, False):
        found = RUNS[name](way, grad, half, device, decoupled)
        plain = RUNS[name]("foreach", grad, half, device, decoupled)
        for column in ("weights", "halves", *STATES[name]):
            a, b = getattr(found, column), getattr(plain, column)
            if column == "halves":  # float32 sums of another order may round to the neighbour
                torch.testing.assert_close(a, b, rtol=8e-3, atol=1e-5)
                # Triton's interpreter cuts bfloat16 off instead of rounding it; a GPU rounds
                if half and not (grad == torch.bfloat16 and os.environ.get("TRITON_INTERPRET")):
                    torch.testing.assert_close(a, [w.to(grad) for w in found.weights], rtol=0, atol=0)
            else:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def compare_all(device: str) -> None:
    """Triton against plain PyTorch; run on a GPU, or by Triton's interpreter."""
    for name in RUNS:
        for grad, half in ((torch.bfloat16, True), (torch.float16, True), (torch.float32, False)):
            compare(name, "triton", grad, half, device)
        compare(name, "triton", torch.bfloat16, False, device)
    compare_with_tails("triton", device)


@pytest.mark.parametrize("way", ["foreach", "blocks", "native"])
def test_adam_with_tails(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "BLOCK", 1024)
    monkeypatch.setattr(native, "LEAST", 1024)
    compare_with_tails(way, "cpu")


@pytest.mark.parametrize(
    ("grad", "half"), [(torch.bfloat16, True), (torch.float16, True), (torch.bfloat16, False)]
)
@pytest.mark.parametrize("way", ["blocks", "native"])
def test_adam_in_blocks(way: str, grad: torch.dtype, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "BLOCK", 1024)
    monkeypatch.setattr(native, "LEAST", 1024)
    compare("adam", way, grad, half, "cpu")


def test_adam_fused() -> None:
    compare("adam", "fused", torch.float32, False, "cpu")


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("first", [True, False])
def test_sgd_fused(momentum: float, first: bool) -> None:
    found = []
    for way in ("fused", "foreach"):
        lists = make(sgd.SgdLists, ("buffers",) if momentum else (), torch.bfloat16, True, "cpu")
        lists.is_first = first
        options = sgd.SgdOptions(
            lr=0.1,
            momentum=momentum,
            dampening=0.0,
            weight_decay=0.1,
            nesterov=bool(momentum),
            decay_after_momentum=first,
        )
        sgd.SGD[way](lists, options)
        found.append(lists.weights + lists.buffers + lists.halves)
    torch.testing.assert_close(*found)


@pytest.mark.gpu
def test_triton_on_the_gpu() -> None:
    compare_all("cuda")


@pytest.mark.gpu
def test_fused_on_the_gpu() -> None:
    compare("adam", "fused", torch.float32, False, "cuda")


@pytest.mark.gpu
def test_tensors_that_are_not_aligned() -> None:
    found, plain = run_unaligned("triton", "cuda"), run_unaligned("foreach", "cuda")
    torch.testing.assert_close(found.weights, plain.weights, rtol=1e-5, atol=1e-6)


def run_unaligned(way: str, device: str) -> Any:
    lists = make(adam.AdamLists, STATES["adam"], torch.bfloat16, True, device)
    for column in ("weights", "grads", "halves", "exp_avgs"):
        moved = [torch.cat([t.new_zeros(1), t.reshape(-1)])[1:] for t in getattr(lists, column)]
        setattr(lists, column, moved)
    lists.exp_avg_sqs = [t.reshape(-1) for t in lists.exp_avg_sqs]
    options = adam.AdamOptions(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)
    adam.ADAM[way](lists, 3, options)
    return lists


def test_triton_in_its_interpreter() -> None:
    """The kernels' arithmetic without a GPU, where Triton is installed; in a process of its own, as it
    changes Triton.
    """
    pytest.importorskip("triton", reason="pip install triton")
    code = "from tests.kernel.test_equality import *; compare_all('cpu'); run_unaligned('triton', 'cpu')"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not know this numpy: pip install 'numpy<2.4'")
    assert done.returncode == 0, done.stderr[-3000:]


def test_nothing_is_imported_before_it_is_used() -> None:
    code = "import sys, colossalai.nn.optimizer, colossalai.kernel; assert 'triton' not in sys.modules"
    # torch may import Triton by itself; then there is nothing to see
    subprocess.run(
        [sys.executable, "-c", f"import torch, sys\nif 'triton' not in sys.modules: exec({code!r})"],
        check=True,
    )


def test_the_table_names_an_implementation_of_each_kernel() -> None:
    table = implementations()
    assert {"Adam", "Adam, half-precision weights", "SGD", "LAMB", "LARS"} <= table.keys()
    own = "triton" if torch.cuda.is_available() else "foreach"
    assert table["LAMB"] == own


def test_a_torch_without_a_function_is_refused_by_name() -> None:
    with pytest.raises(
        ImportError, match=r"has no torch\._fused_nothing_, which the optimizers of colossalai call"
    ):
        _compat.find("_fused_nothing_")


def test_which_way_is_chosen() -> None:
    def lists(dtype: torch.dtype, weights: Tensor | None = None) -> adam.AdamLists:
        w = torch.ones(4, 4) if weights is None else weights
        return adam.AdamLists(weights=[w], grads=[w.to(dtype)], exp_avgs=[w.clone()], exp_avg_sqs=[w.clone()])

    assert adam.choose(lists(torch.float32)) == "fused"
    assert adam.choose(lists(torch.bfloat16)) == "native"
    assert adam.choose(lists(torch.float32, torch.ones(4, 8)[:, ::2])) == "foreach"
    assert adam.choose(lists(torch.float32, torch.ones(4, 4).t())) == "fused"
    assert adam.choose(lists(torch.bfloat16, torch.ones(4, 4, dtype=torch.float64))) == "foreach"


def test_portions_are_the_whole() -> None:
    lists = make(lars.LarsLists, ("buffers",), torch.bfloat16, True, "cpu")
    options = lars.LarsOptions(lr=0.1, momentum=0.9, eeta=0.1, weight_decay=0.1, epsilon=0.01)
    plain = run_lars("foreach", torch.bfloat16, True, "cpu", True)
    assert [len(part.weights) for part in lists.portions()] == [6, 1, 1]
    lars.lars_(lists, options)
    for column in ("weights", "halves", "buffers"):
        torch.testing.assert_close(getattr(lists, column), getattr(plain, column))


def test_dense_memory() -> None:
    image = torch.ones(2, 3, 4, 5)
    assert covers_its_memory(image.to(memory_format=torch.channels_last))
    assert covers_its_memory(image.permute(3, 1, 0, 2))
    assert not covers_its_memory(image[:, 1:])
    assert not covers_its_memory(torch.ones(1).expand(3))


def test_a_float_is_its_two_halves() -> None:
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0))
    value = bits.to(torch.int32).view(torch.float32)
    value = value[value.isfinite() & (value.abs() < 3e38)]
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 0.0, -0.0])
    value = torch.cat([value, ties])
    half, tail = torch.empty_like(value, dtype=torch.bfloat16), torch.empty_like(value, dtype=torch.int16)
    split.split_(value, half, tail)
    assert torch.equal(split.join(half, tail).view(torch.int32), value.view(torch.int32))
    even = value.bfloat16()
    assert ((half == even) | ((half.float() - value).abs() == (even.float() - value).abs())).all()
    assert torch.equal(split.tail_of(value, half), tail)
    # a half that was rounded to even is at most the last bit of its value away
    rounded = split.join(even, split.tail_of(value, even)).view(torch.int32).long()
    assert ((rounded - value.view(torch.int32).long()).abs() <= 1).all()


def test_a_tail_of_another_value_is_none() -> None:
    assert split.tail_of(torch.tensor([1.0, 5.0]), torch.tensor([1.5, 5.0]).bfloat16()).tolist() == [0, 0]
    assert split.tail_of(torch.tensor([1.0001]), torch.tensor([1.0]).bfloat16()).item() > 0
