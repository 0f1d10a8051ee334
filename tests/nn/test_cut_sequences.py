"""Losses, metrics, dropout and generation where sequences are cut over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.nn import Accuracy, CrossEntropyLoss, Dropout, DropPath
from colossalai.nn.layer.dropout import plan_independent_dropout
from colossalai.nn.sequence import SequenceParallel, current_sequence
from colossalai.testing import spawn
from tests.titans.cut_sequences import build, launch
from titans.layer.basic import own_tokens
from titans.loss.lm_loss import GPTLMLoss
from titans.utils import generate

ROWS, LENGTH, CLASSES = 2, 7, 5


def sequence() -> SequenceParallel:
    found = current_sequence()
    assert found is not None
    return found


def whole_scores() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(ROWS, LENGTH, CLASSES, generator=generator)
    labels = torch.randint(CLASSES, (ROWS, LENGTH), generator=generator)
    labels[0, 2:6] = -100  # ranks have different numbers of labels
    return scores, labels


def mean_over_ranks(grad: Tensor) -> Tensor:
    grad = grad.clone()
    dist.all_reduce(grad, group=gpc.get_group(ParallelMode.SEQUENCE))
    return grad / sequence().size


def check_loss(expected: Tensor, gradient: Tensor, loss: CrossEntropyLoss, labels: Tensor) -> None:
    """Of scores that are cut where they are made, so that the mean over ranks is the gradient of all."""
    whole = whole_scores()[0].requires_grad_()
    found = loss(sequence().cut(whole), labels)
    found.sum().backward()
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert whole.grad is not None
    torch.testing.assert_close(mean_over_ranks(whole.grad), gradient)


def check_losses(rank: int, world_size: int, port: int, plan: dict[str, Any]) -> None:
    launch(plan)
    scores, labels = whole_scores()
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0])
    for options in ({}, {"label_smoothing": 0.1}, {"weight": weight}, {"ignore_index": 3}):
        wanted = labels.where(labels >= 0, options.get("ignore_index", -100))  # type: ignore[arg-type]
        for reduction in ("mean", "none"):
            x = scores.clone().requires_grad_()
            expected = F.cross_entropy(x.flatten(0, 1), wanted.flatten(), reduction=reduction, **options)
            expected.sum().backward()
            shape = () if reduction == "mean" else wanted.shape
            assert x.grad is not None
            loss = CrossEntropyLoss(reduction == "mean", **options)
            check_loss(expected.view(shape).detach(), x.grad, loss, wanted)
    ignored = torch.full_like(labels, -100)  # all: nothing is learnt, and nothing is lost
    check_loss(torch.tensor(torch.nan), torch.zeros_like(scores), CrossEntropyLoss(), ignored)
    pieces = sequence().cut(labels, value=-100)
    mean = F.cross_entropy(scores.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(CrossEntropyLoss()(sequence().cut(scores), pieces), mean)
    torch.testing.assert_close(CrossEntropyLoss()(scores, labels), mean)  # copies
    first, soft = scores[:, 0], scores[:, 1].softmax(-1)
    torch.testing.assert_close(CrossEntropyLoss()(first, soft), F.cross_entropy(first, soft))
    half = CrossEntropyLoss()(sequence().cut(scores.bfloat16()), labels)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), mean, rtol=1e-2, atol=1e-2)
    hits = (scores.argmax(-1) == labels).sum()
    assert Accuracy()(sequence().cut(scores), labels) == Accuracy()(scores, labels) == hits
    assert Accuracy()(first, labels[:, 0]) == (first.argmax(-1) == labels[:, 0]).sum()


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_losses_and_metrics_count_all_tokens(attention: str) -> None:
    spawn(check_losses, 2, plan={"sequence": {"size": 2, "attention": attention}})


def check_refusals(rank: int, world_size: int, port: int) -> None:
    launch({"sequence": {"size": 2, "attention": "ulysses"}})
    scores, labels = whole_scores()
    with pytest.raises(
        ValueError, match=r"labels of shape \(2, 9\) do not fit .* expected \(2, 8\) for the whole"
    ):
        CrossEntropyLoss()(sequence().cut(scores), labels.new_zeros(2, 9))
    with pytest.raises(ValueError, match=r"labels of 8 tokens do not fit sequences of 7, .* padded to 8"):
        CrossEntropyLoss()(sequence().cut(scores), labels.new_zeros(2, 8))
    CrossEntropyLoss()(sequence().cut(labels.new_zeros(2, 8, CLASSES).float()), labels.new_zeros(2, 8))
    with pytest.raises(ValueError, match="reduction=False gives the losses of a whole sequence"):
        CrossEntropyLoss(reduction=False)(sequence().cut(scores), sequence().cut(labels))
    with pytest.raises(ValueError, match="GPTLMLoss shifts the labels and needs those of the whole"):
        GPTLMLoss()(sequence().cut(scores), sequence().cut(labels, value=rank))
    model = build("gpt", LENGTH, num_heads=1)
    with pytest.raises(ValueError, match=r"cannot share 1 query heads among 2 ranks .* attention='ring'"):
        model(labels.clamp(min=0))
    model = build("gpt", LENGTH, attention_dropout=0.5)
    with plan_independent_dropout(3):
        with pytest.raises(ValueError, match=r"cannot draw alike for a sequence of 7 tokens, .* padded to 8"):
            model(labels.clamp(min=0))
        with pytest.raises(ValueError, match=r"attention_dropout=0.5 inside plan_independent_dropout"):
            model(labels.clamp(min=0)[:, :6])


def test_what_is_refused() -> None:
    spawn(check_refusals, 2)


def alike(x: Tensor, mode: ParallelMode) -> bool:
    parts = [torch.empty_like(x) for _ in range(gpc.get_world_size(mode))]
    dist.all_gather(parts, x.contiguous(), group=gpc.get_group(mode))
    return all(torch.equal(part, parts[0]) for part in parts)


def check_dropout(rank: int, world_size: int, port: int) -> None:
    serial = Dropout(0.5, at="hidden")
    launch({"sequence": 2, "tensor": {"size": 2, "mode": "1d"}})
    ones = torch.ones(2, 8, 4)
    here = Dropout(0.5, at="hidden")(ones)
    assert alike(here, ParallelMode.TENSOR)
    assert not alike(here, ParallelMode.SEQUENCE)
    between = Dropout(0.5, at="inner")(ones)
    assert not alike(between, ParallelMode.TENSOR)
    assert not alike(between, ParallelMode.SEQUENCE)
    assert alike(torch.rand(1), ParallelMode.GLOBAL), "the generator that all share stays in step"
    paths = DropPath(0.5)(torch.ones(16, 2))
    assert alike(paths, ParallelMode.SEQUENCE)
    with plan_independent_dropout(7):
        expected = serial(torch.ones(2, 16, 4))
    with plan_independent_dropout(7):
        found = Dropout(0.5, at="hidden")(own_tokens(torch.ones(2, 16, 4), sequence()))
    assert torch.equal(sequence().gather(found, 16), expected)
    gradients = [dropped_gradients(checkpoint) for checkpoint in (False, True, "selective")]
    for other in gradients[1:]:
        for one, two in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(one, two)


def dropped_gradients(checkpoint: bool | str) -> list[Tensor]:
    model = build("bert", 13, dropout=0.5, attention_dropout=0.5, checkpoint=checkpoint)
    torch.manual_seed(5)
    ids = torch.arange(26).view(2, 13)
    CrossEntropyLoss()(model(ids), ids).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_dropout_differs_where_tokens_or_features_do() -> None:
    spawn(check_dropout, 4)


def check_positions(rank: int, world_size: int, port: int) -> None:
    """A table of as many positions as there are tokens is enough, also where the length does not divide."""
    launch({"sequence": 2})
    for length in (1, 2, 5, 8):
        own = sequence().positions(length)
        assert own.max() < length
        assert torch.equal(own, sequence().cut(torch.arange(length), 0))
        assert torch.equal(sequence().gather(own[None], length)[0], torch.arange(length))
        marked = sequence().cut(torch.arange(length), 0, value=-1)
        assert torch.equal(sequence().positions(length, padding=-1), marked)


def test_positions_of_padding_are_in_the_table() -> None:
    spawn(check_positions, 2)


def check_generation(rank: int, world_size: int, port: int) -> None:
    start = torch.tensor([[3, 1, 4], [1, 5, 9]])
    expected = generate(build("gpt", 16), start, 6, temperature=0)  # type: ignore[arg-type]
    launch({"sequence": 2})
    assert torch.equal(generate(build("gpt", 16), start, 6, temperature=0), expected)  # type: ignore[arg-type]
    gpc.destroy()


def check_generation_in_pieces(rank: int, world_size: int, port: int) -> None:
    start = torch.tensor([[3, 1]])
    expected = generate(build("gpt", 16), start, 3, temperature=0)  # type: ignore[arg-type]
    launch({"tensor": {"size": 2, "mode": "1d"}})
    model: Any = build("gpt", 16)
    assert torch.equal(generate(model, start, 3, temperature=0), expected)
    with pytest.raises(ValueError, match=r"scores of all 2053 words .* tensor parallelism cuts them"):
        generate(model, torch.ones(1, 16, dtype=torch.long), 1)  # beyond the positions of the model


def test_generation() -> None:
    spawn(check_generation, 2)
    spawn(check_generation_in_pieces, 2)


def check_differing(rank: int, world_size: int, port: int, plan: dict[str, Any]) -> None:
    """Also behind the first step, and in the mode whose first step compares nothing."""
    launch(plan)
    ids = torch.arange(2 * LENGTH).view(2, LENGTH)
    model, mask = build("gpt", LENGTH), torch.ones_like(ids)
    with pytest.raises(ValueError, match=r"a sequence of shape \(2, 7\) with other values"):
        model(ids + rank)
    for _ in range(8):
        GPTLMLoss()(model(ids, mask), ids)
    words = "share one sequence and were given different batches: a "
    with pytest.raises(ValueError, match=rf"{words}sequence of torch.int64 and shape \(2, 7\) on one, a"):
        model(ids[:, rank:])  # which would be padded to the same length
    with pytest.raises(ValueError, match=rf"{words}sequence of .* and shape \(1, 7\) on the other"):
        model(ids[rank:])
    with pytest.raises(ValueError, match=rf"{words}mask of torch.bool .* a sequence of torch.int64"):
        model(ids, None if rank else mask)
    features = torch.ones(2, LENGTH, 4).log_()  # 0, and later infinite
    sequence().cut(features + rank * 1e-12)  # rounded in another way
    sequence().cut(features.fill_(torch.inf))


@pytest.mark.parametrize(
    "plan", [{"sequence": 2}, {"tensor": {"size": 2, "mode": "sequence"}}], ids=["sequence", "mode"]
)
def test_ranks_that_hold_different_sequences_are_refused(plan: dict[str, Any]) -> None:
    spawn(check_differing, 2, plan=plan)
