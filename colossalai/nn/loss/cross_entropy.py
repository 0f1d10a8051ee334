"""Cross entropy of scores that are whole, or cut over the ranks that share one model.

The mean is over all rows of the batch that this model sees: rows that other ranks hold are counted, rows with
the label ``ignore_index`` are not.  Averaging the means of ranks would be wrong as soon as they hold
different numbers of valid rows. Under data parallelism each replica has the mean of its own batch, as with
torch's loss; the ranks of one sequence share a batch, and all have the mean over its tokens.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossalai.mesh import Layout, Mesh, redistribute, replicated
from colossalai.mesh.row_loss import Classes, row_losses
from colossalai.nn.layer.base import FOLLOW_CONFIG, resolve
from colossalai.nn.layer.batch import split_rows
from colossalai.nn.logits import Logits, LogitsFinder
from colossalai.nn.modes import TensorParallel
from colossalai.nn.sequence import SequenceParallel, current_sequence
from colossalai.registry import LOSSES


@LOSSES.register_module
class CrossEntropyLoss(nn.Module):
    """``torch.nn.CrossEntropyLoss``: the mean over the batch, or with ``reduction=False`` the loss of each
    sample.

    Other arguments are those of torch's class.  ``logits`` are what the model's ``Classifier`` returns, (...,
    classes); ``targets`` are the labels of the whole batch of this model, or of the rows that this rank
    holds.  Where scores are cut, ``num_classes`` and ``vocab_parallel`` say which Classifier is meant, if
    there are several of one width.  Scores of your own need ``vocab_parallel``, or a class that has it in its
    name: True if each rank has some of the classes, False if it has all.

    Where the launched job cuts sequences, ``logits`` are those of this rank's tokens (batch, tokens here,
    classes), and ``targets`` the labels of the whole sequences.  Labels of as many rows as ``logits`` are
    taken to belong to these.
    """

    mode: ClassVar[str | None] = FOLLOW_CONFIG
    cut: ClassVar[bool | None] = None

    def __init__(
        self,
        reduction: bool = True,
        *args: Any,
        num_classes: int | None = None,
        vocab_parallel: bool | None = None,
        tp: TensorParallel | None = None,
        mesh: Mesh | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if not isinstance(reduction, bool):
            raise TypeError(f"reduction is True (the mean) or False (each sample), got {reduction!r}")
        kwargs["reduction"] = "mean" if reduction else "none"
        self.loss = nn.CrossEntropyLoss(*args, **kwargs)
        self.num_classes = num_classes
        self.vocab_parallel = self.cut if vocab_parallel is None else vocab_parallel
        self.tp, self.mesh = resolve(self, self.mode, tp, mesh)
        self.sequence = current_sequence() if tp is None and self.mode is not None else None
        self._finder = None
        if self.mesh is not None and self.tp.size > 1:
            cut, who = self.vocab_parallel, type(self).__name__
            self._finder = LogitsFinder(who, self.tp, self.mesh, cut, num_classes, own_cut=cut)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.sequence is None:
            return self._loss(logits, targets)
        if self.loss.reduction == "mean" or logits.ndim == 2:
            return self._loss(logits, targets)
        if targets.shape == logits.shape[:-1] or targets.is_floating_point():
            raise ValueError(
                f"{type(self).__name__}: reduction=False gives the losses of a whole sequence, and needs the"
                f" labels of all its tokens where sequences are cut; got labels {tuple(targets.shape)}"
                f" for scores {tuple(logits.shape)}"
            )
        return self.sequence.gather(self._loss(logits, targets), targets.size(1))

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        mesh = self.mesh
        if mesh is None or self._finder is None:
            plain = self._plain if self.sequence is None else self._plain_tokens
            return plain(logits, targets)
        if self.loss.weight is not None or targets.is_floating_point():
            raise ValueError(
                f"{type(self).__name__}: scores that are cut over ranks take class indices as labels and no"
                " class weights"
            )
        place = self._finder.find(logits, targets)
        targets = check_targets(targets, place.classes, self.loss.ignore_index)
        ignored = self.loss.ignore_index
        targets = local_rows(logits, targets, place.layout, mesh, self.sequence, ignored)
        return cross_entropy(
            logits,
            targets,
            place,
            mesh,
            ignored,
            self.loss.label_smoothing,
            self.loss.reduction,
            self.sequence,
        )

    def _plain(self, logits: Tensor, targets: Tensor) -> Tensor:
        if logits.ndim > 2 and logits.shape[:-1] == targets.shape:
            return self.loss(logits.flatten(0, -2), targets.flatten()).view(
                () if self.loss.reduction == "mean" else targets.shape
            )
        return self.loss(logits, targets)

    def _plain_tokens(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of this rank's tokens, of which it has the scores of all classes."""
        sequence, loss = self.sequence, self.loss
        assert sequence is not None
        soft = targets.is_floating_point()
        if not soft:
            layout = replicated(logits.ndim)
            targets = local_rows(logits, targets, layout, sequence.mesh, sequence, loss.ignore_index)
        losses = F.cross_entropy(
            logits.flatten(0, -2),
            targets.flatten(0, -2) if soft else targets.flatten(),
            loss.weight,
            ignore_index=loss.ignore_index,
            reduction="none",
            label_smoothing=loss.label_smoothing,
        )
        if loss.reduction == "none":
            return losses.view(logits.shape[:-1])
        counted = torch.ones_like(losses) if soft else (targets != loss.ignore_index).flatten()
        if loss.weight is not None and not soft:
            counted = counted * loss.weight[targets.flatten().clamp(min=0)]
        return _mean(losses, counted, replicated(1), sequence.mesh, sequence)


