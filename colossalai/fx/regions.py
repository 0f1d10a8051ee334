"""``flatten_regions`` takes the nesting out of an exported graph.

torch.export makes a graph of its own of what runs without gradients, or under autocast.  In a flat graph such
operations stand between nodes that switch the mode, as eager code does, and as make_fx records it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from colossalai.fx.leaves import MODULE


def flatten_regions(module: nn.Module, graph: fx.Graph) -> None:
    """Put the operations of nested graphs, whose modules ``module`` holds, into ``graph``."""
    higher = torch.ops.higher_order
    regions = {
        higher.wrap_with_set_grad_enabled: (1, _grad_switch),
        higher.wrap_with_autocast: (4, _autocast_switch),
    }
    # a region may hold others: these are found in the next round
    while nodes := [n for n in graph.nodes if n.op == "call_function" and n.target in regions]:
        for node in nodes:
            _flatten(module, graph, node, *regions[node.target])


def _flatten(
    module: nn.Module, graph: fx.Graph, node: fx.Node, options: int, switch: Callable[..., Any]
) -> None:
    inner: Any = operator.attrgetter(str(node.args[options].target))(module)  # type: ignore[union-attr]
    given = dict(zip(inner.graph.find_nodes(op="placeholder"), node.args[options + 1 :], strict=True))
    values: dict[fx.Node, Any] = given
    with graph.inserting_before(node):
        leave = switch(graph, node)
        for part in inner.graph.nodes:
            if part.op in ("placeholder", "output"):
                continue
            values[part] = copied = graph.node_copy(part, values.__getitem__)
            note_module(copied, part if part.meta.get("nn_module_stack") else node)
            if part.op == "get_attr":  # names count from the start in each graph
                copied.target = f"{node.name}_{part.target}".replace(".", "_")
                setattr(module, copied.target, operator.attrgetter(part.target)(inner))
        leave()
    results = inner.graph.find_nodes(op="output")[0].args[0]
    for user in list(node.users):
        assert user.target is operator.getitem, f"{node} is used by {user}"
        user.replace_all_uses_with(values[results[user.args[1]]])
        graph.erase_node(user)
    graph.erase_node(node)


def note_module(node: fx.Node, source: fx.Node) -> None:
    """Let ``node`` know the module that ``source`` was recorded in."""
    stack = source.meta.get("nn_module_stack")
    if stack:
        node.meta[MODULE] = list(stack.values())[-1][0]


def _grad_switch(graph: fx.Graph, node: fx.Node) -> Callable[[], Any]:
    before = True  # a recording begins with gradients
    for earlier in graph.nodes:
        if earlier is node:
            break
        if earlier.target is torch._C._set_grad_enabled:
            before = earlier.args[0]
    graph.call_function(torch._C._set_grad_enabled, (node.args[0],))
    return lambda: graph.call_function(torch._C._set_grad_enabled, (before,))


def _autocast_switch(graph: fx.Graph, node: fx.Node) -> Callable[[], Any]:
    entered = graph.call_function(torch.amp.autocast_mode._enter_autocast, node.args[:4])
    return lambda: graph.call_function(torch.amp.autocast_mode._exit_autocast, (entered,))
