"""The rules for modules of an existing model, one small class for each.

A rule takes a native module and returns what stands in its place: this rank's piece, or the module itself
with a few attributes adapted.  Where a mode leaves the residual stream whole (1D), modules that only work on
the stream stay as they are; every rank does the same there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from colossalai._numeric import round_up
from colossalai.mesh import Axes, Layout, Mesh, local_range, parameter
from colossalai.nn.layer.base import mark
from colossalai.nn.layer.classifier import Classifier
from colossalai.nn.layer.embedding import Embedding
from colossalai.nn.layer.linear import Linear
from colossalai.nn.layer.normalization import LayerNorm, RMSNorm
from colossalai.nn.modes import TensorParallel, Where
from colossalai.nn.policies.wrap_forward import (
    AlikeNumbers,
    CutStream,
    DividesFirst,
    ForwardWrapper,
    OwnNumbers,
    RepeatedPart,
    ScaledEntries,
    SlicesArguments,
    SwitchesNumbers,
    UsedByPieces,
    WholeInput,
    WholeRows,
    wrap_forward,
)


@dataclass(frozen=True)
class CutContext:
    """The mode and mesh that a model is cut for, and the pieces of the parameters that several modules
    share.
    """

    tp: TensorParallel
    mesh: Mesh
    whole_scores: bool = True
    """Whether the scores of words are whole on every rank."""
    shared: frozenset[int] = frozenset()
    """The ids of parameters that more than one module holds."""
    pieces: dict[int, tuple[nn.Parameter, nn.Parameter]] = field(default_factory=dict)
    """By the id of such a parameter, itself (so that the id stays its own) and its piece."""

    @property
    def stream_is_cut(self) -> bool:
        """Whether ranks hold different rows or features of the residual stream."""
        return bool(self.tp.hidden.sharded)

    def tie(self, layer: nn.Module, native: Mapping[str, nn.Parameter | None]) -> None:
        """Where the module that ``layer`` replaces shared one of its parameters ``native`` with another,
        ``layer`` shares its piece.
        """
        for name, param in native.items():
            if param is not None and isinstance(piece := getattr(layer, name, None), nn.Parameter):
                setattr(layer, name, self.one(param, piece))

    def one(self, param: nn.Parameter, piece: nn.Parameter) -> nn.Parameter:
        """``piece``, or what was made of ``param`` before, where several modules share it."""
        if id(param) not in self.shared:
            return piece
        return self.pieces.setdefault(id(param), (param, piece))[1]

    def piece_of(self, param: Tensor) -> nn.Parameter | None:
        return self.pieces[id(param)][1] if id(param) in self.pieces else None


class Rule(Protocol):
    def cut(self, module: nn.Module, context: CutContext) -> nn.Module:
        """What stands in the place of ``module`` on this rank."""
        ...


def is_product(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer and nothing else: torch's, a subclass that computes the same, or
    ``Conv1D``.
    """
    kind: Any = type(module)
    if kind is nn.Linear or kind.__name__ == "Conv1D":
        return True
    return isinstance(module, nn.Linear) and _computes_linear(kind)


@cache
def _computes_linear(kind: type[nn.Linear]) -> bool:
    """Whether a subclass of ``nn.Linear`` gives what it would give, on a small example."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        native = nn.Linear(5, 3)
        own = copy.copy(native)
        own.__class__ = kind
        x = torch.randn(2, 4, 5)
        try:
            return torch.allclose(own(x), native(x), atol=1e-5)
        except Exception:  # it needs attributes of its own, so it does more
            return False


def sizes_of(module: nn.Module) -> tuple[int, int]:
    """The numbers of input and of output features of a linear layer."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    n_in, n_out = weight.shape if type(module).__name__ == "Conv1D" else weight.shape[::-1]
    return n_in, n_out


