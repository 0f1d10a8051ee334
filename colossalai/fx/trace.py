"""``trace_model``: from a model and a batch to an ``OpGraph``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten

from colossalai.fx.capture import Captured, InputError, capture, check_inputs
from colossalai.fx.costs import CostPass
from colossalai.fx.leaves import ROOT, LeafChoice, LeafModule
from colossalai.fx.nodes import Nodes, named_state, tensor_info
from colossalai.fx.op_graph import OpGraph, recorded_leaves
from colossalai.fx.rehearsal import Rehearsed, rehearse
from colossalai.fx.twin import attribute, fake_device, fake_like, fake_model, forward_with_loss


def trace_model(
    model: nn.Module,
    *args: Any,
    loss: Callable[..., Tensor] | None = None,
    targets: tuple[Any, ...] = (),
    leaf: LeafChoice | None = None,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> OpGraph:
    """Record what ``model(*args, **kwargs)`` computes, and what it costs, without computing it.

    The model runs on tensors without memory, in the mode (training or not) that it is in; it may itself have
    no memory.  No model is refused: code that needs values of tensors makes its module one operation of the
    graph, and its line is named there.

    Args:
        loss: ``loss(output, *targets)`` for a model that does not return its loss; the graph then takes
            ``loss_targets=targets`` as well, and returns a dict of ``loss`` and ``output``.
        leaf: ``leaf(path, module)`` says whether a module shall be one operation.
        device: where the tensors are taken to be, which decides about kernels; by default where the model is,
            and the CPU if it is on the meta device.  ``"meta"`` inside ``gpu_kernels()`` is a GPU that is not
            there.

    Raises:
        ValueError: the inputs do not fit the model.
    """
    check_inputs(model, args, kwargs)
    if loss is None and targets:
        raise ValueError("trace_model takes targets for a loss, and no loss was given")
    asked = [path for path, module in model.named_modules() if leaf is not None and leaf(path, module)]
    leaves = {path: LeafModule(path, "asked for") for path in _outermost(asked)}
    if loss is not None:
        kwargs = {**kwargs, "loss_targets": tuple(targets)}
    rehearsed: dict[str, Rehearsed] = {}
    while True:
        try:
            with torch.inference_mode(False), torch.enable_grad():  # wherever it is called
                return _attempt(model, args, kwargs, fake_device(model, device), loss, leaves, rehearsed)
        except InputError as failed:
            _rehearse(model, args, kwargs, failed, loss, leaves, rehearsed)


def _attempt(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    loss: Callable[..., Tensor] | None,
    leaves: dict[str, LeafModule],
    rehearsed: dict[str, Rehearsed],
) -> OpGraph:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake_args, fake_kwargs = fake_like((args, kwargs), mode, device)
    outputs = {path: fake_like(found.outputs, mode, device) for path, found in rehearsed.items()}
    operations = {path or ROOT: found.operations for path, found in rehearsed.items()}
    with torch.random.fork_rng(devices=[]), fake_model(model, mode, device) as notes:
        if loss is not None:
            forward_with_loss(model, loss)
        captured = capture(model, fake_args, fake_kwargs, mode, leaves, outputs)
        costs = CostPass(model, captured.graph, captured.attributes, mode, operations).run()
        found = Nodes(model, captured.graph, costs, captured.out_spec)
        nodes = found.nodes()
    return OpGraph(
        module=_executable(model, captured),
        nodes=nodes,
        in_spec=tree_flatten((args, kwargs))[1],
        recorded=recorded_leaves(tree_flatten((args, kwargs))[0]),
        out_spec=captured.out_spec,
        constants=captured.constants,
        inputs=found.inputs,
        parameters={name: tensor_info(t, name) for name, t in named_state(model).items()},
        loss=found.loss,
        route=captured.route,
        failures=captured.failures,
        leaves=captured.leaves,
        notes=notes,
    )


def _rehearse(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    failed: InputError,
    loss: Callable[..., Tensor] | None,
    leaves: dict[str, LeafModule],
    rehearsed: dict[str, Rehearsed],
) -> None:
    """Find out on real tensors what the leaf returns that failed; where it fails too, the model does."""
    if failed.path is None or failed.path in rehearsed:
        raise failed
    try:
        found = rehearse(model, args, kwargs, failed.path, loss)
    except Exception:
        raise failed from None
    if found is None:
        raise failed
    rehearsed[failed.path] = found
    leaves[failed.path] = LeafModule(failed.path, f"it ran on real tensors only: {failed.reason}")


def _outermost(paths: list[str]) -> list[str]:
    return [p for p in paths if not any(p != q and (q == "" or p.startswith(f"{q}.")) for q in paths)]


def _executable(model: nn.Module, captured: Captured) -> fx.GraphModule:
    """The graph as a module that shares the tensors of ``model``; constants of the recording become real."""
    root = nn.Module()
    names = {id(t): name for name, t in named_state(model).items()}
    for node in captured.graph.nodes:
        if node.op == "call_module":
            part = model if node.target == ROOT else model.get_submodule(node.target)
            _put(root, node.target, part)
        elif node.op == "get_attr":
            try:
                value = attribute(model, node.target)
            except AttributeError:
                value = captured.attributes[node.target]
            node.target = names.get(id(value), node.target)
            _put(root, node.target, value)
    return fx.GraphModule(root, captured.graph, type(model).__name__)


def _put(root: nn.Module, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        if not hasattr(root, name):
            root.add_module(name, nn.Module())
        root = getattr(root, name)
    if isinstance(value, nn.Module):
        root.add_module(last, value)
    elif isinstance(value, nn.Parameter):
        root.register_parameter(last, value)
    elif isinstance(value, Tensor):
        root.register_buffer(last, value)
    else:
        setattr(root, last, value)


__all__ = ["trace_model"]
