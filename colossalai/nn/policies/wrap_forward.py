"""Modules of an existing model with something done around their forward.

``wrap_forward`` gives one module a subclass of its own class, under the same name: so ``isinstance``,
parameter names, hooks and copies go on as before, and the code of the model is not touched.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from colossalai.mesh import (
    PIPELINE_AXIS,
    Axes,
    Layout,
    Mesh,
    placement,
    random_key,
    redistribute,
    replicated,
    serial_tensor,
    shard,
    use,
)
from colossalai.mesh.agreement import FirstStep
from colossalai.mesh.gradient_norm import tensor_axes
from colossalai.mesh.rows import sequence_axes
from colossalai.nn.layer.batch import split_rows
from colossalai.nn.logits import Logits
from colossalai.nn.modes import TensorParallel, at_rank
from colossalai.nn.random_streams import active, draws_own, forked, own_numbers, seed, switch_numbers

M = TypeVar("M", bound=nn.Module)
Forward = Callable[..., Any]


class ForwardWrapper:
    """Code around the forward of a module; a subclass writes ``around``."""

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return forward(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # by its parts: under the name of its class, pickle finds the class that it was made of
        native: type[Any] = type(self)
        done = []
        while native in _made_of:
            native, what = _made_of[native]
            done.append(what)
        return _new, (native, *reversed(done)), self.__getstate__()  # type: ignore[attr-defined]


def wrap_forward(module: M, what: type[ForwardWrapper]) -> M:
    """Make ``module`` do ``what`` around its forward."""
    module.__class__ = _class_of(type(module), what)  # type: ignore[assignment]
    return module


def _class_of(native: type[nn.Module], what: type[ForwardWrapper]) -> type[nn.Module]:
    if (native, what) not in _classes:
        made = _classes[native, what] = _subclass(native, what)
        _made_of[made] = native, what
    return _classes[native, what]


def _new(native: type[nn.Module], *done: type[ForwardWrapper]) -> nn.Module:
    """A module of the class that ``wrap_forward`` made, without its attributes yet."""
    for what in done:
        native = _class_of(native, what)
    return native.__new__(native)


_classes: dict[tuple[type[nn.Module], type[ForwardWrapper]], type[nn.Module]] = {}
_made_of: dict[type[Any], tuple[type[nn.Module], type[ForwardWrapper]]] = {}


def _subclass(native: type[nn.Module], what: type[ForwardWrapper]) -> type[nn.Module]:
    @functools.wraps(native.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return what.around(self, functools.partial(native.forward, self), args, kwargs)

    # the names stay: messages, and transformers when it saves, say which class a model is
    names = {"__module__": native.__module__, "__qualname__": native.__qualname__, "__doc__": native.__doc__}
    return type(native.__name__, (what, native), {"forward": forward, **names})


def forward_inside(module: nn.Module, what: type[ForwardWrapper]) -> Forward:
    """The forward, not bound, that ``what`` is around, or that of the module where ``what`` is not."""
    native: type[Any] = type(module)
    while native in _made_of:
        native, done = _made_of[native]
        if done is what:
            return native.forward
    return type(module).forward


def native_class(module: nn.Module) -> Any:
    """The class of the model itself, below what stages and ``parallelize`` add."""
    classes = (c for c in type(module).__mro__ if issubclass(c, nn.Module))  # FSDP2 adds one that is none
    return next(c for c in classes if not issubclass(c, ForwardWrapper))


# ---- random numbers ----


class OwnNumbers(ForwardWrapper):
    """Draws numbers of this rank's own while training, for what is cut inside of it."""

    training: bool
    drawn_over: tuple[Axes, Mesh]
    draws_always: bool = False
    """Whether it is known to drop something, though its attributes do not say so."""
    starts_own: bool = True

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert isinstance(self, nn.Module)
        if not self.training or not (self.draws_always or _drops(self)):
            return forward(*args, **kwargs)
        with own_numbers(*self.drawn_over, switches=True, own=self.starts_own):
            return forward(*args, **kwargs)


def _drops(module: nn.Module) -> bool:
    """Whether ``module`` has dropout: as a module, or as a rate among its attributes."""
    rates = [rate for name, rate in vars(module).items() if "dropout" in name]
    rates += [m.p for m in module.modules() if isinstance(m, nn.Dropout)]
    return any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)


