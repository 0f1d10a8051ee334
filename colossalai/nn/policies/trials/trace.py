"""A dry run of a tensor-parallel plan on the meta device, before the model is cut.

The model runs twice without values: whole, and then with small stand-ins for the layers that the plan cuts.
A module that works whole and fails cut is refused by name.  In the second pass ``Flow`` follows the cut
activations.

A tensor is *cut* if each rank holds other features of it, which begins behind an expanding linear layer and
ends before a contracting one.  ``Flow`` sees every operation in between, below autograd, so it does not
matter how a model is written:

- a parameter that all ranks hold and apply to cut features: its gradient on a rank is a part of the sum;
- an activation that all ranks hold and that meets cut features outside a layer of ours: so is its gradient;
- a statistic (mean, norm, softmax ...) over the features of which a rank has a piece: it would be that of the
  piece;
- random numbers for cut features that all ranks draw alike, or for whole ones that each rank draws for
  itself.

Operations that ``Flow`` does not know pass unchecked.  A model that cannot run without values (unknown
inputs, code that reads values) is not traced; the comparison of gradients in its first step checks it
instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colossalai.mesh import placement
from colossalai.nn.layer.embedding import DEFAULTS
from colossalai.nn.policies.cutting.experts import CutExperts
from colossalai.nn.policies.cutting.latent_attention import LatentKeys
from colossalai.nn.policies.cutting.policy import Match
from colossalai.nn.policies.cutting.rules import (
    Cut,
    CutContext,
    Head,
    Repeated,
    Rule,
    SlicedArguments,
    Table,
    sizes_of,
)
from colossalai.nn.policies.trials.meta_inputs import BATCH, LENGTH, candidate_inputs, looking_at, meta_twin
from colossalai.nn.policies.wrap_forward import UsedByPieces
from colossalai.nn.random_streams import draws_own, switch_numbers


@dataclass
class PlanTrace:
    """Rules that a model needs beside its plan, by the paths of its modules."""

    summed: dict[str, frozenset[str]] = field(default_factory=dict)
    """Modules with those of their parameters that are applied to pieces."""
    own: tuple[str, ...] = ()
    """Modules that drop cut features, outside a module that draws its own numbers."""
    alike: tuple[str, ...] = ()
    """Modules that drop what all ranks hold, inside a module that draws its own numbers."""
    cut_attentions: bool | None = None
    """Whether the attentions that the model returns hold this rank's heads; None if it returns none."""


def trace(
    model: nn.Module, matches: list[Match], context: CutContext, inputs: MetaInputs | None = None
) -> PlanTrace | None:
    """Run a twin of ``model`` under the plan; None if even the whole model cannot be run on the meta
    device.
    """
    with looking_at(model):
        found = inputs or find_inputs(model)
        return None if found is None else _run(model, matches, context, *found)


def _run(
    model: nn.Module, matches: list[Match], context: CutContext, inputs: dict[str, Any], truth: bool
) -> PlanTrace:
    flow = Flow(draws_own, truth)
    twin, problem = _cut_twin(model, matches, context, flow), ""
    with flow, _following(twin, flow):
        for value in inputs.values():
            if isinstance(value, Tensor):
                flow.mark(value, Mark(given=True))
        for name, param in twin.named_parameters():
            cut = bool(placement(param).sharded)
            flow.mark(
                param, Mark(cut=cut, learns=True) if cut else Mark(learns=True, params=frozenset([name]))
            )
        try:
            out = twin(**inputs)
        except PlanError:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}".split("\n")[0]
    who = type(model).__name__
    if problem:
        raise ValueError(
            f"{who}, module {_named(flow.path[-1])}: it works whole, but fails when the plan cuts its inputs"
            f" ({problem}), so this plan does not fit the model; pass"
            " policy=colossalai.nn.policies.Policy(...), or do without tensor parallelism"
        )
    _check(who, flow.notes)
    attentions = next((out[n] for n in ("attentions", "decoder_attentions") if _get(out, n)), None)
    first = next((a for a in attentions or () if isinstance(a, Tensor)), None)
    return PlanTrace(
        _by_module(twin, flow.notes),
        tuple(flow.notes.drawn_alike),
        tuple(flow.notes.drawn_own),
        None if first is None else flow.of(first).cut,
    )


