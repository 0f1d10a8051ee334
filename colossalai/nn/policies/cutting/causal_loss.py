"""The loss of a causal language model from scores of words, which may stay cut along the vocabulary.

Whole scores are the largest tensor of a language model, and in float32 they are twice that.  Where a model
computes its loss by ``loss_function``, as those of transformers do, the loss can be computed a slab of rows
at a time (``chunk_causal_loss``), or from pieces of the scores, so that no rank ever holds all of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossalai.mesh import Mesh
from colossalai.mesh.row_loss import Classes, row_losses
from colossalai.nn.layer.batch import sum_rows
from colossalai.nn.layer.classifier import Classifier
from colossalai.nn.logits import Logits
from colossalai.nn.loss.cross_entropy import check_targets, cross_entropy, local_rows, mean_over
from colossalai.nn.loss.head_loss import head_loss
from colossalai.nn.policies.sequences.inputs import CutSequence
from colossalai.nn.policies.wrap_forward import (
    Forward,
    ForwardWrapper,
    given_by_name,
    source_of,
    wrap_forward,
)

M = TypeVar("M", bound=Any)
CAUSAL = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True)
class CausalLoss:
    """The loss of ``ForCausalLMLoss`` of transformers: every token predicts the next one.

    ``place`` says how the scores are cut over ``mesh``; without it they are whole.  Where ``cut`` says so,
    they are those of this rank's tokens; labels are always those of the whole batch.
    """

    place: Logits | None = None
    mesh: Mesh | None = None
    cut: CutSequence | None = None

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
        shift_labels = _shifted(labels, ignore_index) if shift_labels is None else shift_labels
        cut = None if self.cut is None or not self.cut.in_pieces else self.cut.sequence
        if logits.ndim == 0:  # the sum of all losses, which the head has computed (LossInHead)
            valid = (shift_labels != ignore_index).sum().to(logits.device)
            total = logits if cut is None else cut.total(logits)
            return _mean(total, valid, num_items_in_batch)
        if cut is not None:
            return self._of_pieces(logits, shift_labels.to(logits.device), num_items_in_batch, ignore_index)
        if self.place is None or self.mesh is None:
            return _whole(logits, shift_labels.to(logits.device), num_items_in_batch, ignore_index)
        layout = self.place.layout
        shift_labels = check_targets(shift_labels.to(logits.device), self.place.classes, ignore_index)
        targets = local_rows(logits, shift_labels, layout, self.mesh)
        if num_items_in_batch is None:
            return cross_entropy(logits, targets, self.place, self.mesh, ignore_index)
        losses = cross_entropy(logits, targets, self.place, self.mesh, ignore_index, reduction="none")
        return sum_rows(losses.sum(), layout.dims[0], self.mesh, reduce_mean=False) / num_items_in_batch

    def _of_pieces(
        self, logits: Tensor, targets: Tensor, count: Tensor | int | None, ignore_index: int
    ) -> Tensor:
        """The loss of scores of this rank's tokens, as all ranks of the sequence have it."""
        assert self.cut is not None
        sequence = self.cut.sequence
        targets = sequence.cut(targets, value=ignore_index)
        if self.place is None or self.mesh is None:
            losses = _losses(logits, targets, ignore_index)
        else:
            check_targets(targets, self.place.classes, ignore_index)
            losses = cross_entropy(logits, targets, self.place, self.mesh, ignore_index, reduction="none")
        valid = (targets != ignore_index).sum().to(losses.dtype)
        total, everyone = sequence.total(torch.stack([losses.sum(), valid])).unbind()
        return _mean(total, everyone, count)


def _mean(total: Tensor, valid: Tensor, count: Tensor | int | None) -> Tensor:
    """The sum of losses over the number of valid targets, or over ``count`` where a script has one."""
    return mean_over(total, valid) if count is None else total / count


def _shifted(labels: Tensor, ignore_index: int) -> Tensor:
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def _whole(logits: Tensor, targets: Tensor, count: Tensor | int | None, ignore_index: int) -> Tensor:
    """The loss of scores of all words: their mean over valid targets, or their sum divided by ``count``."""
    losses = _losses(logits, targets, ignore_index)
    return _mean(losses.sum(), (targets != ignore_index).sum(), count)


