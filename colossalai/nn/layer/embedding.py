"""Embedding tables in all modes.

A lookup is a product with one-hot rows, in which k is the vocabulary.  A table that is cut along the
vocabulary gives zeros for the tokens of others, and the sum over the ranks is the answer; so the planner of
products applies unchanged. A small table is whole along the vocabulary and cut along its features: where the
stream is cut alike nothing travels, and in 1D the ranks bring their features together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colossalai.nn.init as init
from colossalai.mesh import (
    Layout,
    MatmulPlan,
    Mesh,
    ZeroRow,
    local_range,
    placement,
    redistribute,
    set_init,
    use,
)
from colossalai.mesh.collectives import cut
from colossalai.nn.layer.base import Fill, ParallelLayer
from colossalai.nn.layer.classifier import VOCAB_PARALLEL_LIMIT
from colossalai.nn.modes import TensorParallel, at_rank

# of torch.nn.Embedding
DEFAULTS = {"max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False}


class Embedding(ParallelLayer):
    """``torch.nn.Embedding``; the table is cut along the vocabulary above ``vocab_parallel_limit`` entries.

    Ids of shape (batch, sequence) are this rank's part of the batch (see ``partition_batch``; ``Embedding2D``
    and its siblings take the whole batch).  Ids of one dim number the positions of a sequence and serve all
    rows.  Of torch's other options only the defaults are supported.
    """

    vocab_parallel: ClassVar[bool | None] = None
    """Whether the table is cut along the vocabulary; None: above ``vocab_parallel_limit`` entries."""
    max_norm: ClassVar[None] = None  # as torch.nn.Embedding has them; adapters of PEFT ask for all
    norm_type: ClassVar[float] = 2.0
    scale_grad_by_freq: ClassVar[bool] = False
    sparse: ClassVar[bool] = False

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        weight_initializer: Fill | None = init.TABLE,
        vocab_parallel_limit: int = VOCAB_PARALLEL_LIMIT,
        *,
        tp: TensorParallel | None = None,
        mesh: Mesh | None = None,
        **torch_options: Any,
    ) -> None:
        super().__init__(tp, mesh)
        self._require_hidden()
        _check_options(type(self).__name__, torch_options)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = self._check_padding(padding_idx)
        wide = num_embeddings > vocab_parallel_limit if self.vocab_parallel is None else self.vocab_parallel
        self.cut = wide and not self.plain
        feature = self.tp.hidden.dims[-1]
        table = self.tp.vocab if self.cut else Layout(((), self.tp.feature_cut))
        self._check_size("embedding_dim", embedding_dim, (feature, table.dims[1]))
        one_hot = Layout(
            (self.tp.hidden.dims[0], (), ())
        )  # ids are cut like the batch; the last dim is virtual
        self._plan = MatmulPlan(one_hot, table, self.tp.hidden, prefer_moving_y=True) if self.cut else None
        self.weight = self._parameter(
            (num_embeddings, embedding_dim),
            table,
            weight_initializer,
            fan_in=num_embeddings,
            fan_out=embedding_dim,
            dtype=dtype,
        )
        start, self._length = (0, num_embeddings)
        if self._plan is not None:
            vocabulary = self._plan.w_use.dims[0]
            start, self._length = local_range(num_embeddings, vocabulary, self.mesh, uneven=True)
        self._start = start
        if self.padding_idx is not None:
            self._zero_padding(table)

    def _check_padding(self, index: int | None) -> int | None:
        if index is None or 0 <= index < self.num_embeddings:
            return index
        if -self.num_embeddings <= index < 0:
            return index + self.num_embeddings
        raise ValueError(
            f"{type(self).__name__}: padding_idx={index} is not one of the {self.num_embeddings} entries of"
            " the table"
        )

    def _zero_padding(self, table: Layout) -> None:
        assert self.padding_idx is not None
        drawn = getattr(self.weight, "init", None)
        if drawn is not None:
            set_init(self.weight, ZeroRow(drawn, self.padding_idx, self.embedding_dim))
        start, length = (0, self.num_embeddings)
        if not self.plain:
            start, length = local_range(self.num_embeddings, table.dims[0], self.mesh, uneven=True)
        if 0 <= self.padding_idx - start < length and not self.weight.is_meta:
            with torch.no_grad():
                self.weight[self.padding_idx - start].zero_()

    @classmethod
    def from_native(
        cls,
        module: nn.Embedding,
        *,
        tp: TensorParallel,
        mesh: Mesh | None,
        vocab_parallel: bool | None = None,
    ) -> Embedding:
        """This rank's piece of an ``nn.Embedding``."""
        _check_options("Embedding.from_native", {name: getattr(module, name) for name in DEFAULTS})
        kind = {None: Embedding, True: VocabParallelEmbedding, False: WholeEmbedding}[vocab_parallel]
        with torch.device("meta"):
            layer = kind(
                module.num_embeddings,
                module.embedding_dim,
                module.padding_idx,
                weight_initializer=None,
                tp=tp,
                mesh=mesh,
            )
        layer._adopt("weight", module.weight)
        return layer.train(module.training)

    def forward(self, ids: Tensor) -> Tensor:
        if self.plain:
            return F.embedding(ids, self.weight, self.padding_idx)
        if self._plan is None:
            return self._own_features(ids)
        return self._sum_of_pieces(ids, self._plan)

    def _check_ids(self, ids: Tensor) -> None:
        """Refuse an id outside of the table, which every rank would take for an id of another rank."""
        # Reading the ids of a GPU would stall it in every step.
        if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
            least, most = (int(n) for n in ids.aminmax())
            if least < 0 or most >= self.num_embeddings:
                raise IndexError(
                    f"{type(self).__name__}({self.num_embeddings}, {self.embedding_dim}): the id "
                    f"{least if least < 0 else most} is not one of {self.num_embeddings}"
                )

    def _own_features(self, ids: Tensor) -> Tensor:
        """Entries that are cut along their features, as the stream is; where it is not, the smaller of the
        table and the looked up entries travels.
        """
        batch, sequence, feature = self.tp.hidden.dims
        table, columns = use(self.weight, batch, self.mesh), placement(self.weight).dims[1]
        if columns != feature and self.num_embeddings < ids.numel() // self.mesh.group_size(*sequence):
            whole = Layout(((), feature), spread=frozenset(sequence))
            table, columns = redistribute(table, Layout(((), columns)), whole, self.mesh), feature
        if columns == feature:
            for axis in sequence:
                ids = cut(ids, self.mesh, axis, min(1, ids.ndim - 1))
            return F.embedding(ids, table, self.padding_idx)
        y = F.embedding(ids, table, self.padding_idx)
        # ids of one dim serve all rows, so the batch's axes do not cut them
        rest = Layout((sequence, feature)) if ids.ndim == 1 else at_rank(self.tp.hidden, y.ndim)
        found = Layout(((), columns)) if ids.ndim == 1 else at_rank(Layout((batch, (), columns)), y.ndim)
        return redistribute(y, found, rest, self.mesh)

    def _sum_of_pieces(self, ids: Tensor, plan: MatmulPlan) -> Tensor:
        self._check_ids(ids)
        ids, source, target = self._places(ids, plan)
        table = redistribute(
            self.weight, plan.w, plan.w_use, self.mesh, (self.num_embeddings, self.embedding_dim)
        )
        index = ids - self._start
        inside = (index >= 0) & (index < self._length)
        padding = None if self.padding_idx is None else self.padding_idx - self._start
        if padding is not None and not 0 <= padding < self._length:
            padding = None
        y = F.embedding(index.clamp(0, self._length - 1), table, padding) * inside.unsqueeze(-1)
        return redistribute(y, source, target, self.mesh)

    def _places(self, ids: Tensor, plan: MatmulPlan) -> tuple[Tensor, Layout, Layout]:
        """The ids this rank looks up, and where the result lies before and after the sum."""
        if ids.ndim == 1:
            # the sum serves rows that the batch's axes cut: on these each rank goes on to use it differently,
            # P -> R
            batch, sequence, feature = plan.y.dims
            spread = plan.y_use.partial & set(batch)
            source = Layout(((), plan.y_use.dims[-1]), partial=plan.y_use.partial)
            return ids, source, Layout((sequence, feature), spread=spread)
        ndim = ids.ndim + 1
        rest, in_use = (
            replace(at_rank(one_hot, ndim), dims=at_rank(one_hot, ndim).dims[:-1], spread=frozenset())
            for one_hot in (plan.x, plan.x_use)
        )
        ids = redistribute(ids, rest, in_use, self.mesh)
        return ids, at_rank(plan.y_use, ndim), at_rank(plan.y, ndim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}, cut={self.cut}"


