"""``PlanProblem``: a traced model on a mesh as a graph of choices, and a choice as a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from colossalai.auto_parallel.tensor_shard.options import DataloaderOption, SolverOptions
from colossalai.auto_parallel.tensor_shard.sharding_strategy import MemoryCost, TrainCycleItem
from colossalai.auto_parallel.tensor_shard.solver.strategy_graph import Floats, StrategyGraph
from colossalai.auto_parallel.tensor_shard.strategies.blocks import wanted_blocks
from colossalai.auto_parallel.tensor_shard.strategies.choices import allowed, input_layout
from colossalai.auto_parallel.tensor_shard.strategies.costs import CostModel, StrategyCost
from colossalai.auto_parallel.tensor_shard.strategies.graph import (
    PlanGraph,
    PlanNode,
    Source,
    placed_parameters,
    plan_graph,
)
from colossalai.auto_parallel.tensor_shard.strategies.placements import (
    CutOperation,
    layout_name,
    placements,
    resting_layouts,
    share_placements,
)
from colossalai.auto_parallel.tensor_shard.strategies.shares import SHARE, insert_shares
from colossalai.fx import OpGraph
from colossalai.fx.op_graph import TensorInfo
from colossalai.mesh import Layout

FREE = StrategyCost(TrainCycleItem(0.0, 0.0, 0.0), TrainCycleItem(0.0, 0.0, 0.0), (), (), MemoryCost())


@dataclass
class Vertex:
    """Something that chooses: an operation, or where an input, a parameter or a result lies.

    Args:
        title: what it is called in a solution.
        node: the operation; None for the others.
        placements, costs: its strategies, and what each costs by itself.
        charged: the memory that it is the first to keep for the backward pass.
    """

    title: str
    kind: str
    name: str
    node: PlanNode | None
    placements: list[CutOperation]
    costs: list[StrategyCost]
    charged: tuple[str, ...] = ()


@dataclass
class OperandFlow:
    """A tensor on its way from one vertex to another: as output ``index`` of the first, and operand
    ``operand`` of the second.
    """

    source: int
    target: int
    index: int
    operand: int
    info: TensorInfo
    learns: bool
    fixed: bool = False
    """Whether the tensor must keep its layout, since its memory is written in place and looked at later."""
    twice: bool = False
    """Whether a parameter is moved once more for the backward pass, which needs it: what was moved is not
    kept.
    """


@dataclass
class PlanProblem:
    """All choices of a model, and what every pair of neighbouring choices costs."""

    graph: PlanGraph
    model: CostModel
    options: SolverOptions
    vertices: list[Vertex]
    flows: list[OperandFlow]
    solver_graph: StrategyGraph = field(default_factory=StrategyGraph)
    _tables: dict[object, Floats] = field(default_factory=dict)

    def table(self, flow: OperandFlow) -> Floats:
        """Seconds of a flow, from every strategy of its source (rows) to every strategy of its target."""
        source, target = self.vertices[flow.source], self.vertices[flow.target]
        # vertices that are alike have the same list of placements
        ends = id(source.placements), flow.index, id(target.placements), flow.operand
        kind = (
            flow.info.shape,
            flow.info.dtype,
            flow.learns,
            source.kind == "parameter",
            flow.twice,
            flow.fixed,
        )
        if (ends, kind) not in self._tables:
            self._tables[ends, kind] = self._table(flow, source, target)
        return self._tables[ends, kind]

    def _table(self, flow: OperandFlow, source: Vertex, target: Vertex) -> Floats:
        sources = tuple(p.outputs[flow.index] for p in source.placements)
        targets = tuple(p.inputs[flow.operand] for p in target.placements)
        shape, itemsize, parameter = flow.info.shape, flow.info.dtype.itemsize, source.kind == "parameter"
        table = self.model.moves.table(shape, itemsize, sources, targets, flow.learns, parameter, flow.twice)
        if flow.fixed:
            same = np.array([[s == t for t in targets] for s in sources])
            return np.where(same, table, np.inf)
        return table

    @property
    def whole_operations(self) -> dict[str, str]:
        """The operations that every rank does whole for want of a rule, and why."""
        return {
            v.title: v.node.why_whole
            for v in self.vertices
            if v.node is not None and v.node.why_whole.startswith(("no rule", "a module"))
        }


def plan_problem(graph: OpGraph, model: CostModel, options: SolverOptions | None = None) -> PlanProblem:
    """The choices of a traced model on the mesh of ``model``; ``graph`` gets identities (see ``shares``)."""
    insert_shares(graph)
    return _Builder(plan_graph(graph), model, options or SolverOptions()).build()


class _Builder:
    def __init__(self, graph: PlanGraph, model: CostModel, options: SolverOptions) -> None:
        self.graph, self.model, self.options = graph, model, options
        self.vertices: list[Vertex] = []
        self.flows: list[OperandFlow] = []
        self.place: dict[tuple[str, str], int] = {}
        self.blocks = wanted_blocks(graph)
        self.placed = placed_parameters(graph)
        self._charged: set[str] = set()
        self._known: dict[object, tuple[list[CutOperation], list[StrategyCost]]] = {}

    def build(self) -> PlanProblem:
        for name, info in self.graph.inputs.items():
            layout = input_layout(name, info, self.graph, self.model.axes, self.options)
            self._add(name, "input", name, None, [self._lying(layout)], [FREE])
        for node in self.graph.nodes.values():
            charged = tuple(name for name in node.op.saved if name not in self._charged)
            self._charged.update(charged)
            found, costs = self._strategies(node, charged)
            place = self._add(node.title, "node", node.name, node, found, costs)
            self.vertices[place].charged = charged
        for name in self.placed:
            self._add_parameter(name)
        for node in self.graph.nodes.values():
            for operand, source in enumerate(node.operands):
                self._flow(source, self.place["node", node.name], operand, node.learns[operand])
        for source in dict.fromkeys(self.graph.results):
            self._add_result(source)
        problem = PlanProblem(self.graph, self.model, self.options, self.vertices, self.flows)
        _fill(problem)
        return problem

    def _add(
        self,
        title: str,
        kind: str,
        name: str,
        node: PlanNode | None,
        found: list[CutOperation],
        costs: list[StrategyCost],
    ) -> int:
        self.place[kind, name] = len(self.vertices)
        self.vertices.append(Vertex(title, kind, name, node, found, costs))
        return len(self.vertices) - 1

    @staticmethod
    def _lying(layout: Layout) -> CutOperation:
        blocks = max(layout.fused, default=1)
        name = layout_name(layout) + (f" in {blocks} blocks" if blocks > 1 else "")
        return CutOperation(name, (layout,), (layout,), (layout,))

    def _strategies(
        self, node: PlanNode, charged: Sequence[str]
    ) -> tuple[list[CutOperation], list[StrategyCost]]:
        """Those of a node; nodes that are alike have the same."""
        placed = frozenset(s.name for s in node.operands if s.name in self.placed)
        key = self._signature(node, charged, placed)
        if key not in self._known:
            blocks = self.blocks.get(node.name)
            every = placements(node.call, node.letters, self.model.axes, node.learns, blocks)
            if SHARE in node.fx_node.meta and all(node.learns):
                every = share_placements(every, self.model.axes)
            if node.name in self.graph.writes.whole_results:
                every = [p for p in every if not any(layout.sharded for layout in p.outputs)]
            found = allowed(every, node, self.model.axes, self.options)
            costs = [self.model.of(node, placement, charged, placed) for placement in found]
            self._known[key] = found, costs
        return self._known[key]

    def _signature(self, node: PlanNode, charged: Sequence[str], placed: frozenset[str]) -> object:
        memory = {s.info.memory: i for i, s in enumerate(node.operands) if s.info is not None}
        memory |= {info.memory: -1 - i for i, info in enumerate(node.op.outputs)}
        operands = tuple(
            (s.kind == "parameter", s.name in placed, s.info and (s.info.dtype, s.info.nbytes), s.learns)
            for s in node.operands
        )
        kept = tuple((memory.get(name, "inner"), node.op.saved[name]) for name in charged)
        work = node.op.forward, node.op.backward
        outputs = tuple((o.dtype, o.nbytes, o.requires_grad) for o in node.op.outputs)
        wanted = tuple(sorted(self.blocks.get(node.name, {}).items()))
        letters = node.letters and (
            node.letters.tensors,
            tuple(sorted(node.letters.blocks.items())),
            node.letters.whole,
            node.letters.sums_inside,
        )
        return (
            node.call.name, node.call.operands, node.call.outputs, operands, kept, work, outputs, wanted,
            letters, node.reached, node.call["reduction"], SHARE in node.fx_node.meta,
            node.name in self.graph.writes.whole_results,
        )  # fmt: skip

    def _add_parameter(self, name: str) -> None:
        """A parameter that chooses how it rests."""
        info, use = self.graph.graph.parameters[name], self.placed[name]
        uses = dict.fromkeys(
            placement.inputs[i]
            for user in use.users
            for placement in self.vertices[self.place["node", user.name]].placements
            for i, operand in enumerate(user.operands)
            if operand.name == name
        )
        layouts = [Layout(((),) * len(info.shape))]
        if not use.by_modules:
            layouts = resting_layouts(uses, info.shape, self.model.axes, further=use.may_be_moved)
        costs = []
        for layout in layouts:
            nbytes = self.model.parameter_bytes(info.nbytes, info.requires_grad, layout)
            memory = MemoryCost(parameter=nbytes) if info.requires_grad else MemoryCost(buffer=nbytes)
            costs.append(StrategyCost(FREE.compute, FREE.communication, (), (), memory))
        self._add(name, "parameter", name, None, [self._lying(layout) for layout in layouts], costs)

    def _add_result(self, source: Source) -> None:
        if source.kind != "node" or source.info is None:
            return
        name = source.name if source.index == 0 else f"{source.name}[{source.index}]"
        loss = self.graph.graph.loss
        producer = self.vertices[self.place["node", source.name]]
        if loss is not None and name != loss:
            return  # is handed out as it lies
        layout = Layout(((),) * len(source.info.shape))
        if loss is None and self.options.dataloader_option is DataloaderOption.DISTRIBUTED:
            layout = input_layout(name, source.info, self.graph, self.model.axes, self.options)
        place = self._add(f"result {producer.title}", "result", name, None, [self._lying(layout)], [FREE])
        self._flow(source, place, 0, source.learns)

    def _flow(self, source: Source, target: int, operand: int, learns: bool) -> None:
        if (place := self.place.get((source.kind, source.name))) is None or source.info is None:
            return  # a parameter that rests as it is used, or a constant
        index = source.index if source.kind == "node" else 0
        node = self.vertices[target].node
        fixed = node is not None and (node.name, operand) in self.graph.writes.fixed
        twice = node is not None and source.kind == "parameter" and source.name in node.op.saved_parameters
        self.flows.append(OperandFlow(place, target, index, operand, source.info, learns, fixed, twice))


def _fill(problem: PlanProblem) -> None:
    solver = problem.solver_graph
    for vertex in problem.vertices:
        seconds = [cost.seconds for cost in vertex.costs]
        memory = [cost.memory.lasting for cost in vertex.costs]
        solver.add_node(vertex.title, seconds, memory, [p.name for p in vertex.placements])
    for flow in problem.flows:
        solver.add_edge(flow.source, flow.target, problem.table(flow))