@dataclass(frozen=True)
class Cut:
    """A linear layer, ``nn.Linear`` or Hugging Face's ``Conv1D``.

    It expands the stream, contracts it again, or does neither (``"stay"``).  ``fused``: its output holds that
    many blocks, such as query, key and value, each of which is cut.  ``whole_input``: a contracting layer
    gets all features on every rank.  ``whole_output``: so does what follows an expanding one.
    ``divided``: of the outputs of an expanding layer, a rank gets its part of this many, and all others.
    """

    role: Literal["expand", "contract", "stay"]
    fused: int = 1
    whole_input: bool = False
    whole_output: bool = False
    divided: int = 0

    def cut(self, module: nn.Module, context: CutContext) -> nn.Module:
        tp = context.tp
        if not is_product(module):
            kind = type(module)
            home = "" if kind.__module__.startswith("torch.") else f"{kind.__module__}."
            raise ValueError(
                f"Cut() is for nn.Linear and Conv1D, got a {home}{kind.__name__}; plugins (DDP, FSDP, ZeRO,"
                " Gemini) and pipelines take any layer"
            )
        if self.role != "stay":
            layer = Linear.from_native(
                module,
                self.role,
                tp=tp,
                mesh=context.mesh,
                fused=self.fused,
                gather_output=self.whole_output or self.divided > 0,
                parallel_input=not self.whole_input,
            )
            if self.divided:
                start, length = local_range(self.divided, tp.inner.dims[-1], context.mesh)
                wrap_forward(layer, DividesFirst)
                layer.first = self.divided, start, length  # type: ignore[assignment]
                layer.used_over = frozenset(tp.inner.dims[-1]), context.mesh  # type: ignore[assignment]
            switches = not context.stream_is_cut and not self.whole_output
            return wrap_forward(layer, SwitchesNumbers) if switches else layer
        if not context.stream_is_cut:
            return module
        # from the stream to the stream: the weight rests cut by all axes, and only its columns are cut in use
        stays = replace(tp, inner=tp.hidden, expand=Layout((tp.hidden.dims[0], tp.hidden.dims[-1])))
        return Linear.from_native(module, "expand", tp=stays, mesh=context.mesh)


@dataclass(frozen=True)
class Table:
    """A large embedding table, cut along its vocabulary, which need not divide."""

    def cut(self, module: nn.Module, context: CutContext) -> nn.Module:
        scale = embedding_scale(module)
        if scale is None or not isinstance(module, nn.Embedding):
            raise ValueError(
                f"a {type(module).__name__} may do more than look entries up; Table() is for nn.Embedding"
                " itself"
            )
        layer = Embedding.from_native(module, tp=context.tp, mesh=context.mesh, vocab_parallel=True)
        if scale != 1.0:
            wrap_forward(layer, ScaledEntries)
            layer.embed_scale = scale  # type: ignore[assignment]
        return layer


def embedding_scale(module: nn.Module) -> float | None:
    """What an ``nn.Embedding``, or a subclass that only scales, multiplies entries with; None if it does
    more.
    """
    if type(module) is nn.Embedding:
        return 1.0
    scale = getattr(module, "embed_scale", None)
    if not isinstance(module, nn.Embedding) or not isinstance(scale, (int, float)):
        return None
    own = copy.copy(module)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        own._parameters = {"weight": nn.Parameter(torch.randn(module.num_embeddings, 2))}
        ids = torch.arange(min(8, module.num_embeddings))
        try:
            alike = torch.allclose(own(ids), own.weight[ids] * scale)
        except Exception:
            return None
    return float(scale) if alike else None


@dataclass(frozen=True)
class Head:
    """The last linear layer, to the scores of classes, which every rank gets whole: so any loss computed from
    them is right.

    ``vocabulary``: there are many classes, and the weight is cut along them, or lies as the table that it is
    tied to; then scores may stay cut as well, if ``parallelize`` was asked for that.
    """

    vocabulary: bool = True

    def cut(self, module: nn.Module, context: CutContext) -> nn.Module:
        if type(module) is not nn.Linear:
            changed = isinstance(module, ForwardWrapper)  # its name is that of the class it was made of
            raise ValueError(
                f"Head() is for nn.Linear, got a {type(module).__name__}"
                + " that computes the loss; give whole_scores=False to parallelize, not to chunk_causal_loss"
                * changed
            )
        tied = context.piece_of(module.weight)
        if not (context.stream_is_cut or self.vocabulary):
            return module
        whole = context.whole_scores or not self.vocabulary
        layer = Classifier.from_native(
            module,
            tp=context.tp,
            mesh=context.mesh,
            weight=tied,
            vocab_parallel=self.vocabulary,
            gather_output=whole and self.vocabulary,
        )
        return wrap_forward(layer, WholeRows) if whole and context.stream_is_cut else layer


