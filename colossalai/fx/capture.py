"""How a graph of a model's forward pass is recorded: by torch.export, by make_fx, or with modules as leaves.

All routes end in the same form: an ``fx.Graph`` without nesting, whose placeholders are the leaves of the
arguments in their order, whose ``get_attr`` nodes are parameters and buffers under the model's names, and
whose output is the list of the output's leaves.  Operations are those of ``torch.ops.aten`` before they are
taken apart (``linear``, ``layer_norm``, ``scaled_dot_product_attention``), so autograd runs through it.
"""

from __future__ import annotations

import inspect
import logging
import operator
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from colossalai.fx.functions import AsksForGradients, OwnBackward, has_gradient_hooks, own_gradients
from colossalai.fx.leaves import MODULE, ROOT, LeafModule, ModuleCalls, as_modules, failing_line, same_code
from colossalai.fx.regions import flatten_regions, note_module


@dataclass
class Captured:
    """A graph of a forward pass, and how it was recorded."""

    graph: fx.Graph
    out_spec: TreeSpec
    constants: dict[int, Any]
    """Leaves of the output that are no tensors, by their place."""
    attributes: dict[str, Any]
    """What ``get_attr`` nodes name and the model does not have: constants, subgraphs."""
    route: str
    failures: dict[str, str] = field(default_factory=dict)
    leaves: list[LeafModule] = field(default_factory=list)


_HOOKED = "it has hooks on gradients, which operations do not call"


class InputError(ValueError):
    """The inputs of a trace do not fit the model, or the leaf at ``path`` does not run on fake tensors."""

    path: str | None = None
    reason: str = ""


def check_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what is no module, and arguments that its ``forward`` does not take."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"tracing needs a module (torch.nn.Module), got {type(model).__name__}")
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        name = type(model).__name__
        given = [f"{len(args)} positional"] if args else []
        given += sorted(kwargs)
        raise InputError(
            f"the inputs do not fit {name}.forward{inspect.signature(model.forward)}: {error}; given were"
            f" {', '.join(given) or 'none'}"
        ) from None


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mode: FakeTensorMode,
    leaves: dict[str, LeafModule],
    known: dict[str, list[Any]],
) -> Captured:
    """Record ``model``, which is fake, by the first route that works.

    Modules at ``leaves`` are leaves; what these return in each of their calls may be ``known``.
    """
    hooked = {path: LeafModule(path, _HOOKED) for path, m in model.named_modules() if has_gradient_hooks(m)}
    leaves = hooked | leaves
    with quiet(), _without_stack_traces():
        captured = _first_that_works(model, args, kwargs, mode, leaves, known)
    nodes = captured.graph.find_nodes(op="placeholder")
    for node, name in zip(nodes, _input_names(model, args, kwargs), strict=True):
        node.target = name
        node._rename(name)
    return captured


def _input_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Names for the leaves of the arguments: those of ``forward``, with a leaf's place in its argument."""
    bound = inspect.signature(model.forward).bind_partial(*args)
    first = [
        name if len(values) == 1 else f"{name}_{i}"
        for name, value in bound.arguments.items()
        for values in [value if _takes_rest(model, name) else (value,)]
        for i in range(len(values))
    ]
    named: dict[Any, str] = {
        **{("", i): name for i, name in enumerate(first)},
        **{("kw", k): k for k in kwargs},
    }
    found = []
    path: Any
    for path, _ in tree_flatten_with_path((args, kwargs))[0]:
        keyword = path[0].idx == 1
        root = named["kw", path[1].key] if keyword else named["", path[1].idx]
        rest = "".join(
            f"_{getattr(key, 'idx', getattr(key, 'key', getattr(key, 'name', '')))}" for key in path[2:]
        )
        found.append(re.sub(r"\W", "_", f"{root}{rest}"))
    return found


def _takes_rest(model: nn.Module, name: str) -> bool:
    kind = inspect.signature(model.forward).parameters[name].kind
    return kind is inspect.Parameter.VAR_POSITIONAL


