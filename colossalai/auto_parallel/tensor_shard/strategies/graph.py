"""``PlanGraph``: the operations of a traced model as a search for strategies sees them."""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from colossalai.auto_parallel.tensor_shard.strategies.writes import Writes, find_writes
from colossalai.fx import OpGraph, OpNode
from colossalai.fx.op_graph import TensorInfo
from colossalai.fx.writes import written_arguments
from colossalai.tensor.letters import OpCall, OpLetters, call_of_node, letters_of
from colossalai.tensor.letters.calls import tensor_arguments


@dataclass(frozen=True)
class Source:
    """Where an operand comes from: a tensor of an operation, a parameter or buffer, an input, a constant.

    ``name`` is that of the ``fx`` node, of the parameter in ``state_dict``, or of the placeholder.
    """

    kind: str
    name: str
    index: int = 0
    info: TensorInfo | None = None

    @property
    def learns(self) -> bool:
        return self.info is not None and self.info.requires_grad


@dataclass
class PlanNode:
    """An operation with its letters; ``letters`` is None where it runs on whole tensors only."""

    fx_node: fx.Node
    op: OpNode
    call: OpCall
    letters: OpLetters | None
    operands: tuple[Source, ...]
    title: str
    why_whole: str = ""
    """Why it is not cut, if it is not."""
    reached: bool = True
    """Whether gradients of a result go through it."""

    @property
    def name(self) -> str:
        return self.fx_node.name

    @property
    def learns(self) -> tuple[bool, ...]:
        """For each operand whether a gradient comes back to it from here."""
        gives = self.reached and any(info.requires_grad for info in self.op.outputs)  # a comparison does not
        return tuple(source.learns and gives for source in self.operands)


@dataclass
class PlanGraph:
    """All operations in order, and the results that are handed out."""

    graph: OpGraph
    nodes: dict[str, PlanNode]
    inputs: dict[str, TensorInfo]
    results: list[Source] = field(default_factory=list)
    writes: Writes = field(default_factory=Writes)


def plan_graph(graph: OpGraph) -> PlanGraph:
    """What a search must know of a traced model."""
    sources: dict[fx.Node, Any] = {}
    nodes: dict[str, PlanNode] = {}
    depends: set[fx.Node] = set()  # on parameters, or on inputs that are no integers
    learning: set[str] = set()  # memory into which something with a gradient was written
    reached = _reached(graph)
    titles = _titles(graph)
    result: list[Source] = []
    for node in graph.module.graph.nodes:
        if node.op == "placeholder":
            if (info := graph.inputs.get(node.name)) is not None:
                sources[node] = Source("input", node.name, info=info)
                if info.dtype.is_floating_point:
                    depends.add(node)
        elif node.op == "get_attr":
            parameter = graph.parameters.get(str(node.target))
            kind = "constant" if parameter is None else "parameter"
            sources[node] = Source(kind, str(node.target), info=parameter)
            if parameter is not None:
                depends.add(node)
        elif node.target in (operator.getitem, getattr):
            sources[node] = node.target(sources[node.args[0]], node.args[1])
            depends.update({node} if node.args[0] in depends else ())
        elif node.op == "output":
            result = [
                _as_written(sources[n], learning)
                for n in tree_leaves(node.args[0])
                if isinstance(n, fx.Node) and n in sources
            ]
        elif node.name in graph.nodes:
            op = graph.nodes[node.name]
            _add_outputs(node, op, sources)
            if any(n in depends for n in node.all_input_nodes):
                depends.add(node)
            operands = tuple(_as_written(sources[n], learning) for n in tensor_arguments(node))
            nodes[node.name] = _node(node, op, operands, node in depends, node.name in reached, titles)
            if any(info.requires_grad for info in op.outputs):
                into = (sources[n].info for n in written_arguments(node) if n in sources)
                learning |= {info.memory for info in into if info is not None}
    writes = find_writes(nodes, result, {*graph.parameters, *graph.inputs})
    for name in writes.whole:
        nodes[name].letters, nodes[name].why_whole = None, "memory that is written in place has views"
    return PlanGraph(graph, nodes, dict(graph.inputs), result, writes)


def _as_written(source: Source, learning: set[str]) -> Source:
    """``source`` as it is now: with a gradient, if some was written into its memory."""
    info = source.info
    if info is None or info.requires_grad or info.memory not in learning:
        return source
    return replace(source, info=replace(info, requires_grad=True))


