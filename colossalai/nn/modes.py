"""The tensor-parallel modes: a mode is a small table of layouts, and everything else is derived from it.

``hidden`` and ``inner`` are the two places where activations rest: the residual stream, and the stream
between an expanding linear and the contracting one after it.  In 2D and 2.5D the two coincide.

``current()`` is the one place where the layers ask which mode the job was launched with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

from colossalai.context import ParallelMode
from colossalai.context.tensor_modes import tensor_mode
from colossalai.core import global_context as gpc
from colossalai.mesh import DATA_AXIS, Axes, Layout, Mesh, Order

Where = Literal["hidden", "inner"]


@dataclass(frozen=True)
class TensorParallel:
    """The layouts of activations and weights under one mode.  Activations are (batch, sequence, feature)."""

    axes: dict[str, int]
    hidden: Layout
    inner: Layout
    expand: Layout
    """Weight (in, out) of a linear from hidden to inner."""
    contract: Layout
    """Weight (in, out) of a linear from inner to hidden."""
    vocab: Layout
    """Table (vocabulary, feature)."""
    mode: str | None = None
    """The documented name of the mode."""
    weight_order: Order = "oi"
    """How a linear stores its weight: (out, in) in 1D, as torch does, and (in, out) in the other modes.
    """
    keep_operands: bool = False
    """Whether products keep what they gathered for the backward pass."""

    @property
    def size(self) -> int:
        """How many ranks share one model."""
        return math.prod(self.axes.values())

    def rest(self, where: Where) -> Layout:
        return self.hidden if where == "hidden" else self.inner

    @property
    def heads(self) -> Layout:
        """Attention's scores (batch, heads, query, key): heads are features, so they are cut like those."""
        return Layout((self.inner.dims[0], self.inner.dims[-1], (), ()))

    @property
    def feature(self) -> Layout:
        """A vector along the features of the residual stream: a norm's weight, a contracting linear's
        bias.
        """
        return Layout((self.hidden.dims[-1],))

    @property
    def feature_cut(self) -> Axes:
        """The axes that cut features of the residual stream in a table or a head that is whole along its
        other dim; in 1D, where the stream itself is whole, those of the stream between two linears.
        """
        return self.hidden.dims[-1] or self.inner.dims[-1]

    @property
    def inner_feature(self) -> Layout:
        """A vector along the features between two linears: an expanding linear's bias."""
        return Layout((self.inner.dims[-1],))


def mode_serial() -> TensorParallel:
    activation, weight = Layout(((), (), ())), Layout(((), ()))
    return TensorParallel({}, activation, activation, weight, weight, weight)


def mode_1d(p: int, sequence_parallel: bool = False) -> TensorParallel:
    tp = ("tp",)
    return TensorParallel(
        axes={"tp": p},
        hidden=Layout(((), tp if sequence_parallel else (), ())),
        inner=Layout(((), (), tp)),
        expand=Layout(((), tp)),
        contract=Layout((tp, ())),
        vocab=Layout((tp, ())),
        mode="1d",
    )


def mode_2p5d(q: int, depth: int) -> TensorParallel:
    activation = Layout((("dep", "row"), (), ("col",)))
    weight = Layout((("row",), ("col",)))
    return TensorParallel(
        {"dep": depth, "row": q, "col": q},
        activation,
        activation,
        weight,
        weight,
        weight,
        mode="2.5d",
        weight_order="io",
    )


def mode_2d(q: int) -> TensorParallel:
    activation, weight = Layout((("row",), (), ("col",))), Layout((("row",), ("col",)))
    return TensorParallel(
        {"row": q, "col": q},
        activation,
        activation,
        weight,
        weight,
        weight,
        mode="2d",
        weight_order="io",
    )


def mode_3d(q: int, keep_operands: bool = True) -> TensorParallel:
    """With ``keep_operands`` a product sends 6 (q - 1) / q^3 of a matrix; without it 8 of these, but less
    memory.
    """
    # The documented placement: X_ijl holds rows (i, j) and columns l; A_lji holds rows l and columns (j, i).
    return TensorParallel(
        axes={"l": q, "j": q, "i": q},
        hidden=Layout((("i", "j"), (), ("l",))),
        inner=Layout((("i", "l"), (), ("j",))),
        expand=Layout((("l",), ("j", "i"))),
        contract=Layout((("j",), ("l", "i"))),
        vocab=Layout((("j",), ("l", "i"))),
        mode="3d",
        weight_order="io",
        keep_operands=keep_operands,
    )


