"""Cross entropy and accuracy of scores that are cut, in every mode, equal torch's; and the fused form the
derived one.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import colossalai
import colossalai.nn as col_nn
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.mesh import Layout, Mesh, collectives, local_range, redistribute, replicated, shard
from colossalai.nn.layer.classifier import VocabParallelClassifier, WholeClassifier
from colossalai.nn.logits import Logits
from colossalai.nn.loss.cross_entropy import cross_entropy, local_rows
from colossalai.nn.modes import TensorParallel, at_rank
from colossalai.nn.sequence import SequenceParallel
from colossalai.testing import RankError, fake_world, spawn
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


def test_flattened_pieces_of_sequences_are_refused() -> None:
    scores, labels = torch.zeros(2 * 6, 4), torch.zeros(2 * 11, dtype=torch.long)
    with fake_world(rank=0, world_size=2):
        sequence = SequenceParallel(Mesh({"sp": 2}), ring="sp")
        with pytest.raises(ValueError, match=r"\(batch, tokens, \.\.\.\), not flattened"):
            local_rows(scores, labels, replicated(2), sequence.mesh, sequence)


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
    here = {"tp": tp, "mesh": mesh}
    other = WholeClassifier(HIDDEN, 4, **here)
    with pytest.raises(ValueError, match="several Classifiers of this job make scores of which this rank"):
        loss(torch.zeros(2, 4), torch.zeros(4, dtype=torch.long))
    place = col_nn.CrossEntropyLoss(vocab_parallel=False, **here)._finder.find
    zeros, labels = torch.zeros(2, 4), torch.zeros(4, dtype=torch.long)
    assert place(zeros, labels) == other.place()
    assert col_nn.CrossEntropyLoss(num_classes=8, **here)._finder.find(zeros, labels) == head.place()
    del other
    assert loss._finder.find(zeros, labels) == head.place()
    # 7 and 8 classes in two pieces: only the rank that holds 4 of them could confuse the two
    uneven = VocabParallelClassifier(HIDDEN, 7, **here)
    for classifier, widths in ((uneven, (4, 3)), (head, (4, 4)), (uneven, (4, 3))):
        scores = torch.zeros(2, widths[mesh.coord["col"]])
        assert loss._finder.find(scores, labels) == classifier.place()
    del uneven, classifier
    with pytest.raises(ValueError, match="VocabParallelCrossEntropyLoss3D needs the tensor mode '3d'"):
        col_nn.VocabParallelCrossEntropyLoss3D(tp=tp, mesh=mesh)(torch.zeros(2, 4), torch.zeros(4))
    with pytest.raises(ValueError, match="Accuracy3D needs the tensor mode '3d'"):
        col_nn.Accuracy3D(tp=tp, mesh=mesh)(torch.zeros(2, 4), torch.zeros(4))


def test_what_a_loss_refuses() -> None:
    spawn(_refused, 4)


# ---- Scores that no Classifier made: a script's own product, cut with torch.chunk as the documents cut ----

P = ParallelMode
# tensor config, suffix, and the dims that the documents cut: for scores that are whole along the classes, and
# for those that are not
OWN = {
    "1d": ({"size": 2, "mode": "1d"}, "1D", [], [(-1, P.PARALLEL_1D)]),
    "1d-4": ({"size": 4, "mode": "1d"}, "1D", [], [(-1, P.PARALLEL_1D)]),
    "2d": ({"size": 4, "mode": "2d"}, "2D", [(0, P.PARALLEL_2D_COL)], [(-1, P.PARALLEL_2D_ROW)]),
    "2.5d": (
        {"size": 8, "mode": "2.5d", "depth": 2},
        "2p5D",
        [(0, P.PARALLEL_2P5D_DEP), (0, P.PARALLEL_2P5D_COL)],
        [(-1, P.PARALLEL_2P5D_ROW)],
    ),
    "3d": (
        {"size": 8, "mode": "3d"},
        "3D",
        [(0, P.PARALLEL_3D_WEIGHT), (0, P.PARALLEL_3D_INPUT)],
        # an expanding product leaves Y_ijl: rows by i and l, columns by j
        [(0, P.PARALLEL_3D_WEIGHT), (0, P.PARALLEL_3D_OUTPUT), (-1, P.PARALLEL_3D_INPUT)],
    ),
}


def chunk(x: Tensor, cuts: list[tuple[int, ParallelMode]]) -> Tensor:
    for dim, mode in cuts:
        x = torch.chunk(x, gpc.get_world_size(mode), dim=dim)[gpc.get_local_rank(mode)]
    return x


def _own_scores(rank: int, world_size: int, port: int, name: str) -> None:
    tensor, suffix, rows, classes = OWN[name]
    config = {"parallel": {"tensor": tensor}}
    colossalai.launch(config, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    torch.manual_seed(3)
    cut = classes if name == "3d" else rows + classes
    whole_loss = {"1D": partial(col_nn.CrossEntropyLoss, vocab_parallel=False)}.get(suffix)
    whole_loss = whole_loss or getattr(col_nn, f"CrossEntropyLoss{suffix}")
    cut_loss = getattr(col_nn, f"VocabParallelCrossEntropyLoss{suffix}")
    for number in (8, 9) if name == "2d" else (8,):
        for build, cuts in ((whole_loss, rows), (cut_loss, cut)):
            criterion = build()
            for shape in ((16,), (16, 3), (16,)):
                _own_loss(criterion, torch.randn(*shape, number), torch.randint(number, shape), cuts)
            _own_loss(build(True, ignore_index=2), torch.randn(16, number), torch.arange(16) % 4, cuts)
            _own_loss(build(False), torch.randn(16, number), torch.randint(number, (16,)), cuts)
    logits, targets = torch.randn(16, 8), torch.randint(8, (16,))
    right = (logits.argmax(-1) == targets).sum()
    accuracy = getattr(col_nn, f"Accuracy{suffix}", partial(col_nn.Accuracy, vocab_parallel=False))
    assert accuracy()(chunk(logits, rows), targets) == right
    assert col_nn.Accuracy(vocab_parallel=True)(chunk(logits, cut), targets) == right
    _own_refused(whole_loss, cut_loss, accuracy, rows, cut)


def _own_loss(criterion: nn.Module, logits: Tensor, targets: Tensor, cuts: list) -> None:
    expected_x = logits.clone().requires_grad_()
    each = F.cross_entropy(
        expected_x.flatten(0, -2),
        targets.flatten(),
        ignore_index=criterion.loss.ignore_index,
        reduction=criterion.loss.reduction,
    )
    expected = each if each.ndim == 0 else chunk(each, [c for c in cuts if c[0] == 0])
    each.sum().backward()
    x = chunk(logits, cuts).clone().requires_grad_()
    got = criterion(x, targets)
    got.sum().backward()
    close(got.detach(), expected.detach(), "loss")
    close(x.grad, chunk(expected_x.grad, cuts), "gradient of the scores")


def _own_refused(whole_loss, cut_loss, accuracy, rows: list, cut: list) -> None:
    """What cannot be right is refused by all ranks, before the loss communicates."""
    logits, targets = torch.randn(16, 8), torch.randint(8, (16,))
    with pytest.raises(ValueError, match=r"say how your own scores are cut: vocab_parallel=True if each"):
        col_nn.CrossEntropyLoss()(chunk(logits, rows), targets)
    with pytest.raises(ValueError, match=r"no Classifier .* holds .*give Accuracy what the model's"):
        col_nn.Accuracy()(chunk(logits, rows), targets)
    # cut scores for a loss of whole ones, whose rows lie elsewhere in 3D
    with pytest.raises(ValueError, match="but these ranks have different ones; give it what the model's"):
        whole_loss()(chunk(logits, cut), targets)
    with pytest.raises(ValueError, match="but these ranks have different ones; give it what the model's"):
        accuracy()(chunk(logits, cut), targets)
    with pytest.raises(
        ValueError, match=r": 5 classes as .* give the ranks \[.*but they have \[.*num_classes"
    ):
        cut_loss(num_classes=5)(chunk(logits, cut), targets)
    own = logits[..., : 4 + 2 * (gpc.get_global_rank() == 0)]
    with pytest.raises(ValueError, match=r"classes as .* give the ranks \[.*but they have \[6, 4"):
        cut_loss()(own, targets)
    with pytest.raises(ValueError, match="share a model and were given different labels"):
        cut_loss()(chunk(logits, cut), targets + (gpc.get_global_rank() == 0))
    if rows:
        with pytest.raises(ValueError, match="these ranks have the same scores and the same labels; cut the"):
            whole_loss()(logits, targets)
        with pytest.raises(ValueError, match="these ranks have the same scores and the same labels; cut the"):
            accuracy()(logits, targets)
    # all classes on every rank, for a loss of scores that are cut along them
    criterion = cut_loss()
    flat = criterion(torch.ones_like(chunk(logits, cut)), targets)  # a Linear of zeros: not to be told apart
    close(flat, torch.tensor(8.0).log(), "loss of flat scores")
    for cuts in ([c for c in cut if c[0] == 0], rows):  # as the loss has its rows, and as the model has
        with pytest.raises(
            ValueError, match=r"have the same scores; if each rank has all 8 classes, use the"
        ):
            criterion(chunk(logits, cuts), targets)
    assert cut_loss(num_classes=8)(chunk(logits, cut), targets).ndim == 0


@pytest.mark.parametrize("name", OWN)
def test_scores_that_a_script_made(name: str) -> None:
    spawn(_own_scores, OWN[name][0]["size"], name=name)


def _broken(rank: int, world_size: int, port: int) -> None:
    tp, mesh = start(rank, world_size, port, "2d")
    collectives.all_reduce = lambda x, *_: x  # as a careless change would
    check_cross_entropy(tp, mesh)


def test_the_check_catches_a_loss_without_its_sum() -> None:
    with pytest.raises(RankError, match="loss: differs"):
        spawn(_broken, 4)