@dataclass
class ParameterUse:
    """Who takes a parameter or buffer.

    Args:
        users: the operations, each as often as it takes it.
        by_modules: whether modules that are one operation take it, and so need it whole.
        may_be_moved: whether it may rest otherwise than it is used: a matrix, say, that is gathered for a
            product.  Vectors are too small to be worth it; views of what was moved would keep it in memory.
    """

    users: list[PlanNode] = field(default_factory=list)
    by_modules: bool = False
    may_be_moved: bool = True


def placed_parameters(graph: PlanGraph) -> dict[str, ParameterUse]:
    """The parameters that choose how they rest; each of the others rests as its one operation uses it."""
    found: dict[str, ParameterUse] = {}
    for node in graph.nodes.values():
        for source in node.operands:
            if source.kind == "parameter":
                found.setdefault(source.name, ParameterUse()).users.append(node)
    for node in graph.nodes.values():
        for name in node.op.parameters if node.fx_node.op == "call_module" else ():
            if name in found:
                found[name].by_modules = True
    for name, use in found.items():
        kept_views = any(o.memory == name for user in use.users for o in user.op.outputs)
        shape = graph.graph.parameters[name].shape
        use.may_be_moved = len(shape) > 1 and not kept_views and _is_parameter(graph.graph, name)
    return {
        name: use
        for name, use in sorted(found.items())
        if use.may_be_moved or use.by_modules or len(use.users) > 1
    }


def _is_parameter(graph: OpGraph, name: str) -> bool:
    return isinstance(operator.attrgetter(name)(graph.module), nn.Parameter)


def _node(
    node: fx.Node,
    op: OpNode,
    operands: tuple[Source, ...],
    depends: bool,
    reached: bool,
    titles: dict[str, str],
) -> PlanNode:
    call = call_of_node(node)
    letters, why = None, ""
    if node.op == "call_module":
        why = "a module that is one operation"
    elif not depends:
        why = "made of integers and constants alone"
    else:
        letters = letters_of(call)
        why = "" if letters is not None else f"no rule for {call.name}"
    return PlanNode(node, op, call, letters, operands, titles[node.name], why, reached)


def _add_outputs(node: fx.Node, op: OpNode, sources: dict[fx.Node, Any]) -> None:
    """A source for each tensor of its result, in lists, dicts and objects like those that it returns."""
    left = iter([Source("node", node.name, i, info) for i, info in enumerate(op.outputs)])
    sources[node] = tree_map(lambda v: next(left) if isinstance(v, Tensor) else None, node.meta.get("val"))


def _reached(graph: OpGraph) -> set[str]:
    """The nodes that gradients of results come to: of the loss, and of others, of which a script may make
    another loss.
    """
    nodes = list(graph.module.graph.nodes)
    writers: dict[str, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        for argument in written_arguments(node):
            for memory in graph.memory(argument):
                writers[memory].append(node)
    learning = {
        memory
        for written in writers.values()
        for node in written
        if node.name in graph.nodes and any(info.requires_grad for info in graph.nodes[node.name].outputs)
        for argument in written_arguments(node)
        for memory in graph.memory(argument)
    }

    def stops(node: fx.Node) -> bool:
        """Whether no gradient goes through: of what is detached, or runs without gradients."""
        outputs = graph.nodes[node.name].outputs if node.name in graph.nodes else ()
        return bool(outputs) and not any(o.requires_grad or o.memory in learning for o in outputs)

    pending, found = [nodes[-1]], set[fx.Node]()
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            if stops(node):
                continue
            pending += node.all_input_nodes
            pending += [
                w for n in node.all_input_nodes for memory in graph.memory(n) for w in writers[memory]
            ]
    return {node.name for node in found}


def _titles(graph: OpGraph) -> dict[str, str]:
    """What each operation is called in a solution: as its module, if it is what the module is there for."""
    main: dict[str, OpNode] = {}
    for op in graph:
        if op.module and (op.module not in main or _weight(op) > _weight(main[op.module])):
            main[op.module] = op
    inner = {path.rsplit(".", 1)[0] for path in main if "." in path}
    of = {op.name: module.replace(".", "_") for module, op in main.items() if module not in inner}
    found = {op.name: of.get(op.name, op.name) for op in graph}
    twice = {title for title, n in Counter(found.values()).items() if n > 1}
    return {name: name if title in twice else title for name, title in found.items()}


def _weight(op: OpNode) -> tuple[int, int]:
    """How likely it is that an operation is what its module is there for."""
    return len(op.parameters), op.forward.operations + op.forward.read + op.forward.written