def _losses(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """The losses of rows of scores of all words."""
    rows, targets = logits.flatten(0, -2), targets.flatten()
    if torch.compiler.is_compiling():  # the compiler fuses the cast with what follows it
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        return F.cross_entropy(wide, targets, ignore_index=ignore_index, reduction="none")
    check_targets(targets, rows.size(-1), ignore_index)
    valid = torch.where(targets != ignore_index, targets, -1)
    return row_losses(rows, valid, Classes(rows.size(-1)))


def chunk_causal_loss(model: M, *, whole_scores: bool = True) -> M:
    """Let a causal language model of transformers compute its loss a slab of rows at a time.

    The loss is the same, but the scores never exist in float32 as a whole, nor does their gradient. With
    ``whole_scores=False`` they do not exist as a whole at all where the model is given labels and gradients
    are computed: its outputs then have ``logits=None``.
    """
    if not _is_replaceable(model):
        raise ValueError(
            "chunk_causal_loss is for causal language models of transformers which compute their loss by"
            f" loss_function, as {type(model).__name__} does not; use colossalai.nn.CrossEntropyLoss or the"
            " loss of the model"
        )
    if not whole_scores and not isinstance(model, WithoutScores):
        head = _plain_head(model)
        wrap_forward(head, LossInHead).targets = None  # type: ignore[assignment]
        wrap_forward(model, WithoutScores)
    if not isinstance(model.loss_function, CausalLoss):  # that of parallelize knows how scores are cut
        model.loss_function = CausalLoss()
    return model


def _plain_head(model: Any) -> nn.Module:
    """The head of ``model``, if its scores are used for the loss as they are."""
    head = model.get_output_embeddings()
    made = re.findall(r"^\s*\w*logits [-+*/]?= (\S+)", source_of(type(model).forward), re.MULTILINE)
    if type(head) is not nn.Linear or len(made) != 1 or not made[0].startswith("self."):
        raise ValueError(
            f"chunk_causal_loss(whole_scores=False): the scores of {type(model).__name__} are not simply what"
            f" a linear head makes of hidden states (its head is a {type(head).__name__}, and its forward"
            f" makes scores {len(made)} times); leave whole_scores=False out"
        )
    if head._forward_hooks or head._forward_pre_hooks:
        raise ValueError(
            "chunk_causal_loss(whole_scores=False): the head has forward hooks, which would see no scores;"
            " remove them, or leave whole_scores=False out"
        )
    return head


class LossInHead(ForwardWrapper):
    """A head that returns the sum of the losses of its scores, where it is told the targets."""

    weight: Tensor
    bias: Tensor | None
    targets: Tensor | None

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.targets is None:
            return forward(*args, **kwargs)
        (hidden,) = args
        targets = self.targets.to(hidden.device)
        if targets.shape != hidden.shape[:-1]:
            raise ValueError(
                f"labels of shape {tuple(targets.shape)} do not fit hidden states of shape"
                f" {tuple(hidden.shape)}; leave out logits_to_keep where labels are given"
            )
        return head_loss(hidden.flatten(0, -2), self.weight, self.bias, targets.flatten())


class WithoutScores(ForwardWrapper):
    """A language model whose head computes the loss, and which then returns no scores."""

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = given_by_name(forward, args, kwargs)
        if given.get("labels") is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        head = self.get_output_embeddings()  # type: ignore[attr-defined]
        ignored = given.get("ignore_index", -100)
        targets = given.get("shift_labels")
        targets = _shifted(given["labels"], ignored) if targets is None else targets
        if not torch.compiler.is_compiling():
            check_targets(targets, len(head.weight), ignored)
        as_tuple = not given.get("return_dict", getattr(self.config, "return_dict", True))  # type: ignore[attr-defined]
        cut = self.loss_function.cut  # type: ignore[attr-defined]
        if cut is not None and cut.in_pieces:
            targets = cut.sequence.cut(targets, value=ignored)
        head.targets = torch.where(targets == ignored, -1, targets)
        try:
            out = forward(*args, **{**kwargs, "return_dict": True} if as_tuple else kwargs)
        finally:
            head.targets = None
        out["logits"] = None
        return out.to_tuple() if as_tuple else out


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
    return type(model).__name__.endswith(CAUSAL) and "self.loss_function(" in source_of(type(model).forward)


def compute_loss_from_pieces(model: Any, mesh: Mesh, cut: CutSequence | None = None) -> Logits | None:
    """Give ``model`` a loss function for the scores of its head; returns where these lie, if words are
    cut.
    """
    head = model.get_output_embeddings()
    place = Logits(head.logits, head.num_classes) if isinstance(head, Classifier) else None
    assert place is not None or cut is not None
    model.loss_function = CausalLoss(place, mesh, cut)
    return place
