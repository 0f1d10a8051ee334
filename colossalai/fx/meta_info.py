"""``MetaInfoProp`` and its functions find the shapes and costs of the nodes of any ``GraphModule``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from colossalai.fx.costs import CostPass
from colossalai.fx.nodes import Nodes
from colossalai.fx.op_graph import OpNode
from colossalai.fx.twin import fake_device, fake_like, fake_model

OP = "op"
"""The key of a node's meta under which its ``OpNode`` lies."""

_UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}


class MetaInfoProp:
    """Finds the shapes and costs of the nodes of a ``GraphModule``, for inputs of which only shapes matter.

    After ``run``, ``node.meta["val"]`` is what a node returns, with tensors on the meta device, and
    ``node.meta["op"]`` its ``OpNode``.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.nodes: dict[str, OpNode] = {}

    def run(self, *args: Any) -> Any:
        """Go through the graph with inputs like ``args``; returns what the graph returns, without values."""
        return _with_fakes(self.module, args, self)

    propagate = run

    def summary(self, unit: str = "MB") -> str:
        """A table of the nodes: operations and bytes of both passes, and what is kept."""
        size = _scale(unit)
        head = ("Op", "Module", "Shape", "Fwd GFLOP", "Bwd GFLOP", f"Out {unit}", f"Kept {unit}")
        rows = [
            (
                f"{node.name} ({node.operation})",
                node.module,
                ", ".join("x".join(map(str, out.shape)) for out in node.outputs),
                f"{node.forward.operations / 1e9:.4g}",
                f"{node.backward.operations / 1e9:.4g}",
                f"{sum(out.nbytes for out in node.outputs) / size:.4g}",
                f"{node.saved_bytes / size:.4g}",
            )
            for node in self.nodes.values()
        ]
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in (head, *rows)
        ]
        return "\n".join(line.rstrip() for line in lines)


def _scale(unit: str) -> int:
    if unit.upper() not in _UNITS:
        raise ValueError(f"unit={unit!r} is none of {', '.join(_UNITS)}")
    return _UNITS[unit.upper()]


def _with_fakes(module: fx.GraphModule, args: tuple[Any, ...], costs: MetaInfoProp | None) -> Any:
    """Set ``meta`` of the nodes of ``module``, in the first place shapes, and for ``costs`` their costs."""
    mode, device = FakeTensorMode(allow_non_fake_inputs=True), fake_device(module)
    inputs = fake_like(args, mode, device)
    with torch.random.fork_rng(devices=[]), fake_model(module, mode, device):
        with mode, torch.enable_grad():
            result = _Shapes(module, garbage_collect_values=False).run(*inputs, enable_io_processing=False)
        if costs is not None:
            passed = CostPass(module, module.graph, {}, mode).run()
            costs.nodes = Nodes(module, module.graph, passed).nodes()
    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map_only(Tensor, _on_meta, node.meta["val"])
        if costs is not None and node.name in costs.nodes:
            node.meta[OP] = costs.nodes[node.name]
    return tree_map_only(Tensor, _on_meta, result)


class _Shapes(fx.Interpreter):
    """Notes what each node returns."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        n.meta["val"] = result
        return result


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def metainfo_trace(gm: fx.GraphModule, *args: Any, verbose: bool = False, unit: str = "MB") -> fx.GraphModule:
    """Find the costs of the nodes of ``gm`` for inputs like ``args``; see ``MetaInfoProp``.

    With ``verbose``, they are printed as a table in ``unit``.
    """
    _scale(unit)
    found = MetaInfoProp(gm)
    found.run(*args)
    if verbose:
        print(found.summary(unit))
    return gm


def shape_prop_pass(module: fx.GraphModule, *args: Any) -> fx.GraphModule:
    """Find the shapes of the nodes of ``module`` for inputs like ``args``, as ``node.meta["val"]``."""
    _with_fakes(module, args, None)
    return module


def symbolic_profile(module: fx.GraphModule, *args: Any, verbose: bool = False) -> fx.GraphModule:
    """Find the shapes and costs of the nodes of ``module`` for inputs like ``args``; see ``MetaInfoProp``."""
    return metainfo_trace(module, *args, verbose=verbose)


def output_bytes(node: fx.Node) -> int:
    """The bytes of the tensors that a node returns, once its shape is known."""
    return sum(
        t.numel() * t.element_size() for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)
    )
