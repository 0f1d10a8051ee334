"""``Nodes`` puts together what is known of each node of a recorded graph."""

from __future__ import annotations

import operator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from colossalai.fx.costs import NodeCost
from colossalai.fx.kernels import OpWork, memory_bytes
from colossalai.fx.leaves import MODULE, ROOT
from colossalai.fx.op_graph import OpNode, TensorInfo, loss_of
from colossalai.fx.twin import attribute
from colossalai.fx.writes import written_arguments


def named_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, tied ones under their first name."""
    return dict((*model.named_parameters(), *model.named_buffers()))


def tensor_info(tensor: Tensor, memory: str, requires_grad: bool | None = None) -> TensorInfo:
    learns = tensor.requires_grad if requires_grad is None else requires_grad
    return TensorInfo(
        tuple(tensor.shape), tensor.dtype, tensor.numel() * tensor.element_size(), memory, learns
    )


class Nodes:
    """Makes the ``OpNode`` of each node of a recorded graph, inside the block in which it is fake."""

    def __init__(
        self,
        model: nn.Module,
        graph: fx.Graph,
        costs: dict[fx.Node, NodeCost],
        out_spec: TreeSpec | None = None,
    ) -> None:
        self._model, self._graph, self._costs, self._out_spec = model, graph, costs, out_spec
        self._memory: dict[fx.Node, Any] = {}  # like the node's value, with the name of each tensor's memory
        self._size: dict[str, int] = {}
        self._names = {id(t): name for name, t in named_state(model).items()}
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
                    self.inputs[node.name] = tensor_info(value, node.name)
                    self._size[node.name] = memory_bytes(value)
            elif node.op == "get_attr":
                self._memory[node] = self._names.get(id(value), node.target)
            elif node.target in (operator.getitem, getattr):
                self._memory[node] = node.target(self._memory[node.args[0]], node.args[1])
            elif node in self._costs:
                found[node.name] = self._node(node, self._costs[node], node in reached)
        return found

    def _learning(self) -> set[fx.Node]:
        """The nodes that gradients come to, from the loss if there is one, else from all outputs."""
        tree = self._graph.find_nodes(op="output")[0].args[0]
        pending = [r for r in tree_leaves(tree) if isinstance(r, fx.Node)]
        try:
            if self._out_spec is not None:
                tree = tree_unflatten(list(tree), self._out_spec)
            fakes = tree_map(lambda r: r.meta.get("val") if isinstance(r, fx.Node) else r, tree)
            loss = loss_of(fakes)
            pending = [r for r in pending if r.meta.get("val") is loss][:1]
            self.loss = pending[0].name
        except ValueError:
            pass  # its loss is computed outside of it
        reached: set[fx.Node] = set()
        while pending:
            node = pending.pop()
            if node not in reached:
                reached.add(node)
                pending += node.all_input_nodes
                # a view is computed from what another operation wrote into its base
                pending += [u for n in node.all_input_nodes for u in n.users if n in written_arguments(u)]
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
            self._size.setdefault(name, memory_bytes(tensor))
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
            outputs=tuple(tensor_info(t, m, g) for t, m, g in zip(tensors, names, cost.learns, strict=False)),
            forward=cost.forward,
            backward=cost.backward if learns else OpWork(),
            saved=self._saved(node, cost, inputs, names) if learns else {},
            without_rule=cost.without_rule,
            estimated=cost.estimated and learns,
            random=is_random(node),
            saved_parameters=self._saved_parameters(cost, inputs) if learns else (),
        )

    def _operation(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return type(self._module(node)).__name__
        if isinstance(node.target, FunctionType):
            return node.target.__name__
        return str(node.target)

    def _module(self, node: fx.Node) -> nn.Module:
        return attribute(self._model, "" if node.target == ROOT else str(node.target))

    def _parameters(self, node: fx.Node, inputs: list[fx.Node]) -> tuple[str, ...]:
        state = set(self._names.values())  # a constant of the model's code is none
        read = [self._memory[n] for n in inputs if n.op == "get_attr" and self._memory[n] in state]
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

    def _saved_parameters(self, cost: NodeCost, inputs: list[fx.Node]) -> tuple[str, ...]:
        state = set(self._names.values())
        kept = [self._memory[inputs[k.index]] for k in cost.kept if k.source == "input"]
        return tuple(name for name in kept if name in state)


def target_name(node: fx.Node) -> str:
    """What a node calls, told alike in all processes."""
    target: Any = node.target
    if isinstance(target, FunctionType):  # whose text has its address
        return f"{target.__module__}.{target.__qualname__}"
    return str(target)


def is_random(node: fx.Node) -> bool:
    """Whether a node draws; dropout and attention that are told not to drop do not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    schema: Any = node.target._schema  # type: ignore[union-attr]
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    if not given.get("train", given.get("training", True)):
        return False
    return any(
        given.get(name, 0.0 if name == "dropout_p" else 1.0) for name in _RATES if _has(schema, name)
    ) or (not any(_has(schema, name) for name in _RATES))


_RATES = ("p", "dropout_p", "dropout")


def _has(schema: Any, name: str) -> bool:
    return any(argument.name == name for argument in schema.arguments)
