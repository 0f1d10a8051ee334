"""Which operations a function of torch consists of: it is run once on tensors without values.

``softmax``, ``F.softmax`` and ``x.softmax(-1)`` are one operation of ``torch.ops.aten``, ``x[1:, None]`` is
two, ``F.normalize`` four.  What is found is kept for calls with the same shapes and arguments; numbers in
floating point may differ, since no letters depend on them.
"""

from __future__ import annotations

import logging
import operator
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from colossalai.mesh._compat import without_modes
from colossalai.tensor.letters import OpCall, OpLetters, call_of_node, letters_of

_LIMIT = 4096
_NO_OPERATION = operator.getitem, torch._C._set_grad_enabled


@dataclass
class Operation:
    """One operation of a function: the node of the recorded graph, and what the table says of it."""

    node: fx.Node
    cuts: dict[Any, Any] = field(default_factory=dict)
    """The letters that were chosen for it, by the cuts of its tensors."""

    @cached_property
    def op(self) -> OpOverload:
        assert isinstance(self.node.target, OpOverload)
        return self.node.target

    @cached_property
    def call(self) -> OpCall:
        return call_of_node(self.node)

    @cached_property
    def letters(self) -> OpLetters | None:
        """Those of the table; a tensor that is given for a result lies like the result."""
        call, outs = self.call, sum(a.kwarg_only and _is_written(a) for a in self.op._schema.arguments)
        if not outs:
            return letters_of(call)
        found = letters_of(replace(call, operands=call.operands[:-outs]))
        return None if found is None else replace(found, operands=found.operands + found.outputs)

    def bind(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """All arguments of a call by their names in torch's schema."""
        named = self.op._schema.arguments
        given = {a.name: a.default_value for a in named if a.has_default_value()}
        return given | {a.name: value for a, value in zip(named, args, strict=False)} | kwargs

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """The names of the arguments that it writes to."""
        return tuple(a.name for a in self.op._schema.arguments if _is_written(a))

    @cached_property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.op.tags

    @cached_property
    def permutes(self) -> bool:
        """Whether it only brings the dims of one tensor into another order, or leaves them as they are."""
        found = self.letters
        return (
            found is not None
            and not found.sized
            and (len(found.operands), len(found.outputs)) == (1, 1)
            and sorted(found.operands[0]) == sorted(found.outputs[0])
        )


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


@dataclass
class Recording:
    """The operations of a function, as a graph whose placeholders are the leaves of its arguments."""

    graph: fx.Graph
    constants: dict[str, Tensor]
    outputs: list[Any]
    """The leaves of the result: nodes, and what is no tensor."""
    spec: TreeSpec
    operations: dict[fx.Node, Operation]

    def __post_init__(self) -> None:
        self.inputs = self.graph.find_nodes(op="placeholder")
        self.calls = [node for node in self.graph.nodes if node.op == "call_function"]
        self.fixed = {n: self.constants[n.target] for n in self.graph.find_nodes(op="get_attr")}

    def run(self, leaves: list[Any], operation: Callable[[Operation, Any, Any], Any]) -> Any:
        """The result of the function for these leaves, where ``operation`` runs each operation."""
        values: dict[fx.Node, Any] = {**self.fixed, **dict(zip(self.inputs, leaves, strict=True))}
        before = torch.is_grad_enabled()
        try:
            for node in self.calls:
                args, kwargs = _filled(node.args, values), _filled(node.kwargs, values)
                found = self.operations.get(node)
                values[node] = (
                    node.target(*args, **kwargs) if found is None else operation(found, args, kwargs)
                )
        finally:
            if torch.is_grad_enabled() is not before:
                torch.set_grad_enabled(before)
        if self.spec.is_leaf():
            return _filled(self.outputs[0], values)
        return tree_unflatten([_filled(output, values) for output in self.outputs], self.spec)


def _filled(value: Any, values: dict[fx.Node, Any]) -> Any:
    """An argument of a node with values in place of nodes."""
    if isinstance(value, fx.Node):
        return values[value]
    if isinstance(value, (list, tuple)):  # also the kinds of fx, which become plain ones
        filled = [_filled(inner, values) for inner in value]
        return tuple(filled) if isinstance(value, tuple) and not isinstance(value, torch.Size) else filled
    if isinstance(value, dict):
        return {name: _filled(inner, values) for name, inner in value.items()}
    return value


_known: OrderedDict[Hashable, Recording | None] = OrderedDict()


def recording_of(
    func: Callable[..., Any], leaves: list[Any], form: Hashable, shape_of: Callable[[Tensor], Any]
) -> Recording | None:
    """The operations of ``func`` of whole tensors of ``shape_of`` shapes; None if it cannot be run without
    values.
    """
    for exact in (False, True):  # whether numbers in floating point must be the same
        try:
            key = func, form, torch.is_grad_enabled(), exact, *(_key(v, shape_of, exact) for v in leaves)
            hash(key)
        except TypeError:
            return None
        if key not in _known:
            while len(_known) >= _LIMIT:
                _known.popitem(last=False)
            _known[key] = _try_to_record(func, leaves, form, shape_of, exact)
        found = _known[key]
        if found is not None:
            return found
    return None


def _key(value: Any, shape_of: Callable[[Tensor], Any], exact: bool) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(shape_of(value)), value.dtype, value.device
    if type(value) is float and not exact:
        return float
    if isinstance(value, slice):
        return slice, *(_key(part, shape_of, True) for part in (value.start, value.stop, value.step))
    return type(value), value


def _try_to_record(func: Any, leaves: list[Any], form: Any, shape_of: Any, exact: bool) -> Recording | None:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torch logs pages about what cannot be run
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which the call itself gives
            return _record(func, leaves, form, shape_of, exact)
    except Exception:  # it asks for values, or the arguments are wrong, which torch says better
        return None
    finally:
        logging.disable(before)


def _record(
    func: Callable[..., Any], leaves: list[Any], form: Any, shape_of: Any, exact: bool
) -> Recording | None:
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    result: list[Any] = []

    def run(*tensors: Tensor) -> list[Any]:
        values = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        args, kwargs = _rebuilt(form, iter(values))
        flat, result_spec = tree_flatten(func(*args, **kwargs))
        result[:] = flat, result_spec
        return [leaf for leaf in flat if isinstance(leaf, Tensor)]

    autocast = any(torch.is_autocast_enabled(leaves[i].device.type) for i in places)
    with without_modes(), torch.inference_mode(False), torch.autocast("cpu", enabled=False):
        with torch.autocast("cuda", enabled=False), FakeTensorMode() as mode:
            fakes = [_fake(leaves[i], shape_of, autocast) for i in places]
        with mode:
            module = make_fx(run, tracing_mode="real", pre_dispatch=True)(*fakes)
    flat, result_spec = result
    graph: fx.Graph = module.graph
    nodes = list(graph.nodes)
    constants = {node.target: getattr(module, node.target) for node in nodes if node.op == "get_attr"}
    for node in nodes:
        if node.op == "get_attr":
            node.meta["val"] = constants[node.target]
    calls = [n for n in nodes if n.op == "call_function" and n.target not in _NO_OPERATION]
    if any(not isinstance(node.target, OpOverload) for node in calls):
        return None
    tensors = iter(nodes[-1].args[0])
    outputs = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in flat]
    if not any(isinstance(leaf, Tensor) for leaf in flat) and calls:
        return None  # numbers that follow from values
    _place_leaves(graph, leaves, places)
    if not exact and not _place_numbers(graph, leaves):
        return None
    return Recording(graph, constants, outputs, result_spec, {node: Operation(node) for node in calls})


