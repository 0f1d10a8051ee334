"""The graph that one rank executes: the operations of the traced model on pieces, and moves between them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from colossalai.auto_parallel.tensor_shard.runtime.bound_calls import bind, bound_call
from colossalai.auto_parallel.tensor_shard.runtime.dropped_copies import without_copies
from colossalai.auto_parallel.tensor_shard.runtime.gradient_buckets import GradientBuckets
from colossalai.auto_parallel.tensor_shard.runtime.leaf_calls import call_leaf, leaf_form
from colossalai.auto_parallel.tensor_shard.runtime.local_calls import LocalCall, run_on_pieces
from colossalai.auto_parallel.tensor_shard.runtime.random_pieces import RandomPieces, draws
from colossalai.auto_parallel.tensor_shard.sharded_plan import NodePlan, ShardedPlan
from colossalai.fx.graph_module import ColoGraphModule
from colossalai.fx.leaves import ROOT
from colossalai.fx.nodes import named_state
from colossalai.fx.op_graph import OpGraph
from colossalai.fx.twin import RECOMPUTED
from colossalai.fx.writes import written_arguments
from colossalai.mesh import Layout, Links, Mesh, move, redistribute, replicated, route
from colossalai.tensor.letters.calls import operation_name

_PICKS = (operator.getitem, getattr)
# These copy where a view is not possible, which of a piece may be another case than of the whole.
_MAY_COPY = ("reshape", "reshape_as", "flatten", "ravel", "contiguous", "to")


@dataclass
class Program:
    """What a rank executes.

    Args:
        module: its graph, which takes the leaves of the inputs, the key of the random numbers, the tensors of
            ``state`` and the modules of ``leaves``.
        state: the names of the parameters and buffers that it reads.
        leaves: the paths of the modules that it calls.
        outputs: where each result lies; None for what is no tensor.
        draws: whether it draws random numbers.
    """

    module: fx.GraphModule
    state: list[str]
    leaves: list[str]
    outputs: list[Layout | None]
    draws: bool = False

    @cached_property
    def compiled(self) -> Any:
        """The graph, of which torch.compile takes the operations between moves."""
        return torch.compile(self.module)

    # It holds nothing of a model, so copies of a model share it.

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a model that autoparallelize has changed cannot be pickled, since its plan belongs to this job;"
            " save it by booster.save, or its state_dict by booster.save_model"
        )


def _switch(on: bool, before: bool) -> None:
    """Turn gradients on or off, as the recording did; in a call without gradients they stay off."""
    torch._C._set_grad_enabled(on and before)


class UnfitPlanError(ValueError):
    """A plan does not fit its graph."""


def moved(x: Tensor, src: Layout, dst: Layout, mesh: Mesh, links: Links) -> Tensor:
    """``x`` in another layout; what needs no gradient gets none."""
    if torch.is_grad_enabled() and x.requires_grad:
        return redistribute(x, src, dst, mesh, links=links)
    return move(x, src, dst, mesh, links=links)


def build_program(
    graph: OpGraph, plan: ShardedPlan, mesh: Mesh, numbers: RandomPieces, buckets: GradientBuckets
) -> Program:
    """Write the graph of this rank; raises ``UnfitPlanError`` where ``plan`` does not fit."""
    return _Builder(graph, plan, mesh, numbers, buckets).build()


@dataclass
class _Value:
    """What a node of the traced graph became: a node of this rank's, and where its tensors lie."""

    node: fx.Node
    layouts: Any
    """A layout; for a tuple or a list one for each, for others None."""
    rests: str | None = None
    """The name of the parameter or buffer that it is."""


