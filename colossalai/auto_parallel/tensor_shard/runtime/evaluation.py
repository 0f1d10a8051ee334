"""The graph of a model in evaluation, made of its graph in training."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from colossalai.fx import trace_model
from colossalai.fx.nodes import is_random
from colossalai.fx.op_graph import OpGraph
from colossalai.mesh import full_shape
from colossalai.mesh.parameter import has_own_mesh
from colossalai.nn.policies.wrap_forward import native_class
from colossalai.tensor.letters.calls import operation_name

# The arguments of operations that say whether a model is in training, and their value in evaluation.
_SWITCHES: dict[str, Any] = {"train": False, "training": False, "dropout_p": 0.0}


def evaluation_graph(graph: OpGraph) -> OpGraph:
    """``graph``, which was recorded in training, with dropout and batch norm as in evaluation."""
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    buffers = {name for name, info in graph.parameters.items() if not info.requires_grad}
    for node in graph.module.graph.nodes:
        if _counts_steps(node, buffers):
            continue
        copies[node] = copied = made.node_copy(node, copies.__getitem__)
        schema = getattr(node.target, "_schema", None)
        if schema is None or node.op != "call_function":
            continue
        names = [argument.name for argument in schema.arguments]
        for name, value in _SWITCHES.items():
            if name in copied.kwargs:
                copied.kwargs = {**copied.kwargs, name: value}
            elif name in names and names.index(name) < len(copied.args):
                copied.update_arg(names.index(name), value)
        if is_random(copied):
            raise ValueError(f"{node.name} ({node.target}) draws random numbers, and may not in evaluation")
    return replace(graph, module=fx.GraphModule(graph.module, made))


def _counts_steps(node: fx.Node, buffers: set[str]) -> bool:
    """Whether a node writes to a buffer of the model, as batch norms count their batches, and does nothing
    else.
    """
    schema, first = getattr(node.target, "_schema", None), next(iter(node.args), None)
    writes = schema is not None and schema.is_mutable and operation_name(node).endswith("_")
    is_buffer = isinstance(first, fx.Node) and first.op == "get_attr" and str(first.target) in buffers
    return writes and is_buffer and not node.users


def check_evaluation(model: nn.Module, graph: OpGraph, args: Any, kwargs: Any) -> None:
    """Refuse a model that in evaluation does not compute what ``graph`` does.

    Code may ask whether it is in training, so the model is traced once more, as it is now.
    """
    with torch.inference_mode(False), serial_twin(model):
        traced = trace_model(model, *args, **kwargs)
    ours, theirs = list(_operations(graph)), list(_operations(traced))
    for one, other in zip(ours, theirs, strict=False):
        if one[1:] != other[1:]:
            now = f"{other[1]} of other tensors" if one[1] == other[1] else other[1]
            raise RuntimeError(
                f"in evaluation the model does not compute what the plan was made for: {one[0]} is"
                f" {one[1]} there, and {now} in evaluation; make a plan for a copy of the model that is"
                " in evaluation, from a checkpoint of this one"
            )
    if len(ours) != len(theirs):
        raise RuntimeError(
            f"in evaluation the model has {len(theirs)} operations, and the plan was made for {len(ours)};"
            " make a plan for a copy of the model that is in evaluation, from a checkpoint of this one"
        )


def _operations(graph: OpGraph) -> Iterator[tuple[str, str, Any]]:
    """The operations that do something: name, kind, and arguments with numbers in place of tensors."""
    numbers: dict[fx.Node, Any] = {}
    count = 0
    for node in graph.module.graph.nodes:
        name = operation_name(node) if node.op == "call_function" else str(node.target)
        given = _given(node)
        if name in ("dropout", "alias") and not given.get("train", False):
            numbers[node] = numbers[node.args[0]]
            continue
        if node.op == "get_attr":
            numbers[node] = str(node.target) if str(node.target) in graph.parameters else "constant"
            continue
        if node.op == "placeholder":
            numbers[node] = node.name
            continue
        number: Any = lambda n: _Number(numbers[n])  # noqa: E731
        arguments = fx.node.map_arg(given, number)
        numbers[node] = count
        count += 1
        if node.target not in (operator.getitem, getattr):
            yield node.name, name, repr(arguments)


class _Number:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"<{self.value}>"


def _given(node: fx.Node) -> dict[str, Any]:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {**{str(i): a for i, a in enumerate(node.args)}, **node.kwargs}
    found = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    found |= {a.name: value for a, value in zip(schema.arguments, node.args, strict=False)}
    return dict(sorted((found | node.kwargs).items()))


@contextmanager
def serial_twin(model: nn.Module) -> Iterator[None]:
    """Inside, ``model`` is the serial model, with whole tensors that have no memory."""
    kept: list[tuple[nn.Module, type[Any], dict[str, Any], dict[str, Any]]] = []
    twins: dict[int, Any] = {}

    def twin(tensor: Tensor | None) -> Any:
        if tensor is None or not has_own_mesh(tensor):
            return tensor
        if id(tensor) not in twins:
            empty = torch.empty(full_shape(tensor), dtype=tensor.dtype, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            twins[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return twins[id(tensor)]

    try:
        for module in model.modules():
            kept.append((module, type(module), dict(module._parameters), dict(module._buffers)))
            for own in (module._parameters, module._buffers):
                own.update({name: twin(tensor) for name, tensor in own.items()})
            module.__class__ = native_class(module)
        yield
    finally:
        for module, kind, parameters, buffers in kept:
            module.__class__ = kind
            module._parameters.update(parameters)
            module._buffers.update(buffers)