@dataclass(frozen=True)
class Norm:
    """A LayerNorm, or with ``rms`` an RMSNorm, of the residual stream."""

    rms: bool = False

    def cut(self, module: nn.Module, context: CutContext) -> nn.Module:
        if not context.stream_is_cut:
            return module
        if self.rms:
            return RMSNorm.from_native(module, tp=context.tp, mesh=context.mesh)
        if type(module) is not nn.LayerNorm:
            raise ValueError(
                f"Norm() is for nn.LayerNorm, and with rms=True for RMS norms; got a {type(module).__name__}"
            )
        return LayerNorm.from_native(module, tp=context.tp, mesh=context.mesh)


@dataclass(frozen=True)
class Pieces:
    """A module that keeps its own forward and gets pieces of its parameters.

    ``dims`` gives for each parameter the dim that holds features, or None where it is whole; without ``dims``
    all are whole.  ``at`` is where the result is used: on the residual stream, or between the linears, such
    as on heads.
    """

    at: Where
    dims: dict[str, int | None] | None = None

    def cut(self, module: nn.Module, context: CutContext) -> nn.Module:
        place = context.tp.rest(self.at)
        if not place.sharded:
            return module
        names = [name for name, _ in module.named_parameters(recurse=False)]
        dims = dict.fromkeys(names) if self.dims is None else self.dims
        for name in names:
            if name not in dims:
                raise ValueError(f"the policy does not say how its parameter {name!r} is cut")
            native = module._parameters[name]
            assert native is not None
            layout = _one_cut(native.ndim, dims[name], place.dims[-1])
            piece = parameter(native, layout, context.mesh)
            mark(piece, context.mesh.group_size(*layout.sharded))
            module._parameters[name] = context.one(native, piece)
        wrap_forward(module, UsedByPieces)
        module.used_over = frozenset(place.sharded), context.mesh  # type: ignore[assignment]
        return module


def _one_cut(ndim: int, dim: int | None, axes: Axes) -> Layout:
    return Layout(tuple(axes if d == dim else () for d in range(ndim)))


@dataclass(frozen=True)
class Summed:
    """A module whose parameters ``names`` stay whole and are applied to this rank's features: their gradients
    are summed.
    """

    names: frozenset[str]

    def cut(self, module: nn.Module, context: CutContext) -> nn.Module:
        wrap_forward(module, UsedByPieces)
        module.used_over = frozenset(context.tp.inner.sharded), context.mesh  # type: ignore[assignment]
        module.used_names = self.names  # type: ignore[assignment]
        return module


