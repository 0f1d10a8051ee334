"""A backward pass in two halves: the gradients of the inputs now, those of the weights later.

In the graph of a stage, the nodes from which an input can be reached are *the trunk*.  Where a node of the
trunk also leads to a part of the graph outside it, weights hang there: it is a *fork* (of a linear layer,
say, the node of the product).  The first half runs the trunk and keeps the gradient with which every fork was
reached; the second half starts at each fork with that gradient and asks for its own weights only.  Torch
computes in each half what is asked for, so no product is done twice; a function of a user's own is called
twice, and must not mind.

Where two forks lead to one weight, starting at the earlier one would count the later one twice.  And torch's
reentrant checkpoints refuse to compute a part of the gradients.  Such a stage does its whole backward pass in
the first half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Rest = Callable[[], None]


def split_backward(
    outputs: Sequence[Tensor], grads: Sequence[Tensor | None], entries: Sequence[GradientEdge]
) -> tuple[list[Tensor | None], Rest]:
    """The gradients at ``entries``, and a function that adds up those of the weights.

    ``grads`` are the gradients of ``outputs``, None for that of a loss.  The graph ends at ``entries``: what
    a pass that is done as a whole finds behind them gets gradients too.
    """
    if not outputs:
        return [None for _ in entries], _nothing
    roots = [get_gradient_edge(output) for output in outputs]
    starts, ends = [edge.node for edge in roots], {edge.node for edge in entries}
    trunk = _trunk(starts, ends)
    if not trunk:  # the first stage: no stage waits for gradients of its inputs
        return [None for _ in entries], partial(torch.autograd.backward, outputs, grads)
    forks = _forks(trunk, ends)
    weights = [leaf for leaves in forks.values() for leaf in leaves]
    is_tied = len(set(weights)) < len(weights)
    if not trunk.keys() >= set(starts) or is_tied or _has_reentrant_checkpoint(starts):
        return _at_once(outputs, grads, entries), _nothing
    reached: dict[Node, tuple[Tensor | None, ...]] = {}
    handles = [node.register_prehook(partial(_note, reached, node)) for node in forks]
    try:
        found = torch.autograd.grad(outputs, entries, grads, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return list(found), partial(_weight_grads, forks, reached, roots)


def _nothing() -> None:
    pass


def _note(reached: dict[Node, Any], node: Node, grads: tuple[Tensor | None, ...]) -> None:
    reached[node] = grads


def _weight_grads(
    forks: dict[Node, list[Tensor]],
    reached: dict[Node, tuple[Tensor | None, ...]],
    _graph: list[GradientEdge],
) -> None:
    """``_graph`` is held because in torch 2.11 the node of a function in Python does not keep itself
    alive.
    """
    for node, weights in forks.items():
        starts = [(GradientEdge(node, i), g) for i, g in enumerate(reached.pop(node, ())) if g is not None]
        if starts:
            torch.autograd.backward([edge for edge, _ in starts], [g for _, g in starts], inputs=weights)


def _at_once(
    outputs: Sequence[Tensor], grads: Sequence[Tensor | None], entries: Sequence[GradientEdge]
) -> list[Tensor | None]:
    reached: dict[Node, tuple[Tensor | None, ...]] = {}
    handles = [edge.node.register_prehook(partial(_note, reached, edge.node)) for edge in entries]
    try:
        torch.autograd.backward(outputs, grads)
    finally:
        for handle in handles:
            handle.remove()
    return [reached[edge.node][edge.output_nr] if edge.node in reached else None for edge in entries]


def _trunk(roots: Sequence[Node], entries: set[Node]) -> dict[Node, None]:
    """The nodes that can be reached from ``roots`` and from which one of ``entries`` can be reached.

    In the order of the graph: tensor-parallel ranks must come to their collectives in one order.
    """
    parents: dict[Node, list[Node]] = {}
    waiting, seen = list(roots), dict.fromkeys(roots)
    while waiting:
        node = waiting.pop()
        for child in _children(node):
            parents.setdefault(child, []).append(node)
            if child not in seen:
                seen[child] = None
                waiting.append(child)
    trunk = entries.intersection(seen)
    waiting = list(trunk)
    while waiting:
        for parent in parents.get(waiting.pop(), ()):
            if parent not in trunk:
                trunk.add(parent)
                waiting.append(parent)
    return {node: None for node in seen if node in trunk}


def _forks(trunk: dict[Node, None], ends: set[Node]) -> dict[Node, list[Tensor]]:
    """For every node of the trunk where weights hang, these weights."""
    forks = {}
    for node in trunk:
        if node in ends:
            continue
        outside = [child for child in _children(node) if child not in trunk]
        if leaves := _leaves(outside, ends):
            forks[node] = leaves
    return forks


def _leaves(nodes: Sequence[Node], ends: set[Node]) -> list[Tensor]:
    """The weights whose gradients are added up below ``nodes``, but not below ``ends``."""
    return [node.variable for node in _below(nodes, ends) if hasattr(node, "variable")]


def _has_reentrant_checkpoint(roots: Sequence[Node]) -> bool:
    return any(node.name() == "CheckpointFunctionBackward" for node in _below(roots, set()))


def _below(nodes: Sequence[Node], ends: set[Node]) -> Iterator[Node]:
    """``nodes`` and all that can be reached from them, but not through ``ends``."""
    waiting, seen = list(nodes), {*nodes, *ends}
    while waiting:
        node = waiting.pop()
        yield node
        for child in _children(node):
            if child not in seen:
                seen.add(child)
                waiting.append(child)


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]
