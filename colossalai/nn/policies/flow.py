"""Where the pieces of activations go: marks that follow the tensors of a forward pass on the meta device.

A tensor is *cut* if each rank holds other features of it, which begins behind an expanding linear and ends before a
contracting one.  ``Flow`` is told where, follows every operation in between, and notes what a plan must know:

- a parameter that all ranks hold and apply to cut features: its gradient on a rank is a part of the sum;
- an activation that all ranks hold and that meets cut features outside a layer of ours: so is its gradient;
- a statistic (mean, norm, softmax ...) over the features of which a rank has a piece: it would be that of the piece;
- random numbers for cut features that all ranks draw alike, or for whole ones that each rank draws for itself.

It sees operations below autograd, so it does not matter how a model is written.  What it does not know it lets pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


@dataclass(frozen=True)
class Mark:
    """What is known of a tensor."""

    cut: bool = False
    dim: int | None = None
    """The dim that is cut, counted from the last, which is 1; None if it is not known."""
    given: bool = False
    """Whether it follows from the batch; a tensor that does not is a parameter, a constant, or follows from these."""
    learns: bool = False
    """Whether a parameter that is trained would get a gradient through it."""
    params: frozenset[str] = frozenset()
    """The parameters that it is made of, if it does not follow from the batch."""


PLAIN = Mark()


@dataclass
class Notes:
    """What ``Flow`` has seen, by the paths of modules or parameters."""

    applied_to_pieces: dict[str, None] = field(default_factory=dict)
    applied_to_whole: dict[str, None] = field(default_factory=dict)
    crossings: dict[str, None] = field(default_factory=dict)
    statistics: dict[str, str] = field(default_factory=dict)
    drawn_alike: dict[str, None] = field(default_factory=dict)
    """Modules in which all ranks drop the same of what is cut."""
    drawn_own: dict[str, None] = field(default_factory=dict)
    """Modules in which each rank drops others of what all of them hold."""


class Flow(TorchDispatchMode):
    """Follows marks through the operations inside ``with``; ``draws_own`` says whether ranks draw their own numbers now."""

    def __init__(self, draws_own: Callable[[], bool], truth: bool = False) -> None:
        super().__init__()
        self.truth = truth  # what a condition is taken for whose values nobody has
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
    """The size of the dim in the tensors that go in, if it is also that of the output: then it is still the same dim."""
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