def tensor_parallel(
    mode: str | None, size: int = 1, depth: int = 1, *, sequence_parallel: bool = False
) -> TensorParallel:
    """The layouts of a mode by its documented name: None, '1d', '2d', '2.5d' or '3d'.

    ``sequence_parallel`` is Megatron's: in 1D, the residual stream between the linears is cut along the
    sequence.
    """
    table: dict[str | None, Callable[[dict[str, int]], TensorParallel]] = {
        None: lambda _: mode_serial(),
        "1d": lambda axes: mode_1d(axes["tp"], sequence_parallel),
        "2d": lambda axes: mode_2d(axes["row"]),
        "2.5d": lambda axes: mode_2p5d(axes["row"], axes["dep"]),
        "3d": lambda axes: mode_3d(axes["l"]),
    }
    if mode not in table:
        raise ValueError(
            f"unknown tensor-parallel mode {mode!r}; the modes are {', '.join(map(repr, table))}"
        )
    row = tensor_mode(mode)
    if sequence_parallel and "sequence_parallel" not in row.flags:
        raise ValueError(f"tensor-parallel mode {mode!r} has no sequence_parallel; mode '1d' has")
    try:
        axes = row.sizes(size, **({"depth": depth} if "depth" in row.options else {}))
    except ValueError as error:
        raise ValueError(f"tensor-parallel mode {mode!r}: {error}") from None
    return table[mode](axes)


def with_data_parallel(tp: TensorParallel, size: int, shard_weights: bool = False) -> TensorParallel:
    """Data parallelism is one more axis that cuts the batch; with ZeRO-3 it cuts the weights at rest as
    well.
    """

    def batch(layout: Layout) -> Layout:
        return replace(layout, dims=((DATA_AXIS, *layout.dims[0]), *layout.dims[1:]))

    def weight(layout: Layout) -> Layout:
        last: Axes = (*layout.dims[-1], DATA_AXIS)
        return replace(layout, dims=(*layout.dims[:-1], last)) if shard_weights else layout

    return replace(
        tp,
        axes={DATA_AXIS: size, **tp.axes},
        hidden=batch(tp.hidden),
        inner=batch(tp.inner),
        expand=weight(tp.expand),
        contract=weight(tp.contract),
        vocab=weight(tp.vocab),
    )


def at_rank(layout: Layout, ndim: int) -> Layout:
    """A layout of (batch, sequence, feature) for a tensor of ``ndim`` dims.

    A tensor of two dims has no sequence; more than three have further dims before the features, which nothing
    cuts.
    """
    batch, sequence, feature = layout.dims
    if ndim < 2:
        raise ValueError(
            f"a tensor of {ndim} dims cannot hold a batch of features; the first dim is the batch"
        )
    if ndim == 2:
        return replace(layout, dims=(batch, feature), zigzag=frozenset())
    return replace(layout, dims=(batch, sequence, *((),) * (ndim - 3), feature))


class Current(NamedTuple):
    """The mode of this job and its mesh; before a launch there is none."""

    tp: TensorParallel
    mesh: Mesh | None


_rows: WeakKeyDictionary[Mesh, TensorParallel] = WeakKeyDictionary()


def current() -> Current:
    """The mode that the job was launched with.  Before a launch layers are serial, and so they are in mode
    'sequence': they work on single tokens.

    Row axes are no part of it: whatever averages gradients of whole models over data also does so over a
    sequence that is cut (:mod:`colossalai.nn.sequence`).
    """
    if not gpc.is_initialized(ParallelMode.TENSOR):
        return Current(mode_serial(), None)
    plan, mesh = gpc.plan, gpc.mesh
    if plan.tensor == 1 or plan.mode in (None, "sequence"):
        return Current(replace(mode_serial(), mode=plan.mode), mesh)
    if mesh not in _rows:
        _rows[mesh] = tensor_parallel(plan.mode, plan.tensor, **plan.options)
    return Current(_rows[mesh], mesh)


# Where the next Linear without a role will find the stream.
_cursors: WeakKeyDictionary[Mesh, Where] = WeakKeyDictionary()


def stream_position(mesh: Mesh) -> Where:
    """Where the last ``Linear`` that was built without a role left the stream."""
    return _cursors.get(mesh, "hidden")


def set_stream_position(where: Where, mesh: Mesh) -> None:
    """Say where the next ``Linear`` without a role begins."""
    _cursors[mesh] = where
