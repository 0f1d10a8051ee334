"""The documented tracers, ``ColoTracer``, ``symbolic_trace`` and ``meta_trace``, over ``capture``.

Where ``trace_model`` records operations, these keep the layers of ``torch.nn`` as calls of modules, which
scripts that cut or replace layers expect.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_unflatten

from colossalai.fx.capture import Captured, capture, check_inputs
from colossalai.fx.graph_module import ColoGraphModule
from colossalai.fx.joint import trace_step
from colossalai.fx.leaves import LeafModule
from colossalai.fx.op_graph import loss_of
from colossalai.fx.twin import RECOMPUTED, fake_device, fake_like, fake_model


class ColoTracer:
    """Records the graph of a model, in which layers of ``torch.nn`` are calls.

    Args:
        trace_act_ckpt: whether nodes inside a checkpointed function are labelled, so that a
            ``ColoGraphModule`` of the graph recomputes them.
        bias_addition_split: whether the bias of a linear layer or a convolution is added by a node of its
            own; such layers are then taken apart.
    """

    def __init__(self, trace_act_ckpt: bool = False, bias_addition_split: bool = False) -> None:
        self.trace_act_ckpt = trace_act_ckpt
        self.bias_addition_split = bias_addition_split

    def trace(
        self,
        root: nn.Module,
        concrete_args: dict[str, Any] | None = None,
        meta_args: dict[str, Any] | None = None,
    ) -> fx.Graph:
        """The graph of ``root(**concrete_args, **meta_args)``, whose placeholders are the tensors of these.

        Of the tensors among ``meta_args`` only shapes and dtypes matter.  Without them, torch's own tracer
        records the model, which must then ask nothing of its inputs.
        """
        if meta_args is None:
            return fx.Tracer().trace(root, concrete_args)
        given = {**(concrete_args or {}), **meta_args}
        check_inputs(root, (), given)
        order = list(inspect.signature(root.forward).parameters)
        given = dict(sorted(given.items(), key=lambda item: _place(order, item[0])))
        mode, device = FakeTensorMode(allow_non_fake_inputs=True), fake_device(root)
        leaves = {
            path: LeafModule(path, "a layer")
            for path, m in root.named_modules()
            if self.is_leaf_module(m, path)
        }
        fakes = fake_like(given, mode, device)
        with torch.random.fork_rng(devices=[]), fake_model(root, mode, device):
            captured = capture(root, (), fakes, mode, leaves, {})
        return self._finished(root, captured)

    def is_leaf_module(self, module: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is one node: a layer of ``torch.nn`` that holds no others."""
        own = type(module).__module__.startswith("torch.nn") and not list(module.children())
        return own and not (self.bias_addition_split and _bias(module) is not None)

    def _finished(self, root: nn.Module, captured: Captured) -> fx.Graph:
        graph = captured.graph
        for node in list(graph.nodes):
            if node.op == "placeholder" and not isinstance(node.meta.get("val"), Tensor):
                graph.erase_node(node)  # a concrete argument is part of the graph
            elif not self.trace_act_ckpt:
                node.meta.pop(RECOMPUTED, None)
        for name, value in captured.attributes.items():
            if isinstance(value, Tensor) and not hasattr(root, name):
                root.register_buffer(name, value, persistent=False)  # a constant, as torch's tracer does
        if self.bias_addition_split:
            split_bias_additions(graph)
        output = graph.find_nodes(op="output")[0]
        results = [captured.constants.get(i, r) for i, r in enumerate(output.args[0])]
        output.args = (_plain(tree_unflatten(results, captured.out_spec)),)
        return graph


def _place(order: list[str], name: str) -> int:
    return order.index(name) if name in order else len(order)


def _bias(module: nn.Module) -> Tensor | None:
    return module.bias if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) else None


def _plain(tree: Any) -> Any:
    """``tree`` of lists, tuples and dicts alone, which a graph can hold."""
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(_plain, tree)) if type(tree) in (list, tuple) else tuple(map(_plain, tree))
    return tree


def split_bias_additions(graph: fx.Graph) -> None:
    """Let ``aten.linear`` and convolutions have no bias, and a node behind each add it."""
    aten = torch.ops.aten
    convolutions = {getattr(aten, f"conv{n}d").default: n for n in (1, 2, 3)}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (aten.linear.default, *convolutions):
            continue
        bias = node.args[2] if len(node.args) > 2 else None
        if bias is None:
            continue
        rest = node.args[3:]
        node.args = (*node.args[:2], None, *rest) if rest else node.args[:2]
        spatial = convolutions.get(node.target, 0)
        with graph.inserting_after(node):
            added = bias
            if spatial:
                added = graph.call_function(aten.view.default, (bias, [1, -1, *[1] * spatial]))
        where = added if spatial else node
        with graph.inserting_after(where):
            total = graph.call_function(aten.add.Tensor, (node, added))
        node.replace_all_uses_with(total, delete_user_cb=lambda user, total=total: user is not total)
        total.meta.update(node.meta)
        if spatial:
            added.meta.update({**node.meta, "val": bias.meta["val"].view([1, -1, *[1] * spatial])})


def symbolic_trace(
    root: nn.Module,
    concrete_args: dict[str, Any] | None = None,
    meta_args: dict[str, Any] | None = None,
    trace_act_ckpt: bool = False,
) -> ColoGraphModule:
    """``root`` as a module that runs its recorded graph; see ``ColoTracer``."""
    graph = ColoTracer(trace_act_ckpt=trace_act_ckpt).trace(root, concrete_args, meta_args)
    return ColoGraphModule(root, graph, type(root).__name__)


def meta_trace(
    module: nn.Module, fake_device: torch.device | str | None = None, *args: Any, **kwargs: Any
) -> fx.Graph:
    """The graph of the kernels of a forward and a backward pass of ``module(*args, **kwargs)``.

    What is differentiated is the model's loss, or the sum of its outputs where it returns none.  The tensors
    are taken to be on ``fake_device``.
    """
    return trace_step(module, *args, loss=_loss_or_sum, device=fake_device, **kwargs).module.graph


def _loss_or_sum(output: Any) -> Tensor:
    try:
        return loss_of(output)
    except ValueError:
        learnt = [t.sum() for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        if not learnt:
            raise ValueError("no output of the model has a gradient") from None
        total = learnt[0]
        for more in learnt[1:]:
            total = total + more
        return total
