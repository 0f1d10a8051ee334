"""``trace_model``: from a model and a batch to an ``OpGraph``."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from colossalai.fx.capture import MODULE, Captured, InputError, capture, check_inputs
from colossalai.fx.costs import CostPass, NodeCost
from colossalai.fx.kernels import Work
from colossalai.fx.leaves import ROOT, Leaf, LeafChoice
from colossalai.fx.op_graph import OpGraph, OpNode, TensorInfo, loss_of
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
        device: where the tensors are taken to be; by default where the model is.

    Raises:
        ValueError: the inputs do not fit the model.
    """
    check_inputs(model, args, kwargs)
    if loss is None and targets:
        raise ValueError("trace_model takes targets for a loss, and no loss was given")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    place = fake_device(model, device)
    asked = [path for path, module in model.named_modules() if leaf is not None and leaf(path, module)]
    leaves = {path: Leaf(path, "asked for") for path in _outermost(asked)}
    if loss is not None:
        kwargs = {**kwargs, "loss_targets": tuple(targets)}
    fake_args, fake_kwargs = fake_like((args, kwargs), mode, place)
    rehearsed: dict[str, Rehearsed] = {}
    while True:
        outputs = {path: fake_like(r.outputs, mode, place) for path, r in rehearsed.items()}
        with torch.random.fork_rng(devices=[]), fake_model(model, mode, place) as notes:
            if loss is not None:
                forward_with_loss(model, loss)
            try:
                captured = capture(model, fake_args, fake_kwargs, mode, leaves, outputs)
            except InputError as error:
                failed: InputError | None = error
            else:
                failed = None
                operations = {path or ROOT: r.operations for path, r in rehearsed.items()}
                costs = CostPass(model, captured.graph, captured.attributes, mode, operations).run()
                builder = _Nodes(model, captured, costs)
                nodes = builder.nodes()
        if failed is None:
            break
        _rehearse(model, args, kwargs, failed, loss, leaves, rehearsed)
    return OpGraph(
        module=_executable(model, captured),
        nodes=nodes,
        in_spec=tree_flatten((args, kwargs))[1],
        out_spec=captured.out_spec,
        constants=captured.constants,
        inputs=builder.inputs,
        parameters={name: _info(t, name) for name, t in _state(model).items()},
        loss=builder.loss,
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
    leaves: dict[str, Leaf],
    rehearsed: dict[str, Rehearsed],
) -> None:
    """Find out on real tensors what the leaf returns that failed; if it fails there too, so does the model."""
    if failed.path is None or failed.path in rehearsed:
        raise failed
    try:
        found = rehearse(model, args, kwargs, failed.path, loss)
    except Exception:
        raise failed from None
    if found is None:
        raise failed
    rehearsed[failed.path] = found
    leaves[failed.path] = Leaf(failed.path, f"it ran on real tensors only: {failed}")