class SwitchesNumbers(ForwardWrapper):
    """A linear layer behind which ranks hold pieces of the activations, or hold them whole again."""

    role: str

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = forward(*args, **kwargs)
        switch_numbers(own=self.role == "expand")
        return result


class AlikeNumbers(ForwardWrapper):
    """Draws what all ranks draw, also inside a module that draws its own."""

    training: bool

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.training or not draws_own():
            return forward(*args, **kwargs)
        numbers = active[-1]
        numbers.taken += 1
        with forked():
            seed(random_key(numbers.key, "alike", numbers.taken))
            numbers.is_own = False
            try:
                return forward(*args, **kwargs)
            finally:
                numbers.is_own = True


# ---- parameters ----


class UsedByPieces(ForwardWrapper):
    """Its parameters are about to be used for this rank's piece of the activations: their gradients are
    summed.
    """

    used_over: tuple[frozenset[str], Mesh]
    used_names: frozenset[str] | None = None
    """Those of its parameters that are; None for all."""
    _parameters: dict[str, Any]

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = {n: p for n, p in self._parameters.items() if self.used_names is None or n in self.used_names}
        axes, mesh = self.used_over
        try:
            for name, param in own.items():
                if param is not None:
                    self._parameters[name] = use(param, axes, mesh)
            return forward(*args, **kwargs)
        finally:
            self._parameters.update(own)


class RepeatedPart(ForwardWrapper):
    """A linear layer that is whole on every rank and computes a part of its output, which several ranks may
    share.
    """

    weight: Tensor
    bias: Tensor | None
    part: tuple[int, int]
    used_over: tuple[frozenset[str], Mesh]

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (x,), (axes, mesh) = args, self.used_over
        whole = replicated(x.ndim)
        x = redistribute(
            x, whole, Layout(whole.dims, spread=axes), mesh
        )  # its gradient is a sum of all ranks'
        weight = use(self.weight, axes, mesh)
        weight = weight.t() if type(self).__name__ == "Conv1D" else weight
        bias = None if self.bias is None else use(self.bias, axes, mesh).narrow(0, *self.part)
        result = F.linear(x, weight.narrow(0, *self.part), bias)
        switch_numbers(own=True)
        return result


class DividesFirst(ForwardWrapper):
    """A linear layer with outputs that all ranks need behind those that are divided among them."""

    first: tuple[int, int, int]
    """How many outputs are divided, and where this rank's begin and how many they are."""
    used_over: tuple[frozenset[str], Mesh]

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        y, (axes, mesh), (count, start, length) = forward(*args, **kwargs), self.used_over, self.first
        whole = replicated(y.ndim)
        y = redistribute(
            y, whole, Layout(whole.dims, spread=axes), mesh
        )  # its gradient is a sum of all ranks'
        return torch.cat([y.narrow(-1, start, length), y[..., count:]], -1)


class ScaledEntries(ForwardWrapper):
    """A table whose entries are multiplied by a number."""

    embed_scale: float

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return forward(*args, **kwargs) * self.embed_scale


class MergesPiece(ForwardWrapper):
    """A layer of LoRA of which all ranks hold the products, around a module of which each has a piece."""

    merged_over: Mesh

    def get_delta_weight(self, adapter: str) -> Tensor:
        """What PEFT adds to the weight when it merges an adapter, or takes from it."""
        whole: Tensor = super().get_delta_weight(adapter)  # type: ignore[misc]
        weight: Tensor = self.get_base_layer().weight  # type: ignore[attr-defined]
        return shard(whole, placement(weight), self.merged_over, uneven=True)


# ---- arguments ----


class SlicesArguments(ForwardWrapper):
    """Gets this rank's heads of arguments of which all ranks have the whole."""

    sliced: tuple[dict[str, tuple[int, int, bool]], Axes, Mesh]
    on_slice: Callable[[Tensor], Any] | None = None
    """Told of each slice, in a trace of the plan."""

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names, positional = argument_names(forward), list(args)
        for name in self.sliced[0]:
            if name in kwargs:
                kwargs = {**kwargs, name: self._slice(name, kwargs[name])}
            elif name in names[: len(positional)]:
                place = names.index(name)
                positional[place] = self._slice(name, positional[place])
        return forward(*positional, **kwargs)

    def _slice(self, name: str, value: Any) -> Any:
        rows, axes, mesh = self.sliced
        dim, heads, with_rows = rows[name]
        # a bias that is the same for all heads, or that an earlier module has made of its own heads
        if not isinstance(value, Tensor) or (not with_rows and value.size(dim) != heads):
            return value
        split = value.unflatten(dim, (-1, heads))
        whole = replicated(split.ndim)
        cut = Layout(tuple(axes if d == dim + 1 else () for d in range(split.ndim)))
        piece = redistribute(split, whole, cut, mesh).flatten(dim, dim + 1)
        if self.on_slice is not None:
            self.on_slice(piece)
        return piece


