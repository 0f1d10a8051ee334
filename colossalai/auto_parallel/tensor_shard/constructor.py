"""``StrategiesConstructor`` and ``GraphAnalyser``: strategies and lifetimes under their documented names."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from colossalai.auto_parallel.tensor_shard.options import SolverOptions
from colossalai.auto_parallel.tensor_shard.sharding_strategy import (
    OperationData,
    OperationDataType,
    ShardingStrategy,
    StrategiesVector,
    TrainCycleItem,
)
from colossalai.auto_parallel.tensor_shard.strategies.costs import CostModel, StrategyCost
from colossalai.auto_parallel.tensor_shard.strategies.moves import MoveCosts
from colossalai.auto_parallel.tensor_shard.strategies.placements import CutOperation
from colossalai.auto_parallel.tensor_shard.strategies.problem import PlanProblem, Vertex, plan_problem
from colossalai.device import DeviceMesh
from colossalai.device.presets import DEVICES, DevicePreset
from colossalai.fx import OpGraph
from colossalai.mesh import Layout
from colossalai.tensor.sharding_spec import ShardingSpec


class StrategiesConstructor:
    """Finds the strategies of every operation of a traced model.

    Args:
        graph: what ``trace_model`` gives.
        device_mesh: the grid of devices, with the costs of its axes.
        solver_options: which strategies count.
        device: how fast the devices are; by default CPUs, as ``device_mesh`` has measured them.
        optimizer_states: how many states of its size an optimizer keeps of each parameter; 2 as of Adam.
        forward_only: count the forward pass alone.
    """

    def __init__(
        self,
        graph: OpGraph,
        device_mesh: DeviceMesh,
        solver_options: SolverOptions | None = None,
        *,
        device: DevicePreset | None = None,
        optimizer_states: int = 2,
        forward_only: bool = False,
    ) -> None:
        if not isinstance(graph, OpGraph):
            raise TypeError(
                "StrategiesConstructor takes the graph that colossalai.fx.trace_model gives, which knows what"
                f" operations cost; got {type(graph).__name__}"
            )
        self.op_graph, self.device_mesh = graph, device_mesh
        self.solver_options = solver_options or SolverOptions()
        links, device = device_mesh.links, device or device_mesh.cpu or DEVICES["cpu"]
        model = CostModel(MoveCosts(links, forward_only), device, optimizer_states)
        self.problem: PlanProblem = plan_problem(graph, model, self.solver_options)
        self.leaf_strategies: list[StrategiesVector] = []
        self.strategy_map: dict[fx.Node, StrategiesVector] = {}

    @property
    def graph(self) -> fx.Graph:
        return self.op_graph.module.graph

    def build_strategies_and_cost(self) -> None:
        """Fill ``leaf_strategies``: the strategies of every node that has a choice, with all their costs."""
        nodes = {node.name: node for node in self.graph.nodes}
        nodes |= {str(node.target): node for node in self.graph.nodes if node.op == "get_attr"}
        flows = defaultdict(list)
        for flow in self.problem.flows:
            flows[flow.target].append(flow)
        self.leaf_strategies = []
        for number, vertex in enumerate(self.problem.vertices):
            if vertex.kind == "result":
                continue
            vector = StrategiesVector(nodes[vertex.name])
            tables: dict[fx.Node, Any] = {}
            for flow in flows[number]:
                source, table = nodes[self.problem.vertices[flow.source].name], self.problem.table(flow)
                tables[source] = tables[source] + table if source in tables else table
            for i, (placement, cost) in enumerate(zip(vertex.placements, vertex.costs, strict=True)):
                strategy = self._strategy(vertex, placement, cost)
                strategy.resharding_costs = {source: table[:, i].tolist() for source, table in tables.items()}
                vector.append(strategy)
            self.leaf_strategies.append(vector)
            self.strategy_map[vector.node] = vector

    def _strategy(self, vertex: Vertex, placement: CutOperation, cost: StrategyCost) -> ShardingStrategy:
        specs: dict[OperationData, ShardingSpec] = {}
        node = vertex.node
        if node is not None:
            kinds = {"parameter": OperationDataType.PARAM, "node": OperationDataType.ARG}
            for source, operand, layout in zip(
                node.operands, node.call.operands, placement.inputs, strict=True
            ):
                kind = kinds.get(source.kind, OperationDataType.INPUT)
                specs[OperationData(source.name, kind, None)] = self._spec(layout, operand.shape)
            for shape, layout in zip(node.call.outputs, placement.outputs, strict=True):
                specs[OperationData(node.name, OperationDataType.OUTPUT, None)] = self._spec(layout, shape)
        memory = TrainCycleItem(cost.memory, cost.memory, cost.memory)
        return ShardingStrategy(placement.name, specs, cost.compute, cost.communication, memory)

    def _spec(self, layout: Layout, shape: tuple[int, ...]) -> ShardingSpec:
        dims = {d: [int(axis) for axis in axes] for d, axes in enumerate(layout.dims) if axes}
        return ShardingSpec(self.device_mesh, shape, dims)


@dataclass(frozen=True)
class LiveVariable:
    """A tensor that is still needed; ``is_inplace`` says whether its node writes into another's memory."""

    name: str
    node: fx.Node
    is_inplace: bool


class LiveVariableVector(list[LiveVariable]):
    """The tensors that are needed at one place."""

    def exists(self, name: str) -> bool:
        return any(variable.name == name for variable in self)

    def copy(self) -> LiveVariableVector:
        return LiveVariableVector(self)


@dataclass
class LiveStage:
    """A node, and what is needed after it has run.

    Args:
        all_live_vars: all tensors, with those that share memory.
        unique_live_vars: those that have memory of their own.
    """

    name: str
    node: fx.Node
    all_live_vars: LiveVariableVector = field(default_factory=LiveVariableVector)
    unique_live_vars: LiveVariableVector = field(default_factory=LiveVariableVector)


class GraphAnalyser:
    """Finds out how long the tensors of a graph are needed."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm, self.graph = gm, gm.graph

    def liveness_analysis(self) -> list[LiveStage]:
        """For every node that computes, in order, what is needed after it."""
        last: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            last[node] = node
            for source in node.all_input_nodes:
                last[source] = node
        alive = LiveVariableVector()
        stages: list[LiveStage] = []
        for node in self.graph.nodes:
            if node.op == "output":
                continue
            alive.append(LiveVariable(node.name, node, _is_in_place(node)))
            if node.op not in ("placeholder", "get_attr"):
                unique = LiveVariableVector(v for v in alive if not v.is_inplace)
                stages.append(LiveStage(f"stage_{len(stages)}", node, alive.copy(), unique))
            alive = LiveVariableVector(v for v in alive if last[v.node] is not node)
        return stages


def _is_in_place(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(node.kwargs.get("inplace")) or (schema is not None and schema.is_mutable)
