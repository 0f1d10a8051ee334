"""Accuracy of a classifier, whether its scores are whole on this rank or cut."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from colossalai.mesh import Mesh, collectives, local_range, replicated
from colossalai.nn.layer.base import FOLLOW_CONFIG, resolve
from colossalai.nn.logits import Logits, LogitsFinder
from colossalai.nn.loss.cross_entropy import local_rows
from colossalai.nn.modes import TensorParallel
from colossalai.nn.sequence import current_sequence


def calc_acc(logits: Tensor, targets: Tensor) -> Tensor:
    """How many rows of ``logits`` have their largest score at the class in ``targets``."""
    _check_shapes(logits, targets)
    return (logits.argmax(dim=-1) == targets).sum()


def _check_shapes(logits: Tensor, targets: Tensor) -> None:
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"accuracy needs scores of shape (*targets, classes); got scores {tuple(logits.shape)} for"
            f" targets {tuple(targets.shape)}"
        )


class Accuracy(nn.Module):
    """The number of correct predictions in a batch; the trainer divides by the number of labels.

    Where the rows or the classes of ``logits`` are cut, or the sequences of the launched job, every rank gets
    the number for the whole batch of the model, whose labels ``targets`` are.

    ``num_classes`` and ``vocab_parallel`` are those of ``CrossEntropyLoss``.
    """

    mode: ClassVar[str | None] = FOLLOW_CONFIG
    own_cut: ClassVar[bool | None] = None
    """Whether scores that no Classifier made are cut along the classes."""

    def __init__(
        self,
        *,
        num_classes: int | None = None,
        vocab_parallel: bool | None = None,
        tp: TensorParallel | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__()
        self.tp, self.mesh = resolve(self, self.mode, tp, mesh)
        self.sequence = current_sequence() if tp is None and self.mode is not None else None
        self._finder = None
        if self.mesh is not None and self.tp.size > 1:
            own_cut, who = self.own_cut if vocab_parallel is None else vocab_parallel, type(self).__name__
            self._finder = LogitsFinder(who, self.tp, self.mesh, vocab_parallel, num_classes, own_cut, True)

    @torch.no_grad()
    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        mesh, sequence = self.mesh, self.sequence
        if mesh is None or (self._finder is None and sequence is None):
            return calc_acc(logits, targets)
        place = Logits(replicated(logits.ndim), logits.size(-1))
        if self._finder is not None:
            place = self._finder.find(logits, targets)
        # what a sequence is padded with has a label that no class has
        rows = local_rows(logits, targets, place.layout, mesh, sequence, ignore_index=-1)
        correct = (_predictions(logits, place, mesh) == rows).sum()
        cut = () if sequence is None or rows.shape[1:] == targets.shape[1:] else sequence.axes
        for axis in (*place.layout.dims[0], *cut):
            correct = collectives.all_reduce(correct, mesh, axis)
        return correct


def _predictions(logits: Tensor, place: Logits, mesh: Mesh) -> Tensor:
    """The class of the largest score of each row; of equal ones the first, as torch's argmax."""
    axes = place.layout.dims[-1]
    best, index = logits.max(dim=-1)
    index = index + local_range(place.classes, axes, mesh, uneven=True)[0]
    for axis in reversed(axes):
        bests = collectives.all_gather(best.unsqueeze(-1), mesh, axis, best.ndim)
        indices = collectives.all_gather(index.unsqueeze(-1), mesh, axis, index.ndim)
        best, winner = bests.max(dim=-1)
        index = indices.gather(-1, winner.unsqueeze(-1)).squeeze(-1)
    return index


class Accuracy2D(Accuracy):
    """2D; scores of your own are whole along the classes."""

    mode = "2d"
    own_cut = False


class Accuracy2p5D(Accuracy):
    """2.5D; scores of your own are whole along the classes."""

    mode = "2.5d"
    own_cut = False


class Accuracy3D(Accuracy):
    """3D; scores of your own are whole along the classes."""

    mode = "3d"
    own_cut = False
