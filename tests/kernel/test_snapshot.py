"""What an update keeps of what was before: copies that the kernel makes, or that are made before it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from colossalai.kernel.native import adam as native
from colossalai.kernel.optimizer import adam
from colossalai.kernel.optimizer.snapshot import TensorSnapshot, aligned
from colossalai.nn.optimizer import HybridAdam

OPTIONS = adam.AdamOptions(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)
KINDS = ["f32", "bf16", "f16", "split"]
CASES = [
    *((kind, way) for kind in KINDS for way in ("native", "foreach")),
    *((kind, "blocks") for kind in KINDS[1:]),  # for two dtypes
    ("f32", "fused"),  # for one
]
SIZES = [(3,), (4096,), (4097, 3), (130, 257)]  # uneven beside the parts of the kernel in C


def lists(kind: str) -> adam.AdamLists:
    torch.manual_seed(0)
    weights = [torch.randn(size) for size in SIZES]
    found = adam.AdamLists(
        weights=weights,
        grads=[torch.randn(size) for size in SIZES],
        exp_avgs=[torch.randn(size) for size in SIZES],
        exp_avg_sqs=[torch.rand(size) for size in SIZES],
    )
    if kind == "f32":
        return found
    dtype = torch.float16 if kind == "f16" else torch.bfloat16
    halves, grads = [w.to(dtype) for w in weights], [g.to(dtype) for g in found.grads]
    if kind == "split":
        tails = [torch.randint(-(2**15), 2**15, size, dtype=torch.int16) for size in SIZES]
        return replace(found, weights=halves, grads=grads, tails=tails)
    return replace(found, halves=halves, grads=grads)


def tensors(some: adam.AdamLists) -> list[Tensor]:
    return [tensor for column in some.changed for tensor in column]


def buffer_for(some: list[Tensor], offset: int = 0) -> Tensor:
    return torch.full((sum(aligned(t.nbytes) for t in some) + offset,), 7, dtype=torch.uint8)[offset:]


@pytest.mark.parametrize(("kind", "way"), CASES)
@pytest.mark.parametrize("offset", [0, 1 << 2])  # also where nothing is aligned
def test_an_update_and_back(kind: str, way: str, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "choose", lambda lists: way)
    monkeypatch.setattr(native, "LEAST", 1 << 13)  # several blocks
    plain, some = lists(kind), lists(kind)
    before = [tensor.clone() for tensor in tensors(some)]
    kept = TensorSnapshot(buffer_for(before, offset), tensors(some))
    adam.adam_(plain, 3, OPTIONS)
    adam.adam_(some, 3, OPTIONS, kept)
    for one, other in zip(tensors(plain), tensors(some), strict=True):
        assert torch.equal(one, other)  # to keep changes nothing
    assert not any(map(torch.equal, tensors(some), before))
    kept.restore()
    for tensor, was in zip(tensors(some), before, strict=True):
        assert torch.equal(tensor, was)


@pytest.mark.parametrize("way", ["native", "foreach"])
def test_tensors_with_other_strides(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "choose", lambda lists: way)
    columns = {
        "weights": torch.randn,
        "grads": torch.randn,
        "exp_avgs": torch.randn,
        "exp_avg_sqs": torch.rand,
    }
    some = adam.AdamLists(**{name: [make(70, 90).t()] for name, make in columns.items()})
    before = [tensor.clone() for tensor in tensors(some)]
    kept = TensorSnapshot(buffer_for(before), tensors(some))
    adam.adam_(some, 1, OPTIONS, kept)
    kept.restore()
    for tensor, was in zip(tensors(some), before, strict=True):
        assert torch.equal(tensor, was)


def test_nothing_is_written_back_that_was_not_copied() -> None:
    """As when an update fails before it has begun."""
    copied, other = torch.ones(5), torch.ones(5)
    kept = TensorSnapshot(buffer_for([copied, other]), [copied, other])
    kept.copy([copied])
    copied.fill_(2)
    other.fill_(2)
    kept.restore()
    assert copied.eq(1).all()
    assert other.eq(2).all()


def test_what_the_update_makes_itself_is_not_kept() -> None:
    known, new = torch.ones(5), torch.ones(5)
    kept = TensorSnapshot(buffer_for([known]), [known])
    places = kept.places([new, known])
    assert places[0] is None
    assert places[1] is not None
    kept.copy([new])


def test_steps_of_an_optimizer_keep_only_when_asked() -> None:
    parameter = torch.nn.Parameter(torch.randn(100, dtype=torch.bfloat16))
    optimizer = HybridAdam([parameter])
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter]
    held = [parameter, state["exp_avg"], state["exp_avg_sq"], state["tail"]]
    before = [tensor.detach().clone() for tensor in held]
    kept = TensorSnapshot(buffer_for(before), held)
    optimizer.step_on([parameter], kept=kept)
    kept.restore()
    for tensor, was in zip(held, before, strict=True):
        assert torch.equal(tensor, was)
    optimizer.step()
    kept.restore()  # it has what was before the other step
    assert torch.equal(held[1], before[1])