def _check_options(who: str, given: Mapping[str, Any]) -> None:
    """Refuse options of ``torch.nn.Embedding`` that a cut table does not have."""
    unknown = given.keys() - DEFAULTS.keys()
    if unknown:
        raise TypeError(f"{who} got an unexpected keyword argument {min(unknown)!r}")
    for name, value in given.items():
        # norm_type has no effect without max_norm
        if name != "norm_type" and value != DEFAULTS[name]:
            raise ValueError(
                f"{who}: {name}={value!r} is not supported, only {name}={DEFAULTS[name]!r}; use"
                " torch.nn.Embedding, which is not cut, for such a table"
            )


class FixedEmbedding(Embedding):
    """An embedding whose class, not its size, says how the table is cut."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        weight_initializer: Fill | None = init.TABLE,
        *,
        tp: TensorParallel | None = None,
        mesh: Mesh | None = None,
        **torch_options: Any,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            dtype,
            weight_initializer,
            tp=tp,
            mesh=mesh,
            **torch_options,
        )


class VocabParallelEmbedding(FixedEmbedding):
    """A table that is cut along the vocabulary."""

    vocab_parallel = True


class WholeEmbedding(FixedEmbedding):
    """A table that has every entry on every rank, and is cut along its features."""

    vocab_parallel = False
