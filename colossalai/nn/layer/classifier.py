"""``Classifier``: maps features to the scores of classes, or of the words of a vocabulary.

With few classes the scores are whole on every rank, and the weight is cut along its features (``y`` rests
uncut along the classes, so the planner sums).  Above ``vocab_parallel_limit`` they stay cut, and the loss
works on the pieces.  A tied head uses the embedding's table as it lies there; the planner finds what has to
travel.  The number of classes need not divide: pieces differ by one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colossalai.nn.init as init
from colossalai.mesh import Layout, MatmulPlan, Mesh, matmul, placement, redistribute, use
from colossalai.nn.layer.base import Fill, ParallelLayer
from colossalai.nn.logits import Logits, note_classifier
from colossalai.nn.modes import TensorParallel, at_rank

VOCAB_PARALLEL_LIMIT = 2048


class Classifier(ParallelLayer):
    """A linear layer to ``num_classes`` scores; with ``weight``, an embedding's table, it is tied to this
    table.
    """

    vocab_parallel: ClassVar[bool | None] = None
    """Whether scores stay cut along the classes; None: above ``vocab_parallel_limit``, or as the tied table
    is.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        weight: nn.Parameter | None = None,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        weight_initializer: Fill | None = init.WEIGHT,
        bias_initializer: Fill | None = init.BIAS,
        vocab_parallel_limit: int = VOCAB_PARALLEL_LIMIT,
        *,
        gather_output: bool = False,
        tp: TensorParallel | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(tp, mesh)
        self._require_hidden()
        self.in_features, self.num_classes, self.tied = in_features, num_classes, weight is not None
        cut = num_classes > vocab_parallel_limit if self.vocab_parallel is None else self.vocab_parallel
        if weight is not None:
            self._check_tied(weight)
            cut = bool(placement(weight).dims[0]) if self.vocab_parallel is None else cut
        self.cut = cut and not self.plain
        w = self.tp.expand if self.cut else Layout((self.tp.feature_cut, ()))
        self._check_size("in_features", in_features, (self.tp.hidden.dims[-1], w.dims[0]))
        self.weight = (
            weight
            if weight is not None
            else self._parameter(
                (num_classes, in_features),
                w.transposed(),
                weight_initializer,
                fan_in=in_features,
                fan_out=num_classes,
                dtype=dtype,
            )
        )
        # without the sequence's cut: scores of a row are all where the loss finds them
        rest = Layout((self.tp.hidden.dims[0], (), ()))
        self.logits = self.tp.inner if self.cut and not gather_output else rest
        if self.cut and gather_output:
            self.logits = Layout((*self.tp.inner.dims[:-1], ()))
        self._plans: dict[int, MatmulPlan] = {}
        self.bias = None
        if bias:
            along = Layout((self.logits.dims[-1],))
            self.bias = self._parameter(
                (num_classes,), along, bias_initializer, fan_in=in_features, dtype=dtype
            )
        if not self.plain:
            self._plan(3)  # a table that does not fit is refused now
            note_classifier(self.mesh, self)

    def place(self) -> Logits:
        """Where the scores lie."""
        return Logits(self.logits, self.num_classes)

    def _check_tied(self, weight: nn.Parameter) -> None:
        whole = tuple(getattr(weight, "full_shape", weight.shape))
        if not isinstance(weight, nn.Parameter) or whole != (self.num_classes, self.in_features):
            raise ValueError(
                f"{type(self).__name__}: a tied weight is a parameter of shape (num_classes, in_features) = "
                f"{(self.num_classes, self.in_features)}, got a {type(weight).__name__} of shape {whole}"
            )

    @classmethod
    def from_native(
        cls,
        module: nn.Linear,
        *,
        tp: TensorParallel,
        mesh: Mesh | None,
        weight: nn.Parameter | None = None,
        vocab_parallel: bool | None = None,
        gather_output: bool = False,
    ) -> Classifier:
        """This rank's piece of an ``nn.Linear`` to classes; with ``weight``, tied to that (already cut)
        table.
        """
        kind = {None: Classifier, True: VocabParallelClassifier, False: WholeClassifier}[vocab_parallel]
        n_out, n_in = module.weight.shape
        with torch.device("meta"):
            layer = kind(
                n_in,
                n_out,
                weight,
                module.bias is not None,
                weight_initializer=None,
                bias_initializer=None,
                gather_output=gather_output,
                tp=tp,
                mesh=mesh,
            )
        if weight is None:
            layer._adopt("weight", module.weight)
        layer._adopt("bias", module.bias)
        return layer.train(module.training)

    def _plan(self, ndim: int) -> MatmulPlan:
        if ndim not in self._plans:
            x, y = self.tp.hidden, self.logits
            w = placement(self.weight).transposed()
            if not self.cut:
                # few classes: every rank scores all tokens, by the features that its weight has
                x = Layout((x.dims[0], (), x.dims[-1] or w.dims[0]))
            self._plans[ndim] = MatmulPlan(
                at_rank(x, ndim), w, at_rank(y, ndim), keep_operands=self.tp.keep_operands
            )
        return self._plans[ndim]

    def forward(self, x: Tensor) -> Tensor:
        if self.plain:
            return F.linear(x, self.weight, self.bias)
        note_classifier(self.mesh, self)  # it may be a copy of what was built
        plan = self._plan(x.ndim)
        x = redistribute(x, at_rank(self.tp.hidden, x.ndim), plan.x, self.mesh)
        bias = None if self.bias is None else use(self.bias, plan.y.rows, self.mesh)
        shape = (self.num_classes, self.in_features)
        return matmul(x, self.weight, plan, self.mesh, bias=bias, order="oi", shape=shape)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, num_classes={self.num_classes}, bias={self.bias is not None}, "
            f"tied={self.tied}, scores {replace(self.logits)}"
        )


class FixedClassifier(Classifier):
    """A classifier whose class, not the number of classes, says whether scores stay cut."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        weight: nn.Parameter | None = None,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        weight_initializer: Fill | None = init.WEIGHT,
        bias_initializer: Fill | None = init.BIAS,
        *,
        gather_output: bool = False,
        tp: TensorParallel | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(
            in_features,
            num_classes,
            weight,
            bias,
            dtype,
            weight_initializer,
            bias_initializer,
            gather_output=gather_output,
            tp=tp,
            mesh=mesh,
        )


class VocabParallelClassifier(FixedClassifier):
    """Scores stay cut along the classes."""

    vocab_parallel = True


class WholeClassifier(FixedClassifier):
    """Scores are whole on every rank."""

    vocab_parallel = False
