"""Which tensors an operation of a graph writes to."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import fx


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes whose tensors an operation writes to: in place, as ``out=``, or as running statistics."""
    names = _written_names(node.target)
    if not names:
        return []
    given = dict(zip(_argument_names(node.target), node.args, strict=False)) | node.kwargs
    if names is _STATISTICS and not given.get("training", given.get("use_input_stats")):
        return []
    found: list[fx.Node] = []
    fx.node.map_arg([given.get(name) for name in names], lambda n: found.append(n) or n)  # type: ignore[func-returns-value]
    return found


_STATISTICS = ("running_mean", "running_var")  # which the schemas of norms do not say


@cache
def _written_names(target: Any) -> tuple[str, ...]:
    arguments = getattr(getattr(target, "_schema", None), "arguments", ())
    names = tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return names or (_STATISTICS if set(_STATISTICS) <= set(_argument_names(target)) else ())


@cache
def _argument_names(target: Any) -> tuple[str, ...]:
    return tuple(a.name for a in getattr(getattr(target, "_schema", None), "arguments", ()))
