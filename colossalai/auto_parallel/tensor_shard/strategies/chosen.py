"""``sharded_plan``: what was chosen, as layouts for a runtime and as predictions of a step."""

from __future__ import annotations

from collections.abc import Sequence

from colossalai.auto_parallel.tensor_shard.sharded_plan import NodePlan, PredictedStep, ShardedPlan
from colossalai.auto_parallel.tensor_shard.strategies.placements import layout_name
from colossalai.auto_parallel.tensor_shard.strategies.problem import OperandFlow, PlanProblem
from colossalai.mesh import Layout
from colossalai.mesh.collectives import Transfer


def sharded_plan(problem: PlanProblem, choice: Sequence[int], fingerprint: str = "") -> ShardedPlan:
    """The plan that takes strategy ``choice[i]`` of vertex i."""
    nodes: dict[str, NodePlan] = {}
    parameters: dict[str, Layout] = {}
    inputs: dict[str, Layout] = {}
    outputs: dict[str, Layout] = {}
    for vertex, number in zip(problem.vertices, choice, strict=True):
        placement = vertex.placements[number]
        if vertex.kind == "node":
            nodes[vertex.name] = NodePlan(
                placement.name, placement.inputs, placement.computed, placement.outputs
            )
            assert vertex.node is not None
            for source, rest in zip(vertex.node.operands, placement.resting, strict=True):
                if source.kind == "parameter":
                    parameters.setdefault(source.name, rest)
        elif vertex.kind == "input":
            inputs[vertex.name] = placement.outputs[0]
        elif vertex.kind == "result":
            outputs[vertex.name] = placement.inputs[0]
    for vertex, number in zip(problem.vertices, choice, strict=True):
        if vertex.kind == "parameter":
            parameters[vertex.name] = vertex.placements[number].outputs[0]
    for source in problem.graph.results:
        if source.kind == "node" and (name := _result_name(source.name, source.index)) not in outputs:
            outputs[name] = nodes[source.name].outputs[source.index]
    links = problem.model.moves.links
    return ShardedPlan(
        axes={axis: link.ranks for axis, link in links.items()},
        nodes=nodes,
        parameters=parameters,
        inputs=inputs,
        outputs=outputs,
        links=links,
        predicted=predicted_step(problem, choice),
        fingerprint=fingerprint,
    )


def _result_name(name: str, index: int) -> str:
    return name if index == 0 else f"{name}[{index}]"


def predicted_step(problem: PlanProblem, choice: Sequence[int]) -> PredictedStep:
    """Seconds, bytes and collectives of a step of a plan."""
    costs = [v.costs[number] for v, number in zip(problem.vertices, choice, strict=True)]
    forward = [t for cost in costs for t in cost.forward]
    backward = [t for cost in costs for t in cost.backward]
    for flow in problem.flows:
        there, back = flow_transfers(problem, flow, choice)
        forward += there
        backward += back
    return PredictedStep(
        compute=sum(cost.compute.total for cost in costs),
        communication=problem.model.moves.time((*forward, *backward)),
        memory=int(sum(cost.memory.lasting for cost in costs)),
        forward=tuple(forward),
        backward=tuple(backward),
    )


def flow_transfers(
    problem: PlanProblem, flow: OperandFlow, choice: Sequence[int]
) -> tuple[list[Transfer], list[Transfer]]:
    """The collectives of a tensor on its way from one operation to the next."""
    source = problem.vertices[flow.source].placements[choice[flow.source]].outputs[flow.index]
    target = problem.vertices[flow.target].placements[choice[flow.target]].inputs[flow.operand]
    parameter = problem.vertices[flow.source].kind == "parameter"
    return problem.model.moves.transfers(
        flow.info.shape, flow.info.dtype.itemsize, source, target, flow.learns, parameter, flow.twice
    )


def gathered_parameters(problem: PlanProblem, choice: Sequence[int]) -> dict[str, str]:
    """The parameters that rest cut and are gathered for an operation, with the names of their layouts."""
    found = {}
    for flow in problem.flows:
        vertex = problem.vertices[flow.source]
        if vertex.kind == "parameter" and flow_transfers(problem, flow, choice)[0]:
            found[vertex.name] = vertex.placements[choice[flow.source]].name
    return found


def describe_flow(problem: PlanProblem, flow: OperandFlow, choice: Sequence[int]) -> str:
    """From which layout to which a tensor is brought: ``S0R -> RR over 1``."""
    source = problem.vertices[flow.source].placements[choice[flow.source]].outputs[flow.index]
    target = problem.vertices[flow.target].placements[choice[flow.target]].inputs[flow.operand]
    return f"{layout_name(source)} -> {layout_name(target)}"
