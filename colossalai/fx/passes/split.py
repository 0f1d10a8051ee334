"""Cut a recorded graph into the stages of a pipeline.

A pass of the first kind puts ``pipe_split`` nodes between stages, each by a weight of its own;
``split_with_split_nodes_pass`` then makes a module of each stage.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cached_property

from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from colossalai.fx.costs import SWITCHES
from colossalai.fx.meta_info import OP, output_bytes
from colossalai.utils.partition import balanced_cuts


def pipe_split() -> None:
    """Stands between two stages of a graph."""


def balanced_split_pass(gm: fx.GraphModule, pp_size: int) -> fx.GraphModule:
    """Cut where stages have about as many parameters each."""
    return _annotate(gm, pp_size, lambda node: _parameters(gm, node))


def balanced_split_pass_v2(gm: fx.GraphModule, pp_size: int) -> fx.GraphModule:
    """Cut where stages have about as many bytes of parameters and outputs; needs ``shape_prop_pass``."""
    _need(gm, "val", "shape_prop_pass(gm, *args)")
    return _annotate(gm, pp_size, lambda node: _parameters(gm, node, nbytes=True) + output_bytes(node))


def uniform_split_pass(gm: fx.GraphModule, pp_size: int) -> fx.GraphModule:
    """Cut where stages have about as many layers (calls of modules), or nodes in a graph without layers."""
    layers = [node for node in gm.graph.nodes if node.op == "call_module"]
    return _annotate(gm, pp_size, lambda node: float(not layers or node.op == "call_module"))


def avgnode_split_pass(gm: fx.GraphModule, pp_size: int) -> fx.GraphModule:
    """Cut where stages have about as many nodes."""
    return _annotate(gm, pp_size, lambda node: 1.0)


def avgcompute_split_pass(gm: fx.GraphModule, pp_size: int) -> fx.GraphModule:
    """Cut where stages have about as many operations of a forward pass; needs ``metainfo_trace``."""
    _need(gm, OP, "metainfo_trace(gm, *args)")
    return _annotate(gm, pp_size, lambda node: float(_operations(node, backward=False)))


def gpipe_dp_split_pass(
    gm: fx.GraphModule, pp_size: int, mode: str = "compute", eps: float = 0.01
) -> fx.GraphModule:
    """Cut where the slowest stage is as fast as possible; needs ``metainfo_trace``.

    Args:
        mode: ``compute`` weighs the operations of both passes, ``memory`` parameters and what is kept.
        eps: weights are rounded to this share of the heaviest node, so that equal layers count as equal.
    """
    _need(gm, OP, "metainfo_trace(gm, *args)")
    if mode not in ("compute", "memory"):
        raise ValueError(f"mode={mode!r} is neither 'compute' nor 'memory'")
    if eps < 0:
        raise ValueError(f"eps={eps} is below 0")

    def weight(node: fx.Node) -> float:
        if mode == "compute":
            return float(_operations(node, backward=True))
        kept = node.meta[OP].saved_bytes if OP in node.meta else 0
        return _parameters(gm, node, nbytes=True) + kept

    unit = eps * max((weight(node) for node in gm.graph.nodes), default=0.0)
    return _annotate(gm, pp_size, lambda node: round(weight(node) / unit) * unit if unit else weight(node))


def split_with_split_nodes_pass(
    annotated_gm: fx.GraphModule, merge_output: bool = False
) -> tuple[fx.GraphModule, list[fx.GraphModule]]:
    """Make a module of each stage of a graph with ``pipe_split`` nodes.

    Returns:
        A graph that calls the stages (``submod_0``, ...), and the stages, which have the same parameters,
        by the same names.  A stage with one result returns it, or with ``merge_output`` a tuple like others.
    """
    number, stage = 0, {}
    graph = annotated_gm.graph
    for node in graph.nodes:
        number += node.op == "call_function" and node.target is pipe_split
        stage[node] = number
    stages = [_Stage(annotated_gm, [n for n in stage if stage[n] == i], i) for i in range(number + 1)]
    whole = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        values[node] = whole.node_copy(node)
    for part in stages:
        part.call(whole, values, merge_output)
    result = graph.find_nodes(op="output")[0].args[0]
    whole.output(map_arg(result, lambda node: values[node]))
    modules = [part.module for part in stages]
    root = nn.Module()
    for i, module in enumerate(modules):
        root.add_module(f"submod_{i}", module)
    return fx.GraphModule(root, whole), modules


class _Stage:
    """The nodes of a graph between two ``pipe_split`` nodes, as a module that reads its own parameters."""

    def __init__(self, gm: fx.GraphModule, nodes: list[fx.Node], number: int) -> None:
        left_out = ("placeholder", "output", "get_attr")
        nodes = [n for n in nodes if n.op not in left_out and n.target is not pipe_split]
        inside = set(nodes)
        outside = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
        self._name = f"submod_{number}"
        self._taken = [n for n in outside if n.op != "get_attr"]
        self._given = [n for n in nodes if any(user not in inside for user in n.users)]
        graph = fx.Graph()
        values = {node: graph.placeholder(node.name) for node in self._taken}
        values |= {node: graph.node_copy(node) for node in outside if node.op == "get_attr"}
        for node in nodes:
            values[node] = graph.node_copy(node, lambda n: values[n])
        self._results = [values[node] for node in self._given]
        self._graph, self._gm = graph, gm

    def call(self, whole: fx.Graph, values: dict[fx.Node, fx.Node], merge_output: bool) -> None:
        """Let ``whole`` call this stage, and know where its results are."""
        several = merge_output or len(self._results) != 1
        self._graph.output(tuple(self._results) if several else self._results[0])
        called = whole.call_module(self._name, tuple(values[node] for node in self._taken))
        for i, node in enumerate(self._given):
            values[node] = whole.call_function(operator.getitem, (called, i)) if several else called

    @cached_property
    def module(self) -> fx.GraphModule:
        return fx.GraphModule(self._gm, self._graph, self._name)


def _annotate(gm: fx.GraphModule, pp_size: int, weight: Callable[[fx.Node], float]) -> fx.GraphModule:
    """Put ``pipe_split`` nodes into ``gm`` such that the heaviest of ``pp_size`` stages is lightest."""
    items = _items(gm.graph)
    if not isinstance(pp_size, int) or not 1 <= pp_size <= len(items):
        raise ValueError(
            f"pp_size={pp_size!r} stages cannot be cut from a graph of {len(items)} parts: give a number from"
            f" 1 to {len(items)}"
        )
    cuts = balanced_cuts([sum(map(weight, together)) for together in items], pp_size)
    for cut in cuts[1:-1]:
        with gm.graph.inserting_before(items[cut][0]):
            gm.graph.call_function(pipe_split)
    gm.recompile()
    return gm


def _items(graph: fx.Graph) -> list[list[fx.Node]]:
    """The nodes that compute, with those together between which nothing may be cut: what runs without
    gradients, or under autocast, is switched back in the same stage.
    """
    off, (switch_grad, enter, leave) = 0, SWITCHES
    items: list[list[fx.Node]] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if off:
            items[-1].append(node)
        else:
            items.append([node])
        if node.target is switch_grad:
            off += -1 if node.args[0] else 1
        off += (node.target is enter) - (node.target is leave)
    return items


def _need(gm: fx.GraphModule, key: str, how: str) -> None:
    if not any(key in node.meta for node in gm.graph.nodes if node.op != "placeholder"):
        raise ValueError(f"the nodes of {type(gm).__name__} have no costs yet; call {how} before")


def _operations(node: fx.Node, backward: bool) -> int:
    found = node.meta.get(OP)
    if found is None:
        return 0
    return found.forward.operations + (found.backward.operations if backward else 0)


def _parameters(gm: fx.GraphModule, node: fx.Node, nbytes: bool = False) -> float:
    """How many parameters a node uses, or their bytes."""
    found: list[Tensor] = []
    if node.op == "call_module":
        found = list(gm.get_submodule(str(node.target)).parameters())
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            value = gm
            for name in str(source.target).split("."):
                value = getattr(value, name)
            found += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return float(sum(t.numel() * (t.element_size() if nbytes else 1) for t in found))