# ---- where the stream begins and ends ----


class WholeInput(ForwardWrapper):
    """Gets the whole of its input, of which each rank holds a piece of the residual stream."""

    cut_as: tuple[TensorParallel, Mesh]

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tp, mesh = self.cut_as
        x, *rest = args
        return forward(redistribute(x, at_rank(tp.hidden, x.ndim), replicated(x.ndim), mesh), *rest, **kwargs)


class WholeRows(ForwardWrapper):
    """A classifier whose scores are whole on every rank; its input may be whole already."""

    tp: TensorParallel
    mesh: Mesh
    in_features: int
    num_classes: int
    logits: Layout

    def place(self) -> Logits:
        """Where the scores lie: a loss of ours must not take them for this rank's rows."""
        return Logits(replicated(len(self.logits.dims)), self.num_classes)

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (x,) = args
        if x.size(-1) == self.in_features:
            x = redistribute(x, replicated(x.ndim), at_rank(self.tp.hidden, x.ndim), self.mesh)
        y = forward(x)
        return redistribute(y, at_rank(self.logits, y.ndim), replicated(y.ndim), self.mesh)


# What says how many rows the batch has.
_BATCHES = ("input_ids", "inputs_embeds", "pixel_values")


class CutStream(ForwardWrapper):
    """Takes a whole batch and works on this rank's rows and features of the residual stream."""

    training: bool
    cut_as: tuple[TensorParallel, Mesh]
    attended: frozenset[str]
    prepare: Callable[[dict[str, Any]], dict[str, Any]] | None

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tp, mesh = self.cut_as
        given = given_by_name(forward, args, kwargs)
        if self.prepare is not None:
            given = self.prepare(given)
        rows = next((len(given[name]) for name in _BATCHES if given.get(name) is not None), None)
        given = {name: self._piece(name, value, rows) for name, value in given.items()}
        with own_numbers(tp.hidden.sharded, mesh) if self.training else nullcontext():
            return forward(**given)

    def _piece(self, name: str, value: Any, rows: int | None) -> Any:
        """This rank's part of an argument; what is no tensor, or serves all rows, stays as it is."""
        tp, mesh = self.cut_as
        if not isinstance(value, Tensor) or value.ndim < 2:
            return value
        if name == "encoder_hidden_states":
            return _of_our_encoder(value, rows, mesh.group_size(*tp.hidden.dims[0]))
        if len(value) != rows:
            return value
        if name == "inputs_embeds":
            split_rows(
                value.detach(), tp.hidden.dims[0], mesh, 0
            )  # a batch that does not divide is refused by name
            return redistribute(value, replicated(3), tp.hidden, mesh)
        part = split_rows(value, (tp.inner if name in self.attended else tp.hidden).dims[0], mesh, 0)
        if part.requires_grad:  # images: each rank makes its own features of them
            rest = Layout((tp.hidden.dims[0], *((),) * (part.ndim - 1)))
            features = frozenset(tp.hidden.dims[-1])
            part = redistribute(part, rest, Layout(rest.dims, spread=features), mesh)
        return part


def _of_our_encoder(states: Tensor, rows: int | None, parts: int) -> Tensor:
    """What the encoder of the same model returned is cut already; anything else has another number of
    rows.
    """
    if rows is not None and len(states) * parts != rows:
        raise ValueError(
            f"encoder_hidden_states of {len(states)} rows do not fit a batch of {rows}, of which this rank"
            f" holds {rows // parts}: they must come from this model's own encoder"
        )
    return states


def argument_names(forward: Forward) -> list[str]:
    return list(inspect.signature(forward).parameters)