def _first_that_works(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    mode: FakeTensorMode,
    leaves: dict[str, LeafModule],
    known: dict[str, list[Any]],
) -> Captured:
    failures: dict[str, str] = {}
    if leaves:
        failures["export"] = f"it knows no leaves, as {', '.join(list(leaves)[:3]) or 'the model'}"
    else:
        try:
            with own_gradients(as_nodes=False):
                return _by_export(model, args, kwargs)
        except Exception as error:
            failures["export"] = in_words(error)
    leaves = dict(leaves)
    while True:
        try:
            captured = _by_make_fx(model, args, kwargs, mode, leaves, known)
            captured.failures = failures
            return captured
        except _Failed as failed:
            cause, path = failed.error, failed.path
            if isinstance(cause, AsksForGradients) and "" not in leaves:
                path = ""  # a smaller leaf would take tensors of the graph, whose gradients are parts
            words, line = in_words(cause), failing_line(cause)
            if path is None or path in leaves:
                raise _input_error(model, path, words, line) from cause
            failures.setdefault("make_fx", f"{path or type(model).__name__}: {words} ({line})")
            for same in same_code(model, path):
                leaves[same] = LeafModule(same, words, line)


def _input_error(model: nn.Module, path: str | None, words: str, line: str) -> InputError:
    where = f"module {path!r} of {type(model).__name__}" if path else type(model).__name__
    error = InputError(
        f"{where} does not run on these inputs: they do not fit the model, or it needs what tensors without"
        f" values cannot give: {words}{f' ({line})' if line else ''}"
    )
    error.path, error.reason = path, f"{words} ({line})"
    return error


@contextmanager
def quiet() -> Iterator[None]:
    """torch logs pages about what it could not record; that is told in one line here."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Let torch not note the lines of Python that led to each node, which take it a quarter of its time."""
    config: Any = torch.fx.config
    before = getattr(config, "do_not_emit_stack_traces", None)  # older versions always note them
    if before is None:
        yield
        return
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


_ASKS = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


def in_words(error: BaseException) -> str:
    if isinstance(error, _ASKS):
        return "its code depends on the values of tensors"
    if isinstance(error, OwnBackward):
        return str(error)
    text = str(error).strip().split("\n")[0][:300]
    return f"{type(error).__name__}: {text}"


class _Failed(Exception):
    """A recording that failed in the module at ``path``."""

    def __init__(self, path: str | None, error: Exception) -> None:
        super().__init__(path)
        self.path, self.error = path, error


def _by_export(model: nn.Module, args: Any, kwargs: Any) -> Captured:
    exported = torch.export.export(model, args, kwargs, strict=False)
    unchecked = {"check_guards": False}  # older versions of torch do not check
    known = inspect.signature(exported.module).parameters
    module: Any = exported.module(**{name: value for name, value in unchecked.items() if name in known})
    graph = module.graph
    for node in graph.nodes:
        sizes = [n for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor) for n in t.shape]
        if not all(isinstance(n, int) for n in sizes):
            raise RuntimeError(f"{node.name} has a shape that depends on values, {sizes}")
    graph.set_codegen(fx.graph.CodeGen())
    _order_placeholders(graph, exported.call_spec.in_spec, args, kwargs)
    for node in graph.nodes:
        note_module(node, node)
    flatten_regions(module, graph)
    _finish(graph)
    outputs = graph.find_nodes(op="output")[0].args[0]
    constants = {i: value for i, value in enumerate(outputs) if not isinstance(value, fx.Node)}
    attributes = {
        node.target: operator.attrgetter(node.target)(module) for node in graph.find_nodes(op="get_attr")
    }
    spec = exported.call_spec.out_spec
    assert spec is not None
    return Captured(graph, spec, constants, attributes, "export")


def _order_placeholders(graph: fx.Graph, in_spec: Any, args: Any, kwargs: Any) -> None:
    """Put the placeholders in the order in which ``kwargs`` were given; export uses that of ``forward``."""
    nodes = graph.find_nodes(op="placeholder")
    theirs, named = tree_unflatten(list(range(len(nodes))), in_spec)
    order, spec = tree_flatten((theirs, {key: named[key] for key in kwargs}))
    if spec != tree_flatten((args, kwargs))[1]:
        raise RuntimeError("torch.export made other inputs of the arguments")
    first = next(iter(graph.nodes))
    for place in reversed(order):
        if nodes[place] is not first:
            first.prepend(nodes[place])
        first = nodes[place]


