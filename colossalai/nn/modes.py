"""The tensor-parallel modes: a mode is a small table of layouts, and everything else is derived from it.

``hidden`` and ``inner`` are the two places where activations rest: the residual stream, and the stream between an
expanding linear and the contracting one after it.  In 2D and 2.5D the two coincide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from colossalai.context.tensor_modes import tensor_mode
from colossalai.mesh import Axes, Layout


@dataclass(frozen=True)
class TensorParallel:
    """Where activations and weights rest under one mode.  Activations are (batch, sequence, feature)."""

    axes: dict[str, int]
    hidden: Layout
    inner: Layout
    expand: Layout
    """Weight (in, out) of a linear from hidden to inner."""
    contract: Layout
    """Weight (in, out) of a linear from inner to hidden."""
    vocab: Layout
    """Table (vocabulary, feature)."""

    @property
    def feature(self) -> Layout:
        """A vector along the features of the residual stream: a norm's weight, a contracting linear's bias."""
        return Layout((self.hidden.dims[-1],))

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
    )


def mode_2p5d(q: int, depth: int) -> TensorParallel:
    activation = Layout((("dep", "row"), (), ("col",)))
    weight = Layout((("row",), ("col",)))
    return TensorParallel({"dep": depth, "row": q, "col": q}, activation, activation, weight, weight, weight)


def mode_2d(q: int) -> TensorParallel:
    activation, weight = Layout((("row",), (), ("col",))), Layout((("row",), ("col",)))
    return TensorParallel({"row": q, "col": q}, activation, activation, weight, weight, weight)


def mode_3d(q: int) -> TensorParallel:
    # The documented placement: X_ijl holds rows (i, j) and columns l; A_lji holds rows l and columns (j, i).
    return TensorParallel(
        axes={"l": q, "j": q, "i": q},
        hidden=Layout((("i", "j"), (), ("l",))),
        inner=Layout((("i", "l"), (), ("j",))),
        expand=Layout((("l",), ("j", "i"))),
        contract=Layout((("j",), ("l", "i"))),
        vocab=Layout((("j",), ("l", "i"))),
    )


def tensor_parallel(mode: str | None, size: int = 1, depth: int = 1) -> TensorParallel:
    """The layouts of a mode by its documented name: None, '1d', '2d', '2.5d' or '3d'."""
    table: dict[str | None, Callable[[dict[str, int]], TensorParallel]] = {
        None: lambda _: mode_serial(),
        "1d": lambda axes: mode_1d(axes["tp"]),
        "2d": lambda axes: mode_2d(axes["row"]),
        "2.5d": lambda axes: mode_2p5d(axes["row"], axes["dep"]),
        "3d": lambda axes: mode_3d(axes["l"]),
    }
    if mode not in table:
        raise ValueError(
            f"unknown tensor-parallel mode {mode!r}; the modes are {', '.join(map(repr, table))}"
        )
    row = tensor_mode(mode)
    try:
        axes = row.sizes(size, **({"depth": depth} if "depth" in row.options else {}))
    except ValueError as error:
        raise ValueError(f"tensor-parallel mode {mode!r}: {error}") from None
    return table[mode](axes)


def with_data_parallel(tp: TensorParallel, size: int, shard_weights: bool = False) -> TensorParallel:
    """Data parallelism is one more axis that cuts the batch; with ZeRO-3 it cuts the weights at rest as well."""

    def batch(layout: Layout) -> Layout:
        return replace(layout, dims=(("dp", *layout.dims[0]), *layout.dims[1:]))

    def weight(layout: Layout) -> Layout:
        last: Axes = (*layout.dims[-1], "dp")
        return replace(layout, dims=(*layout.dims[:-1], last)) if shard_weights else layout

    return TensorParallel(
        axes={"dp": size, **tp.axes},
        hidden=batch(tp.hidden),
        inner=batch(tp.inner),
        expand=weight(tp.expand),
        contract=weight(tp.contract),
        vocab=weight(tp.vocab),
    )
