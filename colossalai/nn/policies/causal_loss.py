"""The loss of a causal language model from scores of words, which may stay cut along the vocabulary.

Whole scores are the largest tensor of a language model, and in float32 they are twice that.  Where a model
computes its loss by ``loss_function``, as those of transformers do, the loss can be computed a slab of rows
at a time (``chunk_causal_loss``), or from pieces of the scores, so that no rank ever holds all of them.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from colossalai.mesh import Mesh
from colossalai.mesh.row_loss import Classes, row_losses
from colossalai.nn.layer.batch import sum_rows
from colossalai.nn.layer.classifier import Classifier
from colossalai.nn.logits import Logits
from colossalai.nn.loss.cross_entropy import check_targets, cross_entropy, local_rows

M = TypeVar("M", bound=Any)
CAUSAL = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True)
class CausalLoss:
    """The loss of ``ForCausalLMLoss`` of transformers: every token predicts the next one.

    ``place`` says how the scores are cut over ``mesh``; without it they are whole.
    """

    place: Logits | None = None
    mesh: Mesh | None = None

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if self.place is None or self.mesh is None:
            return _whole(logits, shift_labels.to(logits.device), num_items_in_batch, ignore_index)
        layout = self.place.layout
        shift_labels = check_targets(shift_labels.to(logits.device), self.place.classes, ignore_index)
        targets = local_rows(logits, shift_labels, layout, self.mesh)
        if num_items_in_batch is None:
            return cross_entropy(logits, targets, self.place, self.mesh, ignore_index)
        losses = cross_entropy(logits, targets, self.place, self.mesh, ignore_index, reduction="none")
        return sum_rows(losses.sum(), layout.dims[0], self.mesh, reduce_mean=False) / num_items_in_batch


def _whole(logits: Tensor, targets: Tensor, count: Tensor | int | None, ignore_index: int) -> Tensor:
    """The loss of scores of all words: their mean over valid targets, or their sum divided by ``count``."""
    rows, targets = logits.flatten(0, -2), targets.flatten()
    if torch.compiler.is_compiling():  # the compiler fuses the cast with what follows it
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        losses = F.cross_entropy(wide, targets, ignore_index=ignore_index, reduction="none")
    else:
        check_targets(targets, rows.size(-1), ignore_index)
        valid = torch.where(targets != ignore_index, targets, -1)
        losses = row_losses(rows, valid, Classes(rows.size(-1)))
    return losses.sum() / ((targets != ignore_index).sum() if count is None else count)


def chunk_causal_loss(model: M) -> M:
    """Let a causal language model of transformers compute its loss a slab of rows at a time.

    The loss is the same, but the scores never exist in float32 as a whole, nor does their gradient.
    """
    if not _is_replaceable(model):
        raise ValueError(
            "chunk_causal_loss is for causal language models of transformers which compute their loss by"
            f" loss_function, as {type(model).__name__} does not; use colossalai.nn.CrossEntropyLoss or the"
            " loss of the model"
        )
    model.loss_function = CausalLoss()
    return model


def check_causal(model: Any, heads: set[int]) -> None:
    """Refuse a model that computes its loss in another way, which from pieces of the scores would be wrong.

    ``heads`` are the ids of the modules that will be cut as heads.
    """
    if not _is_replaceable(model) or id(model.get_output_embeddings()) not in heads:
        raise ValueError(
            "whole_scores=False is for causal language models of transformers whose head is cut and which"
            f" compute their loss by loss_function, as {type(model).__name__} does not; leave whole_scores"
            " out"
        )


def _is_replaceable(model: Any) -> bool:
    """Whether ``model`` computes its loss by ``loss_function``, as a causal language model does."""
    if isinstance(getattr(model, "loss_function", None), CausalLoss):
        return True
    return type(model).__name__.endswith(CAUSAL) and "self.loss_function(" in _source(type(model).forward)


def _source(function: Any) -> str:
    try:
        return inspect.getsource(inspect.unwrap(function))
    except OSError:
        return ""


def compute_loss_from_pieces(model: Any, mesh: Mesh) -> Logits:
    """Give ``model`` a loss function for the scores of its head; returns where these lie."""
    head = model.get_output_embeddings()
    assert isinstance(head, Classifier)
    place = Logits(head.logits, head.num_classes)
    model.loss_function = CausalLoss(place, mesh)
    return place
