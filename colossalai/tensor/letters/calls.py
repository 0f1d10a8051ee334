"""Calls as nodes of a recorded graph have them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from colossalai.tensor.letters.table import OpCall, Operand


def operation_name(node: fx.Node) -> str:
    """How :func:`register_letters` calls the operation of a node: that of aten without namespace."""
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    if schema is None:
        return str(getattr(target, "__name__", target))
    return str(schema.name).removeprefix("aten::")


def tensor_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes whose tensors a node takes, in the order of its arguments, as often as it takes them."""
    found: list[fx.Node] = []

    def note(argument: fx.Node) -> fx.Node:
        if isinstance(argument.meta.get("val"), Tensor):
            found.append(argument)
        return argument

    fx.node.map_arg((node.args, node.kwargs), note)
    return found


def call_of_node(node: fx.Node) -> OpCall:
    """The call of a node on whole tensors, whose shapes are in ``node.meta["val"]``."""
    operands: list[Operand] = []

    def number(argument: fx.Node) -> Any:
        value = argument.meta.get("val")
        if not isinstance(value, Tensor):
            return argument
        operands.append(Operand(len(operands), tuple(value.shape)))
        return operands[-1]

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), number)
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        arguments = {str(i): value for i, value in enumerate(args)} | dict(kwargs)
    else:
        arguments = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        arguments |= {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    outputs = tuple(tuple(t.shape) for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor))
    return OpCall(operation_name(node), arguments, tuple(operands), outputs)