def given_by_name(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of ``forward``, by their names."""
    return {**dict(zip(argument_names(forward), args, strict=False)), **kwargs} if args else dict(kwargs)


def source_of(forward: Callable[..., Any]) -> str:
    """The code of ``forward`` below what wraps it; empty where it is not at hand."""
    try:
        return inspect.getsource(inspect.unwrap(forward))
    except OSError:
        return ""


# ---- the model as a whole ----

_STREAM = (
    "last_hidden_state",
    "hidden_states",
    "encoder_last_hidden_state",
    "encoder_hidden_states",
    "decoder_hidden_states",
)
_SCORES = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")


def save_whole_model(
    model: Any, save: Callable[..., None], mesh: Mesh, save_directory: Any, options: dict[str, Any]
) -> None:
    """Let rank 0 write the whole of a cut model by ``save``, that of transformers; every rank calls this."""
    assert isinstance(model, nn.Module)
    if "state_dict" in options:
        raise ValueError(
            "save_pretrained of a model that is cut over ranks writes the whole model, and takes no"
            " state_dict, of which a rank has pieces; leave it out. Another dtype is given when it is"
            " loaded (from_pretrained(..., dtype=...))"
        )
    state = whole_state_dict(model, mesh, keep=mesh.rank == 0)
    if mesh.rank == 0:
        save(save_directory, state_dict=state, **options)
    dist.barrier()


class WholeOutputs(ForwardWrapper):
    """The model itself: what it returns is whole on every rank, but for the cache of keys and values."""

    cut_as: tuple[TensorParallel, Mesh]
    cut_scores: Logits | None
    """Where scores lie of which the model computes its loss from pieces."""
    cut_attentions: bool
    """Whether attentions that it returns are those of this rank's heads."""
    first_step: FirstStep
    """Compares, once, what the ranks must have alike."""

    def save_pretrained(self, save_directory: Any, **options: Any) -> None:
        """Write the whole model as transformers does; every rank must call it, and rank 0 writes."""
        save = super().save_pretrained  # type: ignore[misc]
        save_whole_model(self, save, self.cut_as[1], save_directory, options)

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # names are needed to know what is cut, so the result becomes a tuple afterwards
        asked = kwargs.get("return_dict")
        as_tuple = not (
            getattr(getattr(self, "config", None), "return_dict", True) if asked is None else asked
        )
        assert isinstance(self, nn.Module)
        if not self.first_step.done:
            self.first_step.before(self, given_by_name(forward, args, kwargs))
        out = forward(*args, **{**kwargs, "return_dict": True} if as_tuple else kwargs)
        if not self.first_step.done:
            self.first_step.after(self, out)
        if not hasattr(out, "keys"):
            return out
        tp = self.cut_as[0]
        scores = _SCORES if self.cut_attentions else ()
        for names, layout in ((_STREAM, tp.hidden), (scores, tp.heads)):
            for name in names:
                if layout.sharded and out.get(name) is not None:
                    out[name] = self._whole(out[name], layout)
        if self.cut_scores is not None and out.get("loss") is None:
            out["logits"] = self._whole_scores(out["logits"], self.cut_scores)
        return out.to_tuple() if as_tuple else out

    def _whole_scores(self, pieces: Tensor, place: Logits) -> Tensor:
        mesh, layout = self.cut_as[1], place.layout
        shape = (len(pieces) * mesh.group_size(*layout.dims[0]), *pieces.shape[1:-1], place.classes)
        return redistribute(pieces, layout, layout.whole(), mesh, shape)

    def _whole(self, value: Any, layout: Layout) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(self._whole(v, layout) for v in value)
        return (
            redistribute(value, layout, layout.whole(), self.cut_as[1])
            if isinstance(value, Tensor)
            else value
        )


def first_step(mesh: Mesh) -> FirstStep:
    """What compares the first step of a model that is cut over ``mesh``; the batch of a pipeline is compared
    where it is cut.
    """
    shared = (*sequence_axes(mesh), *tensor_axes(mesh))
    return FirstStep(mesh, () if mesh.size.get(PIPELINE_AXIS, 1) > 1 else shared)


def whole_state_dict(model: nn.Module, mesh: Mesh, *, keep: bool = True) -> dict[str, Tensor]:
    """The state of ``model`` as the serial model has it, on the CPU of the ranks that ``keep`` it; all must
    call this.

    One tensor at a time is gathered.  Names that share a tensor share it here as well.
    """
    whole: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in whole:
            full = serial_tensor(tensor, tensor, mesh)
            whole[id(tensor)] = full.contiguous().cpu() if keep else full.new_empty(0)
        state[name] = whole[id(tensor)]
    return state if keep else {}