class PlanError(ValueError):
    """A layer of the plan is given what it does not take."""


def _get(out: Any, name: str) -> Any:
    return out.get(name) if hasattr(out, "get") else None


def _named(path: str) -> str:
    return repr(path or "the model itself")


def _check(who: str, notes: Notes) -> None:
    if notes.statistics:
        path, name = next(iter(notes.statistics.items()))
        raise ValueError(
            f"{who}, module {_named(path)}: it takes a {name} over features of which the plan leaves each"
            " rank a piece, so the result would be that of the piece; pass a"
            " policy=colossalai.nn.policies.Policy(...) that leaves the linears around it whole"
        )
    if notes.crossings:
        raise ValueError(
            f"{who}, module {_named(next(iter(notes.crossings)))}: an activation that all ranks hold meets"
            " features of which each has a piece, outside of a layer that the plan cuts; the gradients of"
            " what it was made of would be parts of their sums. Pass a"
            " policy=colossalai.nn.policies.Policy(...) that cuts it or leaves the linears around it whole"
        )
    both = [name for name in notes.applied_to_pieces if name in notes.applied_to_whole]
    if both:
        raise ValueError(
            f"{who}: parameter {both[0]!r} is applied to activations that all ranks hold and to features of"
            " which each has a piece; its gradients would be summed wrongly. Pass a"
            " policy=colossalai.nn.policies.Policy(...) that leaves the linears around it whole"
        )


def _by_module(twin: nn.Module, notes: Notes) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for name in notes.applied_to_pieces:
        path, _, param = name.rpartition(".")
        if not isinstance(twin.get_submodule(path), UsedByPieces):
            found.setdefault(path, set()).add(param)
    return {path: frozenset(names) for path, names in found.items()}


# ---- the twin ----


def _cut_twin(model: nn.Module, matches: list[Match], context: CutContext, flow: Flow) -> nn.Module:
    twin = meta_twin(model)
    trial = CutContext(context.tp, context.mesh)
    for name, _, rule in matches:
        module = twin.get_submodule(name)
        new = _stand_in(name, module, rule, trial, flow) or rule.cut(module, trial)
        if isinstance(rule, SlicedArguments):
            new.on_slice = lambda x: flow.mark(x, replace(flow.of(x), cut=True))  # type: ignore[assignment]
        if new is not module:
            parent, _, last = name.rpartition(".")
            setattr(twin.get_submodule(parent), last, new)
    return twin


