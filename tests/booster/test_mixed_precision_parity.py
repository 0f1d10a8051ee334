"""200 steps of a small GPT: every precision follows the loss of fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from colossalai.booster import Booster
from colossalai.booster.mixed_precision import BF16MixedPrecision, FP16ApexMixedPrecision, MixedPrecision
from colossalai.nn.optimizer import HybridAdam
from titans.loss.lm_loss import GPTLMLoss
from titans.model.gpt import GPT

STEPS = 200
# The largest distance of a loss from that of fp32, and of the mean loss of the last 50 steps: about three
# times the largest that was measured with four different initial weights.  With three times this learning
# rate training is chaotic, and any two roundings end up at different losses.
FP16, BF16 = (0.004, 0.0012), (0.011, 0.004)
TOLERANCES: dict[str, tuple[float, float]] = {
    "fp16": FP16,
    "fp16_naive": FP16,
    "fp16_apex O1": FP16,
    "fp16_apex O2": FP16,
    "bf16": BF16,
    "bf16 half weights": BF16,
    "bf16 half weights, our Adam": BF16,
}
PRECISIONS: dict[str, Callable[[], MixedPrecision]] = {
    "fp16_apex O1": lambda: FP16ApexMixedPrecision("O1"),
    "fp16_apex O2": lambda: FP16ApexMixedPrecision("O2"),
    "bf16 half weights": lambda: BF16MixedPrecision(half_weights=True),
    "bf16 half weights, our Adam": lambda: BF16MixedPrecision(half_weights=True),
}


def _tokens(step: int) -> Tensor:
    """Sequences that repeat with a random period: there is something to learn, and it takes more than a few
    steps.
    """
    generator = torch.Generator().manual_seed(step)
    word = torch.randint(32, (8, 4), generator=generator)
    return word.repeat(1, 4)


def _losses(name: str | None, device: str = "cpu") -> Tensor:
    torch.manual_seed(0)
    model = GPT(
        vocab_size=32,
        max_position_embeddings=16,
        hidden_size=32,
        num_heads=2,
        depth=2,
        dropout=0.0,
        embedding_dropout=0.0,
        attention_dropout=0.0,
    )
    made = PRECISIONS.get(name or "")
    adam = HybridAdam if name and "our Adam" in name else torch.optim.AdamW
    raw = adam(model.parameters(), lr=1e-3, weight_decay=0.01)
    booster = Booster(device=device, mixed_precision=made() if made else name)
    model, optimizer, criterion, *_ = booster.boost(model, raw, GPTLMLoss())  # type: ignore[assignment]
    losses = []
    for step in range(STEPS):
        tokens = _tokens(step).to(device)
        optimizer.zero_grad()
        loss = criterion(model(tokens), tokens)  # type: ignore[misc]
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        assert not getattr(optimizer, "step_was_skipped", False)
        losses.append(loss.detach().float().cpu())
    return torch.stack(losses)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The tensors are small: more threads wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def _reference(device: str) -> Tensor:
    return _losses(None, device)


def _check(name: str, device: str) -> None:
    losses = _losses(name, device)
    reference = _reference(device)
    assert reference[0] > 3.3  # nothing is known in the beginning, log(32) = 3.47,
    assert reference[-50:].mean() < 2.3  # and something in the end
    largest, mean = TOLERANCES[name]
    assert (losses - reference).abs().max() < largest
    assert (losses[-50:].mean() - reference[-50:].mean()).abs() < mean
    assert not torch.equal(losses, reference)


@pytest.mark.parametrize("name", TOLERANCES)
def test_the_loss_follows_fp32(name: str) -> None:
    _check(name, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", TOLERANCES)
def test_the_loss_follows_fp32_on_cuda(name: str) -> None:
    _check(name, "cuda")
