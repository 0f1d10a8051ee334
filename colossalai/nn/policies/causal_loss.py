"""Scores of words that stay cut along the vocabulary, and the loss of a causal language model from them.

Whole scores are the largest tensor of a language model.  Where a model computes its loss by
``loss_function``, as those of transformers do, the loss can be computed from the pieces instead, and no rank
ever holds all scores.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from colossalai.mesh import Mesh
from colossalai.nn.layer.batch import sum_rows
from colossalai.nn.layer.classifier import Classifier
from colossalai.nn.logits import Logits
from colossalai.nn.loss.cross_entropy import check_targets, cross_entropy, local_rows

CAUSAL = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True)
class CausalLoss:
    """The loss of ``ForCausalLMLoss`` of transformers: every token predicts the next one."""

    place: Logits
    mesh: Mesh

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
        layout = self.place.layout
        shift_labels = check_targets(shift_labels.to(logits.device), self.place, ignore_index)
        targets = local_rows(logits, shift_labels, layout, self.mesh)
        if num_items_in_batch is None:
            return cross_entropy(logits, targets, self.place, self.mesh, ignore_index)
        losses = cross_entropy(logits, targets, self.place, self.mesh, ignore_index, reduction="none")
        return sum_rows(losses.sum(), layout.dims[0], self.mesh, reduce_mean=False) / num_items_in_batch


def check_causal(model: Any, heads: set[int]) -> None:
    """Refuse a model that computes its loss in another way, which from pieces of the scores would be wrong.

    ``heads`` are the ids of the modules that will be cut as heads.
    """
    who = type(model).__name__
    replaceable = who.endswith(CAUSAL) and "self.loss_function(" in _source(type(model).forward)
    if not replaceable or id(model.get_output_embeddings()) not in heads:
        raise ValueError(
            "whole_scores=False is for causal language models of transformers whose head is cut and which"
            f" compute their loss by loss_function, as {who} does not; leave whole_scores out"
        )


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