def _fake(tensor: Tensor, shape_of: Any, autocast: bool) -> Tensor:
    """A tensor like the whole; under autocast all numbers have one type, as operations will see them."""
    dtype = torch.float32 if autocast and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tuple(shape_of(tensor)), dtype=dtype, device=tensor.device)


def _place_leaves(graph: fx.Graph, leaves: list[Any], places: list[int]) -> None:
    """Give the graph a placeholder for every leaf, in their order."""
    nodes = dict(zip(places, graph.find_nodes(op="placeholder"), strict=True))
    with graph.inserting_before(next(iter(graph.nodes))):
        new = [nodes.get(i) or graph.placeholder(f"leaf_{i}") for i in range(len(leaves))]
    for node in reversed(new):
        first = next(iter(graph.nodes))
        if node is not first:
            first.prepend(node)


def _place_numbers(graph: fx.Graph, leaves: list[Any]) -> bool:
    """Let the graph take numbers in floating point from the leaves; False if it cannot be told where."""
    nodes = graph.find_nodes(op="placeholder")
    numbers = {leaf: node for leaf, node in zip(leaves, nodes, strict=True) if type(leaf) is float}
    found = [leaf for leaf in leaves if type(leaf) is float]
    if len(numbers) != len(found):
        return not found
    met: list[float] = []

    def place(value: Any) -> Any:
        if type(value) is float and value in numbers:
            met.append(value)
            return numbers[value]
        return value

    for node in graph.nodes:
        if node.op == "call_function":
            node.args = _mapped(place, node.args)
            node.kwargs = _mapped(place, dict(node.kwargs))
    return sorted(met) == sorted(numbers)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        mapped = [_mapped(function, inner) for inner in value]
        return tuple(mapped) if isinstance(value, tuple) else mapped
    if isinstance(value, dict):
        return {name: _mapped(function, inner) for name, inner in value.items()}
    return function(value)


def flattened(value: Any, leaves: list[Any]) -> Hashable:
    """The form of nested arguments, whose values are put behind ``leaves``."""
    if type(value) in (list, tuple):
        return type(value), *[flattened(inner, leaves) for inner in value]
    if type(value) is dict:
        return dict, tuple(value), *[flattened(inner, leaves) for inner in value.values()]
    leaves.append(value)
    return None


def _rebuilt(form: Any, leaves: Iterator[Any]) -> Any:
    if form is None:
        return next(leaves)
    if form[0] is dict:
        return {name: _rebuilt(inner, leaves) for name, inner in zip(form[1], form[2:], strict=True)}
    return form[0](_rebuilt(inner, leaves) for inner in form[1:])


def tensors_in(value: Any, found: list[Tensor]) -> list[Tensor]:
    """``found`` and the tensors among the arguments of an operation, in their order."""
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            tensors_in(inner, found)
    elif isinstance(value, dict):
        for inner in value.values():
            tensors_in(inner, found)
    return found