def local_rows(
    logits: Tensor,
    targets: Tensor,
    layout: Layout,
    mesh: Mesh,
    sequence: SequenceParallel | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """The targets of this rank's rows, from those of the whole batch; they may also be cut already.

    What a sequence is padded with gets the label ``ignore_index``.
    """
    if targets.shape == logits.shape[:-1]:
        return targets
    axes, shape = layout.dims[0], tuple(targets.shape)
    if sequence is not None and targets.ndim > 1 and sequence.is_piece(logits.size(1), targets.size(1)):
        targets = sequence.cut_labels(targets, ignore_index)
    whole = (logits.size(0) * mesh.group_size(*axes), *logits.shape[1:-1])
    if tuple(targets.shape) != whole:
        tokens = flat = ""
        if sequence is not None and logits.ndim == 2:
            flat = "; scores and labels of cut sequences are (batch, tokens, ...), not flattened"
        elif sequence is not None:
            whole = (whole[0], whole[1] * sequence.size, *whole[2:])
            tokens = ", or less by what pads its sequences to equal parts"
        raise ValueError(
            f"labels of shape {shape} do not fit scores of shape {tuple(logits.shape)}, which are this rank's"
            f" part: expected {whole} for the whole batch{tokens}, or {tuple(logits.shape[:-1])}{flat}"
        )
    return split_rows(targets, axes, mesh, 0)


def check_targets(targets: Tensor, classes: int, ignore_index: int) -> Tensor:
    """The targets, if all of them are classes or ``ignore_index``."""
    # Reading the labels of a GPU would stall it in every step.
    if targets.device.type == "cpu" and targets.numel():
        wrong = targets[((targets < 0) | (targets >= classes)) & (targets != ignore_index)]
        if wrong.numel():
            raise ValueError(
                f"the label {int(wrong[0])} is neither one of the {classes} classes nor"
                f" ignore_index={ignore_index}"
            )
    return targets


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    place: Logits,
    mesh: Mesh,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    sequence: SequenceParallel | None = None,
) -> Tensor:
    """The loss of this rank's ``logits``, which lie in ``place``, for the targets of the same rows.

    ``reduction`` is ``"mean"`` over all valid rows of all ranks, also those of the tokens that other ranks
    have of the same ``sequence``, or ``"none"`` for the losses of this rank's rows.
    """
    valid = targets != ignore_index
    classes = Classes(place.classes, place.layout.dims[-1], mesh)
    losses = row_losses(
        logits.flatten(0, -2), torch.where(valid, targets, -1).flatten(), classes, label_smoothing
    )
    if reduction == "none":
        return losses.view(targets.shape)
    return _mean(losses, valid, place.layout, mesh, sequence)


def _mean(
    losses: Tensor, counted: Tensor, layout: Layout, mesh: Mesh, sequence: SequenceParallel | None
) -> Tensor:
    """The sum of the losses of all rows, over the sum of ``counted``, on every rank."""
    dtype = torch.promote_types(losses.dtype, torch.float32)  # a count may be too large for 16 bits
    both = torch.stack([losses.to(dtype).sum(), counted.sum().to(dtype)])
    # P -> I: every rank goes on with the loss of all rows
    rows = frozenset(layout.dims[0])
    both = redistribute(both, Layout(((),), partial=rows), Layout(((),)), mesh)
    total, count = (both if sequence is None else sequence.total(both)).unbind()
    return mean_over(total, count).to(losses.dtype)


def mean_over(total: Tensor, count: Tensor) -> Tensor:
    """``total / count``; where nothing is counted, nan with a gradient of 0, as torch's losses have it."""
    nothing = count == 0
    return torch.where(nothing, math.nan, total / torch.where(nothing, 1, count))


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy of what a ``Classifier`` returned, cut or whole."""
    return CrossEntropyLoss()(logits, targets)


# ---- The losses under the names of the modes ----


@LOSSES.register_module
class VocabParallelCrossEntropyLoss1D(CrossEntropyLoss):
    """1D, for scores that are cut along the classes."""

    mode = "1d"
    cut = True


@LOSSES.register_module
class CrossEntropyLoss2D(CrossEntropyLoss):
    """2D, for scores that are whole."""

    mode = "2d"
    cut = False


@LOSSES.register_module
class VocabParallelCrossEntropyLoss2D(CrossEntropyLoss):
    """2D, for scores that are cut along the classes."""

    mode = "2d"
    cut = True


@LOSSES.register_module
class CrossEntropyLoss2p5D(CrossEntropyLoss):
    """2.5D, for scores that are whole."""

    mode = "2.5d"
    cut = False


@LOSSES.register_module
class VocabParallelCrossEntropyLoss2p5D(CrossEntropyLoss):
    """2.5D, for scores that are cut along the classes."""

    mode = "2.5d"
    cut = True


@LOSSES.register_module
class CrossEntropyLoss3D(CrossEntropyLoss):
    """3D, for scores that are whole."""

    mode = "3d"
    cut = False


@LOSSES.register_module
class VocabParallelCrossEntropyLoss3D(CrossEntropyLoss):
    """3D, for scores that are cut along the classes."""

    mode = "3d"
    cut = True
