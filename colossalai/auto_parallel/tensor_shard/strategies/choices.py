"""Which placements a search may take, by its ``SolverOptions``."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from colossalai.auto_parallel.tensor_shard.options import (
    DataloaderOption,
    ShardOption,
    SolverOptions,
    SolverPerference,
)
from colossalai.auto_parallel.tensor_shard.strategies.graph import PlanGraph, PlanNode
from colossalai.auto_parallel.tensor_shard.strategies.placements import CutOperation
from colossalai.fx.op_graph import TensorInfo
from colossalai.mesh import Layout


def allowed(
    found: list[CutOperation], node: PlanNode, axes: Mapping[str, int], options: SolverOptions
) -> list[CutOperation]:
    """Those of ``found`` that the options allow.

    An operation that has none, such as a scalar that every rank computes, keeps the one that cuts nothing;
    but a product that must be cut and cannot be is refused.
    """
    wanted = [p for p in found if _is_preferred(p, node, options.solver_perference)]
    chosen = [p for p in wanted if _is_sharded(p, axes, options.shard_option)]
    if chosen:
        return chosen
    if options.shard_option is not ShardOption.STANDARD and _has_weight(node):
        shapes = [tuple(x.shape) for x in node.call.operands]
        raise ValueError(
            f"shard_option={options.shard_option.value!r}: no dim of {node.title!r} ({node.call.name} of"
            f" tensors {shapes}) can be cut so over the mesh {dict(axes)}; choose another option, sizes that"
            " the mesh divides, or another mesh"
        )
    return wanted or found[:1]


def _has_weight(node: PlanNode) -> bool:
    return node.letters is not None and any(
        s.kind == "parameter" and len(x.shape) > 1
        for s, x in zip(node.operands, node.call.operands, strict=True)
    )


def _is_preferred(placement: CutOperation, node: PlanNode, preference: SolverPerference) -> bool:
    if preference is SolverPerference.STANDARD:
        return True
    data = [
        layout
        for source, layout in zip(node.operands, placement.resting, strict=True)
        if source.kind != "parameter"
    ]
    weights = [
        layout
        for source, layout in zip(node.operands, placement.resting, strict=True)
        if source.kind == "parameter"
    ]
    activations = [*data, *placement.outputs]
    if preference is SolverPerference.DP:  # only the batch is cut
        return not any(w.sharded for w in weights) and not any(any(a.dims[1:]) for a in activations)
    return not any(a.dims[:1] != () and a.dims[0] for a in activations)  # the batch is never cut


def _is_sharded(placement: CutOperation, axes: Mapping[str, int], option: ShardOption) -> bool:
    if option is ShardOption.STANDARD:
        return True
    used = {a for layout in (*placement.inputs, *placement.outputs) for a in layout.sharded}
    large = [axis for axis, size in axes.items() if size > 1]
    if option is ShardOption.SHARD:
        return bool(used)
    return used == ({*large[-1:]} if option is ShardOption.SHARD_LAST_AXIS else {*large})


def input_layout(
    name: str, info: TensorInfo, graph: PlanGraph, axes: Mapping[str, int], options: SolverOptions
) -> Layout:
    """How an input comes in: whole, or cut along its first dim over the whole mesh."""
    whole = Layout(((),) * len(info.shape))
    if options.dataloader_option is DataloaderOption.REPLICATED or not info.shape:
        return whole
    batch = next((i.shape[0] for i in graph.inputs.values() if i.shape), None)
    if info.shape[0] != batch:
        return whole  # not cut by a data loader
    parts = prod(axes.values())
    if info.shape[0] % parts:
        raise ValueError(
            f"dataloader_option='distributed': the batch of {name!r} has {batch} samples, which {parts}"
            f" devices do not share evenly; take a multiple of {parts}, or dataloader_option='replicated'"
        )
    return Layout((tuple(a for a, n in axes.items() if n > 1), *whole.dims[1:]))
