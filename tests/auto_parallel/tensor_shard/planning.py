"""Small models, the grids they are planned for, and plans that people write by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from colossalai.auto_parallel.tensor_shard.constructor import StrategiesConstructor
from colossalai.auto_parallel.tensor_shard.initialize import build_strategy_constructor
from colossalai.auto_parallel.tensor_shard.solver import StrategyGraph
from colossalai.auto_parallel.tensor_shard.strategies.placements import CutOperation
from colossalai.auto_parallel.tensor_shard.strategies.problem import PlanProblem, Vertex
from colossalai.device import DeviceMesh
from colossalai.device.presets import DEVICES
from colossalai.fx import OpGraph, trace_model
from tests.fx.models import build


def grid(*shape: int) -> DeviceMesh:
    """A grid whose last axis has the fastest links; no job is needed."""
    axes = len(shape)
    return DeviceMesh(
        torch.arange(int(torch.tensor(shape).prod())),
        mesh_shape=shape,
        mesh_alpha=[1e-6] * axes,
        mesh_beta=[4.0 ** (axes - i) * 1e-10 for i in range(axes)],
    )


class Mlp(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, width), nn.LayerNorm(width), nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(nn.functional.gelu(self.up(x))))


def model_and_batch(family: str) -> tuple[nn.Module, dict[str, Any]]:
    if family == "mlp":
        return Mlp(), {"x": torch.zeros(8, 16)}
    if family == "resnet":
        from titans.model.resnet import BasicBlock, ResNet

        return ResNet(BasicBlock, (1, 1, 1, 1), 8), {"images": torch.zeros(8, 3, 32, 32)}
    return build(family)


@lru_cache(maxsize=16)
def traced(family: str) -> OpGraph:
    model, batch = model_and_batch(family)
    return trace_model(model, **batch)


def constructor(family: str, mesh: DeviceMesh, **options: Any) -> StrategiesConstructor:
    return build_strategy_constructor(traced(family), mesh, **options)


@lru_cache(maxsize=4)
def large_gpt2(layers: int) -> OpGraph:
    """GPT-2 of the usual width, of which nothing is in memory."""
    import transformers

    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=layers)).train()
        ids = torch.zeros(8, 1024, dtype=torch.long)
    return trace_model(model, input_ids=ids, labels=ids)


def large_problem(layers: int, mesh: DeviceMesh) -> PlanProblem:
    return StrategiesConstructor(large_gpt2(layers), mesh, device=DEVICES["h100"]).problem


def restricted(problem: PlanProblem, keep: Callable[[Vertex, CutOperation], bool]) -> StrategyGraph:
    """The choices of a plan by hand; what it does not speak of keeps all of its strategies."""
    graph = StrategyGraph()
    kept = []
    for vertex, node in zip(problem.vertices, problem.solver_graph.nodes, strict=True):
        numbers = [i for i, placement in enumerate(vertex.placements) if keep(vertex, placement)]
        assert numbers, f"{vertex.title} has no strategy of this kind"
        kept.append(numbers)
        graph.add_node(
            node.name, node.cost[numbers], node.memory[numbers], [node.strategies[i] for i in numbers]
        )
    for edge in problem.solver_graph.edges:
        rows, columns = kept[edge.source], kept[edge.target]
        graph.add_edge(edge.source, edge.target, edge.cost[rows][:, columns])
    return graph


def data_parallel(vertex: Vertex, placement: CutOperation) -> bool:
    """Rows over the whole mesh, weights whole."""
    if vertex.kind == "parameter":
        return not placement.outputs[0].sharded
    if vertex.node is None or vertex.node.why_whole or not _is_product(vertex):
        return True
    return placement.inputs[_data(vertex)].dims[0] == ("0", "1") and placement.outputs[0].dims[0] == (
        "0",
        "1",
    )


_COLUMNS = ("attn_c_attn", "mlp_c_fc")
_ROWS = ("attn_c_proj", "mlp_c_proj")


def tensor_parallel(
    axes: tuple[str, ...], rows: tuple[str, ...] = ()
) -> Callable[[Vertex, CutOperation], bool]:
    """Megatron's cut of GPT-2 over ``axes``, and data parallelism over ``rows``."""

    def keep(vertex: Vertex, placement: CutOperation) -> bool:
        if vertex.node is None or not vertex.title.endswith((*_COLUMNS, *_ROWS)):
            return True
        data, out = placement.inputs[_data(vertex)], placement.outputs[0]
        if vertex.title.endswith(_COLUMNS):
            return data.dims == (rows, ()) and out.dims == (rows, axes)
        return data.dims == (rows, axes) and out.dims == (rows, ())

    return keep


def _is_product(vertex: Vertex) -> bool:
    return vertex.node is not None and vertex.node.call.name in ("addmm", "linear")


def _data(vertex: Vertex) -> int:
    assert vertex.node is not None
    return 1 if vertex.node.call.name == "addmm" else 0
