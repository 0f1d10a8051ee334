"""Calls in a graph whose arguments are objects that ``fx`` cannot write as code: meshes and layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._compile import _disable_dynamo
from torch.fx.node import map_aggregate, map_arg


@dataclass(frozen=True)
class _Taken:
    """The place of an argument that the graph gives."""

    number: int


def bound_call(graph: fx.Graph, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """Put a call of ``function`` into ``graph``; arguments that are no nodes are bound to the function."""
    return graph.call_function(*bind(function, *args, **kwargs))


def bind(
    function: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Callable[..., Any], tuple[fx.Node, ...]]:
    """A function of the nodes among the arguments, to which the others are bound, and these nodes."""
    nodes: list[fx.Node] = []

    def take(node: fx.Node) -> Any:
        nodes.append(node)
        return _Taken(len(nodes) - 1)

    if all(isinstance(a, fx.Node) for a in args[:1]) and not _has_nodes((args[1:], kwargs)):
        fixed = args[1:]

        def run(*values: Any) -> Any:
            return function(*values, *fixed, **kwargs)

        nodes = list(args[:1])
    else:
        template = map_arg((args, kwargs), take)

        def run(*values: Any) -> Any:
            def fill(leaf: Any) -> Any:
                return values[leaf.number] if isinstance(leaf, _Taken) else leaf

            now_args, now_kwargs = map_aggregate(template, fill)
            return function(*now_args, **now_kwargs)

    # torch.compile takes the operations between these calls; communication is not its affair
    called = _disable_dynamo(run)
    # names that tell in the printed code what is called
    called.__name__ = called.__qualname__ = function.__name__
    called.__module__ = function.__module__
    return called, tuple(nodes)


def _has_nodes(tree: Any) -> bool:
    found: list[fx.Node] = []
    map_arg(tree, lambda node: found.append(node) or node)  # type: ignore[func-returns-value]
    return bool(found)
