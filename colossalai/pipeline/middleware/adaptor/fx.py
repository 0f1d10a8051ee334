"""``get_fx_topology`` reads which parts of a cut graph take values from which others."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx
from torch.utils._pytree import tree_leaves

from colossalai.pipeline.middleware.topo import Partition, PartitionInputVal, PartitionOutputVal, Topo


def get_fx_topology(fx_module: fx.GraphModule) -> Topo:
    """The parts of a graph that was cut by ``split_with_split_nodes_pass``.

    Part 0 gives the inputs of the model, parts 1, 2, ... are its stages in their order, and the last takes
    the outputs.
    """
    stages = [node for node in fx_module.graph.nodes if node.op == "call_module"]
    other = [
        node
        for node in fx_module.graph.nodes
        if node.op in ("call_function", "call_method", "get_attr") and node.target is not operator.getitem
    ]
    if other or not stages:
        raise ValueError(
            f"{type(fx_module).__name__} is not a graph of stages"
            + (f": it computes {other[0].name} itself" if other else ", it calls none")
            + "; cut it by split_with_split_nodes_pass before"
        )
    inputs = fx_module.graph.find_nodes(op="placeholder")
    parts = [Partition() for _ in range(len(stages) + 2)]
    number = {node: i + 1 for i, node in enumerate(stages)}
    # where a node's value comes from: a part and the number of its output
    source = {node: (0, i) for i, node in enumerate(inputs)}
    for node in fx_module.graph.nodes:
        if node in number:
            source[node] = (number[node], 0)
        elif node.target is operator.getitem:
            source[node] = (number[node.args[0]], node.args[1])
    ends = fx_module.graph.find_nodes(op="output")[0]
    for i, node in enumerate([*stages, ends], start=1):
        for offset, value in enumerate(_taken(node)):
            part, output = source[value]
            parts[i].add_input_val(PartitionInputVal(part, output))
            while len(parts[part].output_vals) <= output:
                parts[part].add_output_val(PartitionOutputVal())
            parts[part].output_vals[output].add(i, offset)
    topo = Topo(0, len(stages) + 1)
    for i, partition in enumerate(parts):
        topo.set_partitions(i, partition)
    return topo


def _taken(node: fx.Node) -> list[Any]:
    given = node.args if node.op == "call_module" else node.args[0]
    return [value for value in tree_leaves((given, node.kwargs)) if isinstance(value, fx.Node)]