def _outermost(paths: list[str]) -> list[str]:
    return [p for p in paths if not any(p != q and (q == "" or p.startswith(f"{q}.")) for q in paths)]


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, tied ones under their first name."""
    return dict((*model.named_parameters(), *model.named_buffers()))


def _info(tensor: Tensor, memory: str, requires_grad: bool | None = None) -> TensorInfo:
    learns = tensor.requires_grad if requires_grad is None else requires_grad
    return TensorInfo(
        tuple(tensor.shape), tensor.dtype, tensor.numel() * tensor.element_size(), memory, learns
    )


def _executable(model: nn.Module, captured: Captured) -> fx.GraphModule:
    """The graph as a module that shares the tensors of ``model``; constants of the recording become real."""
    root = nn.Module()
    names = {id(t): name for name, t in _state(model).items()}
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
    else:
        root.register_buffer(last, value)


class _Nodes:
    """Makes the ``OpNode`` of each node of a recorded graph, inside the block in which it is fake."""

    def __init__(self, model: nn.Module, captured: Captured, costs: dict[fx.Node, NodeCost]) -> None:
        self._model, self._captured, self._costs = model, captured, costs
        self._graph = captured.graph
        self._memory: dict[fx.Node, Any] = {}  # like the node's value, with the name of each tensor's memory
        self._size: dict[str, int] = {}
        self._names = {id(t): name for name, t in _state(model).items()}
        self.inputs: dict[str, TensorInfo] = {}
        self.loss: str | None = None

    def nodes(self) -> dict[str, OpNode]:
        reached = self._learning()
        found: dict[str, OpNode] = {}
        for node in self._graph.nodes:
            value = node.meta.get("val")
            if node.op == "placeholder":
                self._memory[node] = node.name
                if isinstance(value, Tensor):
                    self.inputs[node.name] = _info(value, node.name)
                    self._size[node.name] = value.untyped_storage().nbytes()
            elif node.op == "get_attr":
                self._memory[node] = self._names.get(id(value), node.target)
            elif node.target in (operator.getitem, getattr):
                self._memory[node] = node.target(self._memory[node.args[0]], node.args[1])
            elif node in self._costs:
                found[node.name] = self._node(node, self._costs[node], node in reached)
        return found

    def _learning(self) -> set[fx.Node]:
        """The nodes that gradients come to, from the loss if there is one, else from all outputs."""
        results = self._graph.find_nodes(op="output")[0].args[0]
        pending = [r for r in results if isinstance(r, fx.Node)]
        try:
            tree = tree_unflatten(list(results), self._captured.out_spec)
            fakes = tree_map(lambda r: r.meta.get("val") if isinstance(r, fx.Node) else r, tree)
            loss = loss_of(fakes)
            pending = [r for r in pending if r.meta.get("val") is loss][:1]
            self.loss = pending[0].name
        except ValueError:
            pass  # whoever runs the model computes its loss
        reached: set[fx.Node] = set()
        while pending:
            node = pending.pop()
            if node not in reached:
                reached.add(node)
                pending += node.all_input_nodes
                # a view is computed from what another operation wrote into its base
                pending += [u for n in node.all_input_nodes for u in n.users if _writes_to(u, n)]
        return reached

    def _node(self, node: fx.Node, cost: NodeCost, learns: bool) -> OpNode:
        inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
        tensors = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
        names = []
        for i, (tensor, alias) in enumerate(zip(tensors, cost.aliases, strict=False)):
            name = node.name if len(tensors) == 1 else f"{node.name}[{i}]"
            if alias is not None:
                name = self._memory[inputs[alias]]
            names.append(name)
            self._size.setdefault(name, tensor.untyped_storage().nbytes())
        left = iter(names)
        leaves, spec = tree_flatten(node.meta.get("val"))
        self._memory[node] = tree_unflatten(
            [next(left, "") if isinstance(leaf, Tensor) else "" for leaf in leaves], spec
        )
        learns = learns and any(cost.learns)
        return OpNode(
            name=node.name,
            operation=self._operation(node),
            module=node.meta.get(MODULE, ""),
            inputs=tuple(n.name for n in inputs if n.op != "get_attr"),
            parameters=self._parameters(node, inputs),
            outputs=tuple(_info(t, m, g) for t, m, g in zip(tensors, names, cost.learns, strict=False)),
            forward=cost.forward,
            backward=cost.backward if learns else Work(),
            saved=self._saved(node, cost, inputs, names) if learns else {},
            without_rule=cost.without_rule,
            estimated=cost.estimated and learns,
            random=_is_random(node),
        )

    def _operation(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return type(self._module(node)).__name__
        return str(node.target)

    def _module(self, node: fx.Node) -> nn.Module:
        return attribute(self._model, "" if node.target == ROOT else str(node.target))

    def _parameters(self, node: fx.Node, inputs: list[fx.Node]) -> tuple[str, ...]:
        read = [self._memory[n] for n in inputs if n.op == "get_attr"]
        if node.op == "call_module":
            own = self._module(node)
            read += [self._names[id(t)] for t in (*own.parameters(), *own.buffers())]
        return tuple(dict.fromkeys(read))

    def _saved(
        self, node: fx.Node, cost: NodeCost, inputs: list[fx.Node], names: list[str]
    ) -> dict[str, int]:
        found: dict[str, int] = {}
        state = set(self._names.values())
        for i, kept in enumerate(cost.kept):
            if kept.source == "parameter":
                continue
            if kept.source == "inner":
                found[f"{node.name}.{i}"] = kept.nbytes
                continue
            name = self._memory[inputs[kept.index]] if kept.source == "input" else names[kept.index]
            if name not in state:
                found[name] = self._size.get(name, kept.nbytes)
        return found


def _writes_to(user: fx.Node, node: fx.Node) -> bool:
    schema = getattr(user.target, "_schema", None)
    return schema is not None and schema.is_mutable and bool(user.args) and user.args[0] is node


def _is_random(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags:
        return False
    # attention and dropout that are told not to drop
    rates = [a for a in (*node.args[1:], *node.kwargs.values()) if isinstance(a, float)]
    return not (str(node.target).startswith("aten.dropout") and (node.args[1:] + (True,))[1] is False) and (
        not rates or any(rates)
    )


__all__ = ["trace_model"]