def _stand_in(path: str, module: nn.Module, rule: Rule, context: CutContext, flow: Flow) -> nn.Module | None:
    parts = context.mesh.group_size(*context.tp.inner.dims[-1])
    weight: Any = module._parameters.get("weight")
    if isinstance(rule, CutExperts):
        return module  # without values it takes the whole of its input, and returns a whole
    if isinstance(rule, Cut) and rule.role != "stay":
        n_in, n_out = sizes_of(module)
        if rule.role == "expand":
            own = n_out if rule.whole_output else n_out // parts
            if rule.divided:
                own = rule.divided // parts + n_out - rule.divided
            return _Layer(path, flow, n_in, own, False, not rule.whole_output, weight)
        return _Layer(
            path,
            flow,
            n_in if rule.whole_input else n_in // parts,
            n_out,
            not rule.whole_input,
            False,
            weight,
        )
    if isinstance(rule, LatentKeys):
        # that its outputs meet heads of a rank is what it is made for, so no gradient is followed from here
        return _Layer(path, flow, *sizes_of(module), False, False, weight, learns=False)
    if isinstance(rule, Repeated):
        n_in, n_out = sizes_of(module)
        return _Layer(path, flow, n_in, n_out // rule.groups, False, True, weight)
    if isinstance(rule, Head) and isinstance(module, nn.Linear):
        return _Layer(path, flow, module.in_features, module.out_features, False, False, weight, shares=True)
    if isinstance(rule, Table) and isinstance(module, nn.Embedding):
        layer = _Layer(path, flow, None, module.embedding_dim, False, False, weight, shares=True)
        for option in ("padding_idx", *DEFAULTS):  # which an adapter around it asks for
            setattr(layer, option, getattr(module, option))
        return layer
    return None


class _Layer(nn.Module):
    """Stands in for a layer that is cut: checks what it is given, and returns a tensor of the right shape."""

    def __init__(
        self,
        path: str,
        flow: Flow,
        n_in: int | None,
        n_out: int,
        cut_input: bool,
        cut_output: bool,
        native: Tensor,
        *,
        shares: bool = False,
        learns: bool = True,
    ) -> None:
        super().__init__()
        self.learns = learns
        self.path, self.flow, self.n_in, self.n_out = path, flow, n_in, n_out
        self.cut_input, self.cut_output = cut_input, cut_output
        # models ask layers for the dtype of their weights; a tied weight is that of a stand-in as well
        self.weight = native if shares else nn.Parameter(torch.empty(n_out, n_in or 1, dtype=native.dtype))
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        mark = self.flow.of(x)
        if mark.cut is not self.cut_input:
            held, wanted = ("a piece", "the whole") if mark.cut else ("the whole", "a piece")
            raise PlanError(
                f"the plan cuts {self.path!r} as a layer that is given {wanted} of its input features, but"
                f" the ranks hold {held} there; pass policy=colossalai.nn.policies.Policy(...)"
            )
        if self.n_in is not None and x.size(-1) != self.n_in:
            raise RuntimeError(f"its input has {x.size(-1)} features, the plan expects {self.n_in}")
        if self.cut_input and mark.dim not in (None, 1):
            raise PlanError(f"the plan cuts {self.path!r} along other features than its input is cut along")
        y = torch.empty(
            *(x.shape[:-1] if self.n_in is not None else x.shape), self.n_out, dtype=self.weight.dtype
        )
        switch_numbers(own=self.cut_output)
        dim = 1 if self.cut_output else None
        return self.flow.mark(y, Mark(self.cut_output, dim, given=True, learns=self.learns))


@contextmanager
def _following(twin: nn.Module, flow: Flow) -> Iterator[None]:
    """``flow.path`` ends with the module that runs, or that ran last when an error was raised."""

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: flow.path.append(name)

    def leave(*_: Any) -> None:
        flow.path.pop()

    with ExitStack() as stack:
        for name, module in twin.named_modules():
            stack.callback(module.register_forward_pre_hook(enter(name)).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        yield


# ---- inputs ----


MetaInputs = tuple[dict[str, Any], bool]


def find_inputs(model: nn.Module, batch: int = BATCH, length: int = LENGTH) -> MetaInputs | None:
    """Arguments with which the whole model runs on the meta device, and what its conditions are taken for."""
    for inputs in candidate_inputs(model, batch, length):
        for truth in (False, True):
            twin = meta_twin(model)
            try:
                with Flow(draws_own, truth):
                    twin(**inputs)
            except Exception:
                continue
            return inputs, truth
    return None


# ---- where cut activations go ----

aten = torch.ops.aten


@dataclass(frozen=True)
class Mark:
    """Facts about a tensor."""

    cut: bool = False
    dim: int | None = None
    """The dim that is cut, counted from the last, which is 1; None if it is not known."""
    given: bool = False
    """Whether it follows from the batch; a tensor that does not is a parameter, a constant, or follows from
    these.
    """
    learns: bool = False
    """Whether a parameter that is trained would get a gradient through it."""
    params: frozenset[str] = frozenset()
    """The parameters that it is made of, if it does not follow from the batch."""


PLAIN = Mark()


@dataclass
class Notes:
    """The findings of ``Flow``, by the paths of modules or parameters."""

    applied_to_pieces: dict[str, None] = field(default_factory=dict)
    applied_to_whole: dict[str, None] = field(default_factory=dict)
    crossings: dict[str, None] = field(default_factory=dict)
    statistics: dict[str, str] = field(default_factory=dict)
    drawn_alike: dict[str, None] = field(default_factory=dict)
    """Modules in which all ranks drop the same of what is cut."""
    drawn_own: dict[str, None] = field(default_factory=dict)
    """Modules in which each rank drops others of what all of them hold."""


class Flow(TorchDispatchMode):
    """Follows marks through the operations inside ``with``; ``draws_own`` says whether ranks draw their own
    numbers now.
    """

    def __init__(self, draws_own: Callable[[], bool], truth: bool = False) -> None:
        super().__init__()
        self.truth = truth  # the result of a condition whose values do not exist on the meta device
        self.notes = Notes()
        self.path: list[str] = [""]
        self._draws_own = draws_own
        self._marks: dict[int, Mark] = {}
        self._written: dict[int, Mark] = {}
        self._kept: list[Any] = []  # ids of what is gone may be taken again

    # Marks

    def mark(self, tensor: Tensor, mark: Mark) -> Tensor:
        self._kept.append(tensor)
        self._marks[id(tensor)] = mark
        return tensor

    def of(self, tensor: Tensor) -> Mark:
        own = self._marks.get(id(tensor), PLAIN)
        written = self._written.get(tensor.untyped_storage()._cdata)
        return own if written is None else _join([own, written], own.dim)

    # Operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return self.truth if args[0].dtype is torch.bool else 0
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        marks = [self.of(x) for x in inputs]
        is_cut = any(m.cut for m in marks)
        if is_cut:
            self._meet(func, marks)
            self._reduce(func, args, kwargs)
        elif any(m.given for m in marks):
            for m in marks:
                self.notes.applied_to_whole.update(dict.fromkeys(m.params))
        result = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if func in RANDOM and any(m.cut or m.given for m in marks):
            self._draw(is_cut)
        joined = _join(marks, None)
        for output in outputs:
            dim = _dim_after(func, args, marks, output) if is_cut else None
            learns = joined.learns and output.is_floating_point() and torch.is_grad_enabled()
            mark = replace(joined, dim=dim, learns=learns and func is not aten.detach.default)
            if any(output is x for x in inputs):  # in place: views of the same memory see it
                storage = output.untyped_storage()
                self._kept.append(storage)
                self._written[storage._cdata] = mark
            self.mark(output, mark)
        return result

    def _meet(self, func: Any, marks: list[Mark]) -> None:
        if func in SHAPES_ONLY:
            return
        for m in marks:
            if m.cut:
                continue
            self.notes.applied_to_pieces.update(dict.fromkeys(m.params))
            if m.given and m.learns:
                self.notes.crossings[self.path[-1]] = None

    def _reduce(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = func.overloadpacket.__name__
        if name not in REDUCTIONS or not isinstance(args[0], Tensor):
            return
        mark = self.of(args[0])
        if mark.cut and mark.dim is not None and mark.dim in _reduced(name, args, kwargs):
            self.notes.statistics[self.path[-1]] = name.strip("_")

    def _draw(self, is_cut: bool) -> None:
        if is_cut and not self._draws_own():
            self.notes.drawn_alike[self.path[-1]] = None
        if not is_cut and self._draws_own():
            self.notes.drawn_own[self.path[-1]] = None


def _overloads(*names: str) -> set[Any]:
    """All forms of torch operations; a torch that lacks one has no model that calls it."""
    packets = (getattr(aten, name) for name in names if hasattr(aten, name))
    return {getattr(packet, overload) for packet in packets for overload in packet.overloads()}


RANDOM = _overloads(
    "bernoulli_", "bernoulli", "native_dropout", "rand_like", "randn_like", "uniform_", "normal_"
)
SHAPES_ONLY = _overloads(
    "empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full"
)
# with the argument that names the dims
REDUCTIONS = {
    **dict.fromkeys(
        ("mean", "sum", "var", "std", "var_mean", "amax", "amin", "logsumexp", "prod", "norm"), 1
    ),
    **dict.fromkeys(("_softmax", "_log_softmax", "cumsum", "cumprod", "softmax", "log_softmax"), 1),
    **dict.fromkeys(("max", "min", "sort", "argmax", "argmin"), 1),
    "topk": 2,
    "linalg_vector_norm": 2,
    "native_layer_norm": 1,
    "_fused_rms_norm": 1,
}


def _reduced(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """The dims that an operation reduces, counted from the last, which is 1."""
    ndim, place = args[0].ndim, REDUCTIONS[name]
    if name in ("native_layer_norm", "_fused_rms_norm"):
        return set(range(1, len(args[1]) + 1))
    if name == "norm":
        place = 2
    given = kwargs.get(
        "dim", args[place] if len(args) > place else (-1 if name in ("topk", "sort") else None)
    )
    if isinstance(given, Tensor):
        return set()  # the larger of two tensors
    if given is None or given == []:
        return set(range(1, ndim + 1))
    dims = [given] if isinstance(given, int) else list(given)
    return {ndim - d % ndim for d in dims if isinstance(d, int) and ndim}


def _join(marks: list[Mark], dim: int | None) -> Mark:
    given = any(m.given for m in marks)
    params: frozenset[str] = frozenset() if given else frozenset().union(*(m.params for m in marks))
    learns = any(m.learns for m in marks)
    cut = any(m.cut for m in marks)
    return Mark(cut, dim if cut else None, given, learns, frozenset() if cut else params)


def _dim_after(func: Any, args: tuple[Any, ...], marks: list[Mark], output: Tensor) -> int | None:
    """Which dim of ``output`` is cut, if that can be told."""
    name = func.overloadpacket.__name__
    x = next((a for a in args if isinstance(a, Tensor)), None)
    dims = {m.dim for m in marks if m.cut}
    dim = dims.pop() if len(dims) == 1 else None
    if dim is None or x is None:
        return None
    if name in ("view", "_unsafe_view", "reshape", "_reshape_alias"):
        return _through_view(tuple(x.shape), tuple(output.shape), dim)
    if name in ("transpose", "t", "permute", "swapaxes"):
        order = _order(name, args, x.ndim)
        return x.ndim - order.index(x.ndim - dim)
    if name in (
        "unsqueeze",
        "squeeze",
        "select",
        "expand",
        "mm",
        "bmm",
        "addmm",
        "stack",
        "cat",
        "index",
        "gather",
    ):
        return None
    return dim if output.ndim == x.ndim and len(_sizes(marks, dim, args, output)) else None


def _sizes(marks: list[Mark], dim: int, args: tuple[Any, ...], output: Tensor) -> set[int]:
    """The size of the dim in the tensors that go in, if it is also that of the output: then it is still the
    same dim.
    """
    found = {a.shape[-dim] for a in args if isinstance(a, Tensor) and a.ndim >= dim}
    return found & {output.shape[-dim]} if output.ndim >= dim else set()


def _order(name: str, args: tuple[Any, ...], ndim: int) -> list[int]:
    if name == "permute":
        return [d % ndim for d in args[1]]
    a, b = (args[1] % ndim, args[2] % ndim) if len(args) > 2 else (0, ndim - 1)
    order = list(range(ndim))
    order[a], order[b] = order[b], order[a]
    return order


def _through_view(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> int | None:
    """The outermost of the dims that the cut one becomes: pieces are made of whole inner dims."""
    outside = math.prod(before[: len(before) - dim])
    places = [place for place in range(len(after)) if math.prod(after[:place]) == outside]
    return len(after) - places[0] if len(places) == 1 else None  # beside a dim of size 1 it cannot be told