@dataclass
class _Builder:
    traced: OpGraph
    plan: ShardedPlan
    mesh: Mesh
    numbers: RandomPieces
    buckets: GradientBuckets
    graph: fx.Graph = field(default_factory=fx.Graph)
    values: dict[fx.Node, _Value] = field(default_factory=dict)
    root: nn.Module = field(default_factory=nn.Module)

    def build(self) -> Program:
        nodes = list(self.traced.module.graph.nodes)
        self._inputs(nodes)
        self.key = self.graph.placeholder("key")
        self.labels = self._labels(nodes)
        state, leaves = self._state(nodes)
        outputs: list[Layout | None] = []
        self.with_gradients = self.graph.call_function(torch.is_grad_enabled)
        for node in nodes:
            if node.op == "output":
                outputs = self._output(node)
            elif node not in self.values:
                before = next(iter(reversed(self.graph.nodes)))
                self.values[node] = self._operation(node)
                self._note(node, before, self.labels.get(node.name))
        if not self.with_gradients.users:
            self.graph.erase_node(self.with_gradients)
        module = ColoGraphModule(self.root, self.graph, "Program")
        return Program(module, state, leaves, outputs, any(map(draws, nodes)))

    # What the graph takes

    def _inputs(self, nodes: list[fx.Node]) -> None:
        for node in nodes:
            if node.op != "placeholder":
                continue
            layout = None
            if isinstance(node.meta.get("val"), Tensor):
                layout = self.plan.inputs.get(node.name, replicated(node.meta["val"].ndim))
            self.values[node] = _Value(self.graph.placeholder(node.name), layout)

    def _state(self, nodes: list[fx.Node]) -> tuple[list[str], list[str]]:
        """Parameters, buffers and leaf modules are arguments too, so that the program holds none of them."""
        names = set(self.traced.parameters)
        state: dict[str, fx.Node] = {}
        leaves: dict[str, fx.Node] = {}
        read = [n for n in nodes if n.op == "get_attr" and str(n.target) in names]
        for node in read:
            name = str(node.target)
            if name not in state:
                state[name] = self.graph.placeholder(f"state_{len(state)}")
            layout = self.plan.parameters.get(name, replicated(node.meta["val"].ndim))
            self.values[node] = _Value(state[name], layout, rests=name)
        for node in nodes:
            if node.op == "call_module" and str(node.target) not in leaves:
                leaves[str(node.target)] = self.graph.placeholder(f"leaf_{len(leaves)}")
        self._leaf = leaves
        for node in nodes:
            if node.op == "get_attr" and node not in self.values:
                self._constant(node)
        return list(state), ["" if path == ROOT else path for path in leaves]

    def _constant(self, node: fx.Node) -> None:
        value = operator.attrgetter(str(node.target))(self.traced.module)
        name = str(node.target).replace(".", "_")
        if isinstance(value, Tensor):
            self.root.register_buffer(name, value, persistent=False)
        else:
            setattr(self.root, name, value)
        layout = replicated(value.ndim) if isinstance(value, Tensor) else None
        self.values[node] = _Value(self.graph.get_attr(name), layout)

    # What runs again in the backward pass

    def _labels(self, nodes: list[fx.Node]) -> dict[str, int]:
        """The numbers of the groups of operations that are recomputed, by name: those of the plan, and else
        those that the model itself checkpoints.
        """
        named = {node.name: node for node in nodes}
        groups = [list(group) for group in self.plan.recomputed]
        if unknown := [name for group in groups for name in group if name not in named]:
            raise UnfitPlanError(f"the plan recomputes {unknown[0]!r}, which the graph does not have")
        if not groups:
            own: dict[int, list[str]] = {}
            for node in nodes:
                if node.op not in ("placeholder", "get_attr", "output") and RECOMPUTED in node.meta:
                    own.setdefault(node.meta[RECOMPUTED][0], []).append(node.name)
            groups = [
                group
                for group in own.values()
                if not any(changes_buffers(self.traced, named[name]) for name in group)
            ]
        for group in groups:
            if changing := next((name for name in group if changes_buffers(self.traced, named[name])), None):
                raise UnfitPlanError(
                    f"the plan recomputes {changing!r}, which changes a buffer and would change it twice"
                )
        return {name: number for number, group in enumerate(groups) for name in group}

    def _note(self, node: fx.Node, before: fx.Node, label: int | None) -> None:
        """Write on all nodes that ``node`` became where they come from."""
        made = next(iter(reversed(self.graph.nodes)))
        while made is not before:
            made.meta["module"] = node.meta.get("module", "")
            if label is not None:
                made.meta[RECOMPUTED] = [label]
            made = made.prev

    # Operations

    def _operation(self, node: fx.Node) -> _Value:
        if node.target is torch._C._set_grad_enabled:
            return _Value(self.graph.call_function(_switch, (node.args[0], self.with_gradients)), None)
        if node.target in _PICKS:
            source, key = self.values[node.args[0]], node.args[1]  # type: ignore[index]
            layouts = source.layouts[key] if isinstance(source.layouts, (list, tuple, dict)) else None  # type: ignore[index]
            picked = self.graph.call_function(node.target, (source.node, key))
            return _Value(picked, layouts)
        plan = self.plan.nodes.get(node.name)
        if plan is None:
            plan = self._whole(node)
        operands, written = iter(plan.inputs), written_arguments(node)
        op = self.traced.nodes.get(node.name)
        saved = () if op is None else op.saved_parameters  # what predictions move again; not a copy of it
        copies: dict[fx.Node, tuple[fx.Node, Layout, Layout]] = {}

        def taken(argument: fx.Node) -> fx.Node:
            value = self.values[argument]
            if not isinstance(argument.meta.get("val"), Tensor):
                return value.node
            layout = next(operands, None)
            if layout is None:
                raise UnfitPlanError(
                    f"{node.name} takes more tensors than its plan ({plan.strategy}) has inputs"
                )
            made = self._move(value, value.layouts, layout, argument.name)
            moves = value.rests is not None and layout.dims != value.layouts.dims
            if moves and str(argument.target) in saved:
                copies[made] = value.node, value.layouts, layout
            if made is not value.node and argument in written:
                # what was moved may be a view of what it was
                made = self.graph.call_function(torch.ops.aten.clone.default, (made,))
            return made

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), taken)
        if next(operands, None) is not None:
            raise UnfitPlanError(
                f"{node.name} takes fewer tensors than its plan ({plan.strategy}) has inputs"
            )
        result = self._call(node, plan, args, kwargs)
        if self._must_copy(node):
            result.node = self.graph.call_function(torch.ops.aten.clone.default, (result.node,))
        if node.name not in self.labels:  # what runs again keeps nothing as it is
            self._drop(copies)
        return result

    @cached_property
    def _written_memory(self) -> set[str]:
        into = (a for node in self.traced.module.graph.nodes for a in written_arguments(node))
        return {memory for argument in into for memory in self.traced.memory(argument)}

    def _must_copy(self, node: fx.Node) -> bool:
        """Whether a node copied what of a piece may be a view, and a write would show on both sides."""
        own = self.traced.memory(node)
        if operation_name(node) not in _MAY_COPY or own != {node.name}:
            return False
        return bool(self._written_memory & own.union(*map(self.traced.memory, node.all_input_nodes)))

    def _drop(self, copies: dict[fx.Node, tuple[fx.Node, Layout, Layout]]) -> None:
        """Let the operations that take moved parameters keep the pieces for their backward pass."""
        for user in dict.fromkeys(user for copy in copies for user in copy.users):
            taken = [copy for copy in copies if copy in user.all_input_nodes]
            pieces = [copies[copy][0] for copy in taken]
            routes = [copies[copy][1:] for copy in taken]
            own = user.target, user.args, user.kwargs
            user.target, user.args = bind(
                without_copies, *own, pieces, taken, routes, self.mesh, self.plan.links
            )
            user.kwargs = {}

    def _whole(self, node: fx.Node) -> NodePlan:
        """The plan of an operation that has none: all is whole."""
        taken: list[Layout] = []

        def note(argument: fx.Node) -> fx.Node:
            if isinstance(argument.meta.get("val"), Tensor):
                taken.append(replicated(argument.meta["val"].ndim))
            return argument

        fx.node.map_arg((node.args, node.kwargs), note)
        results = tuple(replicated(t.ndim) for t in _tensors(node.meta.get("val")))
        return NodePlan("whole", tuple(taken), results, results)

    def _call(self, node: fx.Node, plan: NodePlan, args: Any, kwargs: Any) -> _Value:
        finish: Callable[[fx.Node], fx.Node] | None = None
        if node.op == "call_module":
            arguments = (self._leaf[str(node.target)], leaf_form(node), *tree_leaves((args, kwargs)))
            made = bound_call(
                self.graph, self.numbers.draw_alike, self.key, call_leaf, arguments, {}, node.name
            )
        else:
            call = LocalCall(
                node, operation_name(node), plan, args, kwargs, self.graph, self.mesh, self.numbers, self.key
            )
            made, finish = run_on_pieces(call)
        value, steps = node.meta.get("val"), list(zip(plan.computed, plan.outputs, strict=True))
        if isinstance(value, Tensor):
            ((computed, outputs),) = steps
            result = self._move(_Value(made, computed), computed, outputs, node.name)
            if finish is not None:
                result = finish(result)
            elif result is not made and self._written_memory & self.traced.memory(node):
                # a piece is a view of what it was cut from, which autograd lets no one write into
                result = self.graph.call_function(torch.ops.aten.clone.default, (result,))
            return _Value(result, outputs)
        return self._results(node, made, value, steps)

    def _results(
        self, node: fx.Node, made: fx.Node, value: Any, steps: list[tuple[Layout, Layout]]
    ) -> _Value:
        """The results of an operation with several."""
        flat = isinstance(value, (list, tuple)) and not any(isinstance(v, (list, tuple, dict)) for v in value)
        if not flat or all(src == dst for src, dst in steps):
            left = iter([dst for _, dst in steps])
            layouts: Any = None
            if flat:
                layouts = [next(left, None) if isinstance(v, Tensor) else None for v in value]
            elif any(layout.sharded for _, layout in steps):
                raise UnfitPlanError(
                    f"{node.name} returns {type(value).__name__}, whose tensors cannot be cut"
                )
            else:
                layouts = _WholeParts()
            return _Value(made, layouts)
        left_steps = iter(steps)
        parts: list[Any] = []
        placed: list[Layout | None] = []
        for number, part in enumerate(value):
            picked = self.graph.call_function(operator.getitem, (made, number))
            if isinstance(part, Tensor):
                src, dst = next(left_steps)
                picked = self._move(_Value(picked, src), src, dst, node.name)
            parts.append(picked)
            placed.append(dst if isinstance(part, Tensor) else None)
        return _Value(self.graph.call_function(_tuple_of, tuple(parts)), placed)

    def _move(self, value: _Value, src: Layout | None, dst: Layout, name: str) -> fx.Node:
        if src is None or isinstance(src, _WholeParts):
            src = replicated(len(dst.dims))
        if src == dst:
            return value.node
        if value.rests is not None and self.buckets.can_wait(src, dst):
            return bound_call(self.graph, self.buckets.use, value.node, src, dst)
        try:
            _check_move(src, dst)
        except ValueError as error:
            raise UnfitPlanError(f"{name}: {error}") from error
        return bound_call(self.graph, moved, value.node, src, dst, self.mesh, self.plan.links)

    # What it returns

    def _output(self, node: fx.Node) -> list[Layout | None]:
        results: list[Any] = []
        layouts: list[Layout | None] = []
        for result in node.args[0]:  # type: ignore[union-attr]
            if not isinstance(result, fx.Node):
                results.append(result)
                layouts.append(None)
                continue
            value, layout = self.values[result], None
            if isinstance(result.meta.get("val"), Tensor):
                layout = self.plan.outputs.get(result.name, replicated(result.meta["val"].ndim))
                results.append(self._move(value, value.layouts, layout, result.name))
            else:
                results.append(value.node)
            layouts.append(layout)
        self.graph.output(results)
        return layouts


class _WholeParts:
    """The layouts of an object all of whose tensors are whole."""

    def __getitem__(self, key: Any) -> Any:
        return self


def _check_move(src: Layout, dst: Layout) -> None:
    """Refuse a move that makes no sense, forward or backward."""
    route(src, dst)
    route(dst.dual(), src.dual())


def changes_buffers(graph: OpGraph, node: fx.Node) -> bool:
    """Whether an operation changes a buffer of the model."""
    return any(graph.memory(argument) & graph.parameters.keys() for argument in written_arguments(node))


def _tuple_of(*parts: Any) -> tuple[Any, ...]:
    return parts


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def state_of(model: nn.Module, program: Program) -> list[Any]:
    """The arguments of ``program`` beside its inputs."""
    tensors = named_state(model)
    leaves: list[Any] = [
        # of a model that is one operation, what it computed before it ran a plan
        model.get_submodule(path) if path else model.serial_forward
        for path in program.leaves
    ]
    return [*(tensors[name] for name in program.state), *leaves]
