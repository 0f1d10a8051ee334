"""Cross entropy and accuracy of scores that are cut, in every mode, equal torch's; and the fused form the
derived one.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import colossalai.nn as col_nn
from colossalai.mesh import Layout, Mesh, collectives, local_range, redistribute, shard
from colossalai.nn.layer.classifier import VocabParallelClassifier, WholeClassifier
from colossalai.nn.logits import Logits, find_logits
from colossalai.nn.loss.cross_entropy import cross_entropy
from colossalai.nn.modes import TensorParallel, at_rank
from colossalai.testing import RankError, spawn
from tests.nn.layer.world import BATCH, HIDDEN, SEQUENCE, close, size, start

VOCAB, IGNORED = 37, 5


def derived(logits: Tensor, target: Tensor, place: Logits, mesh: Mesh, smoothing: float) -> Tensor:
    """The loss written with the movements of the core alone: autograd derives its gradient."""
    *rows, cut = place.layout.dims
    start_, length = local_range(place.classes, cut, mesh, uneven=True)
    peak = logits.detach().amax(-1, keepdim=True)
    for axis in cut:
        peak = collectives.all_reduce(peak, mesh, axis, dist.ReduceOp.MAX)
    logits = logits - peak
    valid = target != IGNORED
    index = torch.where(valid, target, 0) - start_
    inside = (index >= 0) & (index < length)
    picked = logits.gather(-1, index.clamp(0, length - 1).unsqueeze(-1)).squeeze(-1) * inside
    summed = Layout(tuple(rows), partial=frozenset(cut)), Layout(tuple(rows))
    total, picked, mean = (
        redistribute(t, *summed, mesh) for t in (logits.exp().sum(-1), picked, logits.sum(-1) / place.classes)
    )
    loss = ((total.log() - (1 - smoothing) * picked - smoothing * mean) * valid).sum()
    everyone = Layout((), partial=frozenset(rows[0])), Layout(())
    return redistribute(loss, *everyone, mesh) / redistribute(valid.sum().float(), *everyone, mesh)


def batch() -> tuple[Tensor, Tensor]:
    logits, target = 4 * torch.randn(BATCH, SEQUENCE, VOCAB), torch.randint(VOCAB, (BATCH, SEQUENCE))
    target[0, :3] = target[-1] = IGNORED  # ranks hold different numbers of valid rows
    return logits, target


def check_cross_entropy(tp: TensorParallel, mesh: Mesh) -> None:
    for kind in (VocabParallelClassifier, WholeClassifier):
        head = kind(HIDDEN, VOCAB, tp=tp, mesh=mesh)
        place = head.place()
        for smoothing in (0.0, 0.2):
            logits, target = batch()
            expected_x = logits.clone().requires_grad_()
            options = {"ignore_index": IGNORED, "label_smoothing": smoothing}
            expected = F.cross_entropy(expected_x.flatten(0, 1), target.flatten(), **options)
            (3 * expected).backward()
            grad = shard(expected_x.grad, place.layout, mesh, uneven=True)
            here = Layout(place.layout.dims[:-1])
            ours = col_nn.CrossEntropyLoss(**options, tp=tp, mesh=mesh, vocab_parallel=kind.vocab_parallel)
            for loss in (
                partial(ours, targets=target),
                partial(
                    derived, target=shard(target, here, mesh), place=place, mesh=mesh, smoothing=smoothing
                ),
            ):
                x = shard(logits, place.layout, mesh, uneven=True).requires_grad_()
                got = loss(x)
                (3 * got).backward()
                close(got.detach(), expected.detach(), "loss")
                close(x.grad, grad, "gradient of the scores")
            rows = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none", **options)
            got = cross_entropy(
                shard(logits, place.layout, mesh, uneven=True),
                shard(target, here, mesh),
                place,
                mesh,
                IGNORED,
                smoothing,
                "none",
            )
            close(got, shard(rows.view_as(target), here, mesh), "loss of each row")


def check_flat_and_bf16(tp: TensorParallel, mesh: Mesh) -> None:
    head = VocabParallelClassifier(HIDDEN, VOCAB, tp=tp, mesh=mesh)
    place = head.place()
    logits, target = batch()
    logits = logits.bfloat16()
    expected = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), ignore_index=IGNORED)
    x = shard(logits, place.layout, mesh, uneven=True).requires_grad_()
    loss = col_nn.CrossEntropyLoss(True, ignore_index=IGNORED, vocab_parallel=True, tp=tp, mesh=mesh)
    got = loss(x.flatten(0, 1), target.flatten())  # rows of a batch, as language models give them
    got.backward()
    close(got.detach(), expected, "loss of bf16 scores")
    assert x.grad.dtype == torch.bfloat16
    first = x.grad[0, :3]  # rows of other ranks are not the ignored ones
    if mesh.rank == 0:
        assert first.abs().max() == 0


def check_accuracy(tp: TensorParallel, mesh: Mesh) -> None:
    for kind in (VocabParallelClassifier, WholeClassifier):
        head = kind(HIDDEN, VOCAB, tp=tp, mesh=mesh)
        logits = torch.randint(4, (BATCH, VOCAB)).float()  # many equal scores: the first of them counts
        target = torch.where(torch.rand(BATCH) < 0.5, logits.argmax(-1), torch.randint(VOCAB, (BATCH,)))
        x = shard(logits, at_rank(head.logits, 2), mesh, uneven=True)
        expected = (logits.argmax(-1) == target).sum()
        assert 0 < expected < BATCH
        assert col_nn.Accuracy(tp=tp, mesh=mesh)(x, target) == expected


def _check(rank: int, world_size: int, port: int, name: str) -> None:
    tp, mesh = start(rank, world_size, port, name)
    check_accuracy(tp, mesh)
    check_cross_entropy(tp, mesh)
    check_flat_and_bf16(tp, mesh)


@pytest.mark.parametrize("name", ["1d", "1d-sequence", "2d", "2d-3x3", "2.5d", "3d", "dp-1d"])
def test_losses_equal_torch(name: str) -> None:
    spawn(_check, size(name), name=name)


def _refused(rank: int, world_size: int, port: int) -> None:
    tp, mesh = start(rank, world_size, port, "2d")
    loss = col_nn.CrossEntropyLoss(tp=tp, mesh=mesh)
    with pytest.raises(
        ValueError, match=r"no Classifier of this job makes scores .* holds 4 \(there are: none\)"
    ):
        loss(torch.zeros(2, 4), torch.zeros(4, dtype=torch.long))
    head = VocabParallelClassifier(HIDDEN, 8, tp=tp, mesh=mesh)
    with pytest.raises(ValueError, match=r"labels of shape \(3,\) do not fit scores of shape \(2, 4\)"):
        loss(torch.zeros(2, 4), torch.zeros(3, dtype=torch.long))
    with pytest.raises(
        ValueError, match=r"the label 8 is neither one of the 8 classes nor ignore_index=-100"
    ):
        loss(torch.zeros(2, 4), torch.full((4,), 8))
    with pytest.raises(ValueError, match="take class indices as labels and no class weights"):
        loss(torch.zeros(2, 4), torch.zeros(4, 8))
    other = WholeClassifier(HIDDEN, 4, tp=tp, mesh=mesh)
    with pytest.raises(ValueError, match="several Classifiers of this job make scores"):
        loss(torch.zeros(2, 4), torch.zeros(4, dtype=torch.long))
    assert find_logits(mesh, 4, cut=False) == other.place()
    assert find_logits(mesh, 4, classes=8) == head.place()
    del other
    assert find_logits(mesh, 4) == head.place()
    # 7 and 8 classes in two pieces: only the rank that holds 4 of them could confuse the two, but all ranks
    # refuse
    uneven = VocabParallelClassifier(HIDDEN, 7, tp=tp, mesh=mesh)
    with pytest.raises(
        ValueError, match="several Classifiers of this job make scores of which this rank holds"
    ):
        find_logits(mesh, (4, 3)[mesh.coord["col"]])
    del uneven
    with pytest.raises(ValueError, match="VocabParallelCrossEntropyLoss3D needs the tensor mode '3d'"):
        col_nn.VocabParallelCrossEntropyLoss3D(tp=tp, mesh=mesh)(torch.zeros(2, 4), torch.zeros(4))
    with pytest.raises(ValueError, match="Accuracy3D needs the tensor mode '3d'"):
        col_nn.Accuracy3D(tp=tp, mesh=mesh)(torch.zeros(2, 4), torch.zeros(4))


def test_what_a_loss_refuses() -> None:
    spawn(_refused, 4)


def _broken(rank: int, world_size: int, port: int) -> None:
    tp, mesh = start(rank, world_size, port, "2d")
    collectives.all_reduce = lambda x, *_: x  # as a careless change would
    check_cross_entropy(tp, mesh)


def test_the_check_catches_a_loss_without_its_sum() -> None:
    with pytest.raises(RankError, match="loss: differs"):
        spawn(_broken, 4)