@dataclass(frozen=True)
class Heads:
    """An attention module: it sees this rank's heads, and its dropout is this rank's own.

    ``counts`` and ``sizes`` are the attributes with a number of heads, or of features of all heads; those
    that this module has are divided.
    """

    counts: Sequence[str] = ("num_heads", "num_attention_heads", "num_key_value_heads", "n_heads")
    sizes: Sequence[str] = ()

    def cut(self, module: nn.Module, context: CutContext) -> nn.Module:
        parts = context.mesh.group_size(*context.tp.inner.dims[-1])
        for name in (*self.counts, *self.sizes):
            whole = getattr(module, name, None)
            if whole is None:
                continue
            check_heads(f"{type(module).__name__}.{name}", int(whole), context)
            setattr(module, name, whole // parts)
        return module if context.stream_is_cut else own_numbers(module, context)


@dataclass(frozen=True)
class Attributes:
    """A module whose attributes have the given values on a rank, such as numbers of its heads."""

    values: Mapping[str, int]

    def cut(self, module: nn.Module, context: CutContext) -> nn.Module:
        for name, value in self.values.items():
            setattr(module, name, value)
        return own_numbers(module, context)


@dataclass(frozen=True)
class SlicedArguments:
    """A module that is given this rank's heads of some arguments, such as a bias of positions.

    ``heads`` has for each argument the dim and the number of all heads, and whether the dim is that of rows
    and heads in one.
    """

    heads: Mapping[str, tuple[int, int, bool]]

    def cut(self, module: nn.Module, context: CutContext) -> nn.Module:
        wrap_forward(module, SlicesArguments)
        module.sliced = dict(self.heads), context.tp.inner.dims[-1], context.mesh  # type: ignore[assignment]
        return module


@dataclass(frozen=True)
class Repeated:
    """A linear layer to fewer heads than there are ranks, such as keys: it is whole on every rank, which
    computes one of ``groups`` parts of its output.
    """

    groups: int

    def cut(self, module: nn.Module, context: CutContext) -> nn.Module:
        axes = context.tp.inner.dims[-1]
        n_out, parts = sizes_of(module)[1], context.mesh.group_size(*axes)
        if n_out % self.groups or parts % self.groups:
            raise ValueError(
                f"its {n_out} output features cannot be {self.groups} parts for {parts} ranks alike"
            )
        index = local_range(parts, axes, context.mesh)[0] * self.groups // parts
        wrap_forward(module, RepeatedPart)
        module.part = index * (n_out // self.groups), n_out // self.groups  # type: ignore[assignment]
        module.used_over = frozenset(axes), context.mesh  # type: ignore[assignment]
        return module


def check_heads(what: str, number: int, context: CutContext) -> None:
    """Refuse a number of heads that the ranks cannot share, naming those that they can."""
    axes = context.tp.inner.dims[-1]
    parts = context.mesh.group_size(*axes)
    if number % parts == 0 and number > 0:
        return
    names = " x ".join(f"{a}={context.mesh.size[a]}" for a in axes)
    below, above = number // parts * parts, round_up(number, parts)
    divisors = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
    raise ValueError(
        f"{what}={number} is cut by {names} into {parts} parts of whole heads; the nearest valid numbers are "
        f"{f'{below} and {above}' if below else above}, or cut into one of {divisors} parts"
    )


@dataclass(frozen=True)
class InnerDropout:
    """A dropout between an expanding and a contracting linear, or a module that has one: every rank draws for
    its own features.
    """

    def cut(self, module: nn.Module, context: CutContext) -> nn.Module:
        if context.stream_is_cut:
            return module
        own_numbers(module, context)
        module.draws_always = True  # type: ignore[assignment]
        module.starts_own = isinstance(module, nn.Dropout)  # type: ignore[assignment]
        return module


@dataclass(frozen=True)
class StreamDropout:
    """A dropout of the residual stream that stands inside an attention module: all ranks draw the same."""

    def cut(self, module: nn.Module, context: CutContext) -> nn.Module:
        return module if context.stream_is_cut else wrap_forward(module, AlikeNumbers)


def own_numbers(module: nn.Module, context: CutContext) -> nn.Module:
    wrap_forward(module, OwnNumbers)
    module.drawn_over = context.tp.inner.sharded, context.mesh  # type: ignore[assignment]
    return module


@dataclass(frozen=True)
class Gathered:
    """A small module that stays whole on every rank and gets the whole of its input."""

    def cut(self, module: nn.Module, context: CutContext) -> nn.Module:
        if not context.stream_is_cut:
            return module
        wrap_forward(module, WholeInput)
        module.cut_as = context.tp, context.mesh  # type: ignore[assignment]
        return module


@dataclass(frozen=True)
class Stream:
    """The part of a model whose activations are the residual stream: it takes the whole batch and works on
    its pieces.

    ``attended`` are the arguments that attention reads, so that they are cut like its rows.  ``prepare`` may
    add arguments that follow from the whole ones.
    """

    attended: Sequence[str] = ("attention_mask", "encoder_attention_mask")
    prepare: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    def cut(self, module: nn.Module, context: CutContext) -> nn.Module:
        if not context.stream_is_cut:
            return module
        wrap_forward(module, CutStream)
        module.cut_as = context.tp, context.mesh  # type: ignore[assignment]
        module.attended = frozenset(self.attended)  # type: ignore[assignment]
        module.prepare = self.prepare  # type: ignore[assignment]
        return module