def _by_make_fx(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    mode: FakeTensorMode,
    leaves: dict[str, LeafModule],
    known: dict[str, list[Any]],
) -> Captured:
    flat, spec = tree_flatten((args, kwargs))
    own: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        own.setdefault(id(tensor), (name, tensor))
    names, state = [name for name, _ in own.values()], [tensor for _, tensor in own.values()]
    places = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
    out_spec: Any = None
    constants: dict[int, Any] = {}

    def run(state: list[Tensor], inputs: list[Tensor]) -> list[Any]:
        nonlocal out_spec
        leaves_now = list(flat)
        for place, tensor in zip(places, inputs, strict=True):
            leaves_now[place] = tensor
        now_args, now_kwargs = tree_unflatten(leaves_now, spec)
        results, out_spec = tree_flatten(model(*now_args, **now_kwargs))
        constants.clear()
        for i, result in enumerate(results):
            if not isinstance(result, Tensor):
                constants[i] = result if isinstance(result, (bool, int, float, str)) else None
        return [result if isinstance(result, Tensor) else None for result in results]

    left = {path: iter(outputs) for path, outputs in known.items()}
    calls = ModuleCalls(model, leaves, lambda path: next(left[path]) if path in left else None)
    try:
        with mode, calls, own_gradients(as_nodes=True):
            made = make_fx(run, tracing_mode="real", pre_dispatch=True)(state, [flat[i] for i in places])
    except Exception as error:
        raise _Failed(calls.failed, error) from error
    graph = made.graph
    graph.set_codegen(fx.graph.CodeGen())
    modules = {node.name: path for node, path in calls.modules.items()}
    _name_inputs(graph, names, modules, places, flat)
    as_modules(graph)
    _finish(graph)
    attributes = {
        node.target: operator.attrgetter(node.target)(made)
        for node in graph.find_nodes(op="get_attr")
        if node.target not in names
    }
    leaf_list = [
        leaf for path, leaf in leaves.items() if graph.find_nodes(op="call_module", target=path or ROOT)
    ]
    route = "modules" if leaf_list else "make_fx"
    return Captured(graph, out_spec, constants, attributes, route, leaves=leaf_list)


def _name_inputs(
    graph: fx.Graph, names: list[str], modules: dict[str, str], places: list[int], flat: list[Any]
) -> None:
    """Let what was a parameter be read by its name, and arguments that are no tensors be inputs, too."""
    nodes = graph.find_nodes(op="placeholder")
    for node in graph.nodes:
        node.meta[MODULE] = modules.get(node.name, "")
    for node, name in zip(nodes, names, strict=False):
        with graph.inserting_before(node):
            read = graph.create_node("get_attr", name)
        read.meta.update(node.meta)
        node.replace_all_uses_with(read)
        graph.erase_node(node)
    given = dict(zip(places, nodes[len(names) :], strict=True))
    first = next(iter(graph.nodes))
    for place in reversed(range(len(flat))):
        if place in given:
            node = given[place]
            if node is not first:
                first.prepend(node)
        else:
            with graph.inserting_before(first):
                node = graph.placeholder(f"argument_{place}")
            node.meta["val"] = flat[place]
        first = node


def _copies_to_itself(node: fx.Node) -> bool:
    """Whether a node copies a buffer to where it is, as export notes ``self.steps += 1`` after adding.

    It would count as another write, after which autograd refuses what was computed with the first.
    """
    if node.target is not torch.ops.aten.copy_.default or node.users:
        return False
    target, source = node.args[:2]
    while isinstance(source, fx.Node) and source is not target and source.op == "call_function":
        in_place = getattr(source.target, "_schema", None)
        if in_place is None or not in_place.name.endswith("_") or in_place.name.endswith("__"):
            return False
        source = source.args[0]
    return source is target


def _finish(graph: fx.Graph) -> None:
    """Take out what checks or is not used, and let the output be a flat list."""
    for node in reversed(list(graph.nodes)):
        check = node.target is torch.ops.aten._assert_tensor_metadata.default or _copies_to_itself(node)
        if check or (node.op == "get_attr" and not node.users):
            graph.erase_node(node)
    output = graph.find_nodes(op="output")[0]
    output.args = (list(output.args[0]),)
