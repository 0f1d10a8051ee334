"""Calls of leaves, the modules that are one operation of a plan, whose code may itself ask for gradients.

A leaf gets whole tensors, and may ask for gradients of them and of what it makes of them.  Gradients that
pass through the operations before it are not its affair: ranks have parts of them, and what a leaf gets of
a tensor need not be the object that another of its tensors was computed from.  The trace makes one leaf of
the whole model where it sees code ask for such; code that asks by the values of a batch is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from colossalai.fx.leaves import ROOT, no_hooks_on

_Edge = tuple[Node, int]
"""A place that a gradient goes to: a step of a backward pass, and the number of its result."""


@dataclass(frozen=True)
class LeafForm:
    """How the arguments of a leaf hang together.

    Args:
        path: the name of the module.
        spec: the structure of its arguments.
        earlier: for each leaf of the arguments the numbers of those that it was computed from.
    """

    path: str
    spec: TreeSpec
    earlier: tuple[frozenset[int], ...]


@dataclass(frozen=True)
class _Running:
    """A leaf whose code runs now."""

    form: LeafForm
    entries: dict[int, _Edge] = field(default_factory=dict)
    """Where the gradients of its arguments go, by their numbers."""


_running: list[_Running] = []


def leaf_form(node: fx.Node) -> LeafForm:
    """The form of the call of a leaf in a traced graph."""
    flat, spec = tree_flatten((node.args, node.kwargs))
    before = [_ancestors(value) if isinstance(value, fx.Node) else set() for value in flat]
    earlier = tuple(
        frozenset(i for i, value in enumerate(flat) if i != j and value in before[j])
        for j in range(len(flat))
    )
    return LeafForm(str(node.target), spec, earlier)


def _ancestors(node: fx.Node) -> set[Any]:
    """A node and all that it was computed from."""
    found: set[Any] = set()
    pending = [node]
    while pending:
        if (now := pending.pop()) not in found:
            found.add(now)
            pending += now.all_input_nodes
    return found


def call_leaf(module: nn.Module, form: LeafForm, *flat: Any) -> Any:
    """Call a module that is one operation of the graph, with the leaves of its arguments."""
    args, kwargs = tree_unflatten(flat, form.spec)
    entries = {i: _edge(x) for i, x in enumerate(flat) if isinstance(x, Tensor) and x.requires_grad}
    _running.append(_Running(form, entries))

    def hooked() -> Exception:
        return RuntimeError(
            f"module {form.path!r} is one operation of the plan, since its code depends on values, and puts a"
            " hook on the gradient of a tensor that it is given, to which other operations add their parts;"
            " put it on a tensor of its own (x.view_as(x)), or put it there whatever the values are, so that"
            " the trace sees it"
        )

    try:
        if form.path == ROOT:
            return module(*args, **kwargs)
        with no_hooks_on(flat, hooked):
            return module(*args, **kwargs)
    finally:
        _running.pop()


def leaf_that_runs() -> str | None:
    """The path of the leaf whose code runs now, ``ROOT`` for one that is all of a model, if there is one."""
    return _running[-1].form.path if _running else None


def check_gradients_asked(outputs: Iterable[Any], inputs: Iterable[Any]) -> None:
    """Refuse a backward pass, from ``outputs`` to ``inputs`` (or to all parameters), that the code of a leaf
    starts, if it goes on beyond what the leaf was given.
    """
    if leaf_that_runs() in (None, ROOT):
        return
    form, entries = _running[-1].form, _running[-1].entries
    wanted = {_edge(x) for x in inputs if not isinstance(x, Tensor) or x.requires_grad}
    reached = _reached(outputs, entries)
    asked = [i for i, edge in entries.items() if edge in wanted]
    if reached and (not wanted or any(i in form.earlier[j] for i in asked for j in reached)):
        raise RuntimeError(
            f"module {form.path!r} is one operation of the plan, since its code depends on values, and asks"
            " for gradients (torch.autograd.grad) that pass through the operations before it, of which ranks"
            " have parts; make these tensors anew inside the module (x.detach().requires_grad_()), or ask for"
            " their gradients whatever the values are, so that the trace sees it"
        )


def _reached(outputs: Iterable[Any], entries: dict[int, _Edge]) -> set[int]:
    """The numbers of the entries that gradients of ``outputs`` come to."""
    numbers: dict[_Edge, set[int]] = {}
    for number, edge in entries.items():
        numbers.setdefault(edge, set()).add(number)
    pending = [_edge(x) for x in outputs if not isinstance(x, Tensor) or x.requires_grad]
    seen: set[_Edge] = set()
    found: set[int] = set()
    while pending:
        edge = pending.pop()
        if edge in seen:
            continue
        seen.add(edge)
        if edge in numbers:
            found |= numbers[edge]
        else:
            pending += [(node, number) for node, number in edge[0].next_functions if node is not None]
    return found


def _edge(x: Any) -> _Edge:
    edge = get_gradient_edge(x) if isinstance(x, Tensor) else x
    return edge.node, edge.output_nr
