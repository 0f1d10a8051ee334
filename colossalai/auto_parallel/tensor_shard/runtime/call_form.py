"""``CallForm``: the arguments that a model was traced with, and whether a call gives the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from colossalai.fx.op_graph import OpGraph, recorded_leaves
from colossalai.mesh import Layout, Mesh, local_shape

_LOSS_TARGETS = "loss_targets"


class CallForm:
    """Brings the arguments of a call to the order in which they were traced.

    Scripts call by position or by name, whichever way the model was traced, and give options their defaults.

    Args:
        forward: of the model.
        graph: what was traced.
        layouts: where the inputs of the graph come in: what is cut has the shape of a piece.
    """

    def __init__(
        self, forward: Callable[..., Any], graph: OpGraph, layouts: Mapping[str, Layout], mesh: Mesh
    ) -> None:
        self._signature = inspect.signature(forward)
        self._name = getattr(forward, "__qualname__", "forward")
        self._expected = [
            _expected(leaf, layouts.get(node.name), mesh)
            for leaf, node in zip(
                graph.recorded, graph.module.graph.find_nodes(op="placeholder"), strict=True
            )
        ]
        self._names = [node.name for node in graph.module.graph.find_nodes(op="placeholder")]
        self._has_parameters = any(info.requires_grad for info in graph.parameters.values())
        args, kwargs = tree_unflatten(list(range(len(graph.recorded))), graph.in_spec)
        self._traced = self._by_name(args, kwargs)

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name, those of ``*args`` and ``**kwargs`` one by one."""
        extra = {_LOSS_TARGETS: kwargs[_LOSS_TARGETS]} if _LOSS_TARGETS in kwargs else {}
        bound = self._signature.bind_partial(*args, **{k: v for k, v in kwargs.items() if k not in extra})
        found: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                found |= {f"*{name}[{i}]": part for i, part in enumerate(value)}
            elif kind is inspect.Parameter.VAR_KEYWORD:
                found |= value
            else:
                found[name] = value
        return found | extra

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of the arguments in the order of the trace; raises where another graph is needed."""
        try:
            given = self._by_name(args, kwargs)
        except TypeError as error:
            raise TypeError(f"{self._name}: {error}") from None
        if missing := [name for name in self._traced if name not in given]:
            raise ValueError(
                f"the model was traced with {missing[0]!r}, which this call does not give; {_AGAIN}"
            )
        for name, value in given.items():
            if name not in self._traced and not self._is_default(name, value):
                raise ValueError(
                    f"the model was traced without {name!r}, which this call gives ({_told(value)}); {_AGAIN}"
                )
        found: list[Any] = [None] * len(self._expected)
        for name, places in self._traced.items():
            values, spec = tree_flatten(given[name])
            if spec != tree_flatten(places)[1]:
                raise ValueError(f"{name!r} has another structure than when the model was traced; {_AGAIN}")
            for place, value in zip(tree_leaves(places), values, strict=True):
                found[place] = value
        self._check(found)
        if self._has_parameters:
            self._refuse_gradients(found)
        return found

    def _is_default(self, name: str, value: Any) -> bool:
        parameter = self._signature.parameters.get(name)
        if parameter is None:
            return value is None
        return not isinstance(value, Tensor) and (value is None or value == parameter.default)

    def _refuse_gradients(self, leaves: list[Any]) -> None:
        """Gradients of inputs would be this rank's share: a plan sums those of parameters alone."""
        if not torch.is_grad_enabled():
            return
        for leaf, name in zip(leaves, self._names, strict=True):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise ValueError(
                    f"{name!r} requires a gradient, and a plan sums only those of parameters over ranks:"
                    " detach it, or let the module that computes it be a part of the model"
                )

    def _check(self, leaves: list[Any]) -> None:
        for got, want, name in zip(recorded_leaves(leaves), self._expected, self._names, strict=True):
            if type(got) is type(want) and got == want:
                continue
            advice = _AGAIN
            if isinstance(got, tuple) and isinstance(want, tuple) and got[0][:1] != want[0][:1]:
                advice = (
                    "the plan is for one shape: pad the batch, let the loader drop the last one"
                    " (drop_last=True), or call autoparallelize with meta_args of this shape"
                )
            raise ValueError(f"{name!r} is {_told(got)}, and the plan is for {_told(want)}; {advice}")


_AGAIN = "a plan is for the arguments that it was made for: call autoparallelize with meta_args like these"


def _expected(leaf: Any, layout: Layout | None, mesh: Mesh) -> Any:
    if layout is None or not layout.sharded or not isinstance(leaf, tuple):
        return leaf
    shape, dtype = leaf
    return local_shape(shape, layout, mesh), dtype


def _told(value: Any) -> str:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple):
        return f"{value[1]} of shape {value[0]}"
    return type(value).__name__ if isinstance(value, Tensor) else repr(value)
