"""Makes a chain of stages of a traced graph: it is cut wherever a single value leads on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map_only

from colossalai.auto_parallel.checkpoint.meta_model import on_meta
from colossalai.auto_parallel.checkpoint.operation import Chain
from colossalai.auto_parallel.checkpoint.timeline import TimelineRecorder
from colossalai.device.presets import DEVICES
from colossalai.utils.meta import gpu_kernels


@dataclass
class GraphStages:
    """The stages of a graph, as lists of nodes, and the chain that they are."""

    nodes: list[list[fx.Node]]
    chain: Chain
    parameter_bytes: int

    def annotate(self, regions: list[list[int]]) -> None:
        """Write down the regions of each stage, from which the code of the graph is generated."""
        for nodes, its in zip(self.nodes, regions, strict=True):
            for node in nodes:
                node.meta.pop("activation_checkpoint", None)
                if its:
                    node.meta["activation_checkpoint"] = list(its)


def stages_of(graph: fx.Graph, common: list[str]) -> GraphStages:
    """Cut ``graph`` into stages and run each of them on the meta device, for its bytes and times.

    ``common`` are names of nodes that any stage may read.
    """
    module = graph.owning_module
    if module is None:
        raise ValueError("the graph of a chain must belong to a torch.fx.GraphModule, which has its weights")
    nodes = linearize(graph, common)
    columns: list[tuple[float, float, int, int, int, int]] = []
    with on_meta(module), gpu_kernels(), TimelineRecorder(DEVICES["h100"]) as recorder:
        recorder.hold((*module.parameters(), *module.buffers()))
        known: dict[fx.Node, Any] = {n: _given(n) for n in graph.nodes if n.op == "placeholder"}
        first = max((_bytes(value) for value in known.values()), default=0)
        interpreter = fx.Interpreter(module, garbage_collect_values=False)
        interpreter.env = known
        for stage in nodes:
            columns.append(_cost(interpreter, stage, recorder))
    ftime, btime, xbar, out, ftmp, btmp = (list(column) for column in zip(*columns, strict=True))
    chain = Chain(ftime, btime, [first, *out], xbar, ftmp, btmp)
    return GraphStages(nodes, chain, sum(p.nbytes for p in module.parameters()))


def linearize(graph: fx.Graph, common: list[str]) -> list[list[fx.Node]]:
    """The nodes that compute something, cut behind each one that alone is needed further on."""
    shared = {n for n in graph.nodes if n.op == "get_attr" or n.name in common}
    stages: list[list[fx.Node]] = [[]]
    needed = {n: len(n.users) for n in graph.nodes if n.op == "placeholder" and n not in shared and n.users}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        stages[-1].append(node)
        inputs = [n for n in node.all_input_nodes if n not in shared]
        if not inputs:
            shared.add(node)  # made of weights and of what all may read
            continue
        for source in inputs:
            needed[source] = needed.get(source, 0) - 1
        needed[node] = len(node.users)
        alive = [n for n, uses in needed.items() if uses > 0 and n not in shared]
        if alive == [node]:
            stages.append([])
    if not stages[-1]:
        stages.pop()
    elif len(stages) > 1 and not any(n not in shared for n in stages[-1]):
        stages[-2] += stages.pop()
    return stages


def _given(node: fx.Node) -> Any:
    value = node.meta.get("val", node.meta.get("tensor_meta"))
    if value is None:
        raise ValueError(
            f"node {node.name} of the graph does not know its value: run"
            " torch.fx.passes.fake_tensor_prop.FakeTensorProp, or ShapeProp, before a solver"
        )
    if isinstance(value, Tensor):
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    elif hasattr(value, "dtype"):
        made = torch.empty(value.shape, dtype=value.dtype, device="meta")
    else:
        return value
    return made.requires_grad_(made.is_floating_point())


def _cost(
    interpreter: fx.Interpreter, stage: list[fx.Node], recorder: TimelineRecorder
) -> tuple[float, float, int, int, int, int]:
    """Times of both passes, bytes kept and of the output, and bytes that both passes need beside."""
    recorder.begin("")
    start = recorder.now
    for node in stage:
        interpreter.env[node] = interpreter.run_node(node)
    output = interpreter.env[stage[-1]]
    for node in stage[:-1]:
        if all(user in stage for user in node.users):
            del interpreter.env[node]
    forward, peak, kept = recorder.seconds, recorder.peak - start, recorder.now - start
    out = _bytes(output)
    learnt = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    recorder.begin("")
    before = recorder.now
    if learnt:
        torch.autograd.backward(learnt, [torch.empty_like(t) for t in learnt])
    backward, worst = recorder.seconds, recorder.peak - before
    # the next stage differentiates with respect to its input alone
    interpreter.env[stage[-1]] = tree_map_only(
        Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), output
    )
    for value in interpreter.env.values():
        if isinstance(value, Tensor):
            value.grad = None
    return forward, backward, kept, out, max(0, peak - kept), max(0, worst - 2 * out)


def _bytes(value: Any) -> int:
    return sum(t.nbytes for t in tree_leaves(value) if isinstance(t, Tensor))
