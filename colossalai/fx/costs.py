"""``CostPass`` finds what each node of a recorded graph costs, by running it alone on fake tensors.

A node runs once forward and once backward, with gradients for those of its inputs that have some in the
model: so the operations and bytes of both passes are those of its kernels, and what autograd keeps for the
backward pass is seen, without a joint graph whose parts would have to be matched.  Nodes that are alike
(blocks of a transformer) are run once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

from colossalai.fx.kernels import KernelCounter, OpWork, memory_bytes, memory_of
from colossalai.fx.leaves import ROOT, run_leaf
from colossalai.fx.twin import attribute
from colossalai.fx.writes import written_arguments

SWITCHES = (
    torch._C._set_grad_enabled,
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
)


@dataclass(frozen=True)
class Kept:
    """A tensor that the backward pass of a node needs: where its memory comes from, and its bytes.

    ``source`` is ``input`` or ``output`` with the number of the tensor among these, ``parameter`` of a leaf,
    or ``inner`` for what only autograd holds.
    """

    source: str
    index: int
    nbytes: int


@dataclass(frozen=True)
class NodeCost:
    """What a node costs, whatever its tensors are called."""

    forward: OpWork
    backward: OpWork
    kept: tuple[Kept, ...]
    aliases: tuple[int | None, ...]
    """For each tensor of the output, the input whose memory it shares."""
    learns: tuple[bool, ...]
    """For each tensor of the output, whether it has a gradient."""
    without_rule: tuple[str, ...]
    estimated: bool = False
    """Whether the backward pass could not be run, and is taken for twice the forward pass."""


class CostPass:
    """Runs the nodes of ``graph`` one by one; the model's tensors and ``node.meta["val"]`` are fake."""

    def __init__(
        self,
        model: nn.Module,
        graph: fx.Graph,
        attributes: dict[str, Any],
        mode: FakeTensorMode,
        operations: dict[str, int] | None = None,
    ) -> None:
        self._model, self._graph, self._attributes, self._mode = model, graph, attributes, mode
        self._operations = operations or {}  # of leaves that do not run on fake tensors
        self._known: dict[Any, NodeCost] = {}
        self._learns: dict[fx.Node, Any] = {}
        self._bases: dict[fx.Node, Any] = {}  # of views: whose memory they show
        self.costs: dict[fx.Node, NodeCost] = {}

    def run(self) -> dict[fx.Node, NodeCost]:
        """The cost of every node that computes."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self._mode)
            counter = KernelCounter()
            stack.enter_context(counter)
            entered: dict[fx.Node, Any] = {}
            nested = 0
            for node in self._graph.nodes:
                name = getattr(node.target, "__name__", "")
                nested += (name == "_vmap_increment_nesting") - (name == "_vmap_decrement_nesting")
                if nested or "batch_dim" in name or name.startswith("_vmap_"):
                    self._leave_out(node)
                elif node.op in ("placeholder", "get_attr"):
                    self._value(node)
                elif node.target in SWITCHES:
                    self._switch(node, entered)
                elif node.target in (operator.getitem, getattr):
                    part = tree_map(lambda flag: flag, self._learns[node.args[0]])
                    self._learns[node] = node.target(part, node.args[1])
                    bases = self._bases.get(node.args[0])
                    if isinstance(bases, list) and node.args[1] in range(len(bases)):
                        self._bases[node] = bases[node.args[1]]
                elif node.op in ("call_function", "call_module", "call_method"):
                    self._cost(node, counter)
        return self.costs

    def _leave_out(self, node: fx.Node) -> None:
        """A node inside a vmap, which does not run alone; models compute their masks so."""
        tensors = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
        unknown, none = (None,) * len(tensors), (False,) * len(tensors)
        self.costs[node] = NodeCost(OpWork(), OpWork(), (), unknown, none, ("vmap",))
        self._learns[node] = tree_map(lambda leaf: False, node.meta.get("val"))

    def _value(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            try:
                value = attribute(self._model, str(node.target))
            except AttributeError:
                value = self._attributes[str(node.target)]
                value = self._mode.from_tensor(value) if isinstance(value, Tensor) else value
            node.meta["val"] = value
        value = node.meta.get("val")
        self._learns[node] = isinstance(value, Tensor) and value.requires_grad

    def _switch(self, node: fx.Node, entered: dict[fx.Node, Any]) -> None:
        args: Any = [entered.get(a, a) if isinstance(a, fx.Node) else a for a in node.args]
        function: Any = node.target
        entered[node] = function(*args)

    def _cost(self, node: fx.Node, counter: KernelCounter) -> None:
        inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
        flags = [bool(self._learns[n]) and torch.is_grad_enabled() for n in inputs]
        key = self._signature(node, inputs, flags)
        cost = self._known.get(key) if key is not None else None
        if cost is None and node.op == "call_module" and node.target in self._operations:
            cost = self._rehearsed(node, inputs)
        if cost is None:
            try:
                cost = self._measure(node, inputs, flags, counter)
            except Exception:
                cost = self._unknown(node, inputs, str(node.target))
            if key is not None:
                self._known[key] = cost
        self.costs[node] = cost
        _, spec = tree_flatten(node.meta.get("val"))
        flags_left = iter(cost.learns)
        marked = [
            isinstance(x, Tensor) and next(flags_left, False) for x in tree_leaves(node.meta.get("val"))
        ]
        self._learns[node] = torch.utils._pytree.tree_unflatten(marked, spec)
        self._note_memory(node, inputs, cost)

    def _note_memory(self, node: fx.Node, inputs: list[fx.Node], cost: NodeCost) -> None:
        """Where the results lie; what has a gradient gives it to all of the memory that it is written to."""
        bases = [node if a is None else self._bases.get(inputs[a], inputs[a]) for a in cost.aliases]
        self._bases[node] = bases[0] if isinstance(node.meta.get("val"), Tensor) and bases else bases
        if not any(cost.learns):
            return
        written = {self._bases.get(n, n) for n in written_arguments(node) if not self._learns[n]}
        for other in list(self._learns) if written else ():
            base = self._bases.get(other, other)
            if isinstance(base, fx.Node) and base in written:
                self._learns[other] = True

    def _signature(self, node: fx.Node, inputs: list[fx.Node], flags: list[bool]) -> Any:
        """What nodes of the same cost have alike; None for a module, which has its own parameters."""
        if node.op == "call_module":
            return None
        number = {n: i for i, n in enumerate(inputs)}
        shapes = tuple(
            (tuple(v.shape), v.stride(), v.dtype, v.device, flag)
            for v, flag in zip((n.meta["val"] for n in inputs), flags, strict=True)
        )
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: ("input", number.get(n, -1)))
        modes: list[Any] = [torch.is_grad_enabled()]
        for device in {v.device.type for v in (n.meta["val"] for n in inputs)} - {"meta"}:
            modes += [torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)]
        return str(node.target), shapes, repr(arguments), tuple(modes)

    def _measure(
        self, node: fx.Node, inputs: list[fx.Node], flags: list[bool], counter: KernelCounter
    ) -> NodeCost:
        run = self._callable(node)
        writes = _writes(node)
        stand_ins: dict[fx.Node, Tensor] = {}
        learnt: list[Tensor] = []
        for n, flag in zip(inputs, flags, strict=True):
            leaf = n.meta["val"].detach().requires_grad_(flag)
            if flag:
                learnt.append(leaf)
            # what is written to must be no leaf of autograd
            stand_ins[n] = leaf.clone() if writes else leaf
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda n: stand_ins[n] if n in stand_ins else n.meta.get("val")
        )
        owned = self._parameters(node)
        saved: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        counter.without_rule.clear()
        start = counter.work
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            result = run(*args, **kwargs)
        forward = counter.work - start
        node.meta.setdefault("val", tree_map_only(Tensor, Tensor.detach, result))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        kept, aliases = _sources(saved, list(stand_ins.values()), outputs, owned)
        learns = tuple(tensor.requires_grad for tensor in outputs)
        learnt += [p for p in owned if p.requires_grad]
        results = [(t, torch.empty_like(t)) for t in outputs if t.requires_grad]
        start = counter.work
        estimated = not _run_backward(results, learnt)
        backward = counter.work - start
        if estimated:
            backward = OpWork(2 * forward.operations, 2 * forward.read, 2 * forward.written)
        missing = tuple(sorted(counter.without_rule))
        return NodeCost(forward, backward, kept, aliases, learns, missing, estimated)

    def _rehearsed(self, node: fx.Node, inputs: list[fx.Node]) -> NodeCost:
        """What is known of a leaf that only ran on real tensors."""
        name = f"module {type(self._module(node)).__name__}"
        return self._unknown(node, inputs, name, self._operations[str(node.target)])

    def _unknown(self, node: fx.Node, inputs: list[fx.Node], name: str, operations: int = 0) -> NodeCost:
        """What is known of an operation that does not run alone: its inputs are taken to be kept."""
        tensors = [n.meta["val"] for n in inputs]
        outputs = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
        read = sum(t.numel() * t.element_size() for t in (*tensors, *self._parameters(node)))
        written = sum(t.numel() * t.element_size() for t in outputs)
        kept = tuple(Kept("input", i, memory_bytes(t)) for i, t in enumerate(tensors))
        return NodeCost(
            forward=OpWork(operations, read, written),
            backward=OpWork(2 * operations, 2 * read, 2 * written),
            kept=kept,
            aliases=(None,) * len(outputs),
            learns=tuple(t.is_floating_point() for t in outputs),
            without_rule=(name,),
            estimated=True,
        )

    def _callable(self, node: fx.Node) -> Callable[..., Any]:
        if node.op == "call_function":
            return node.target  # type: ignore[return-value]
        if node.op == "call_method":
            return lambda tensor, *args, **kwargs: getattr(tensor, str(node.target))(*args, **kwargs)
        module = self._module(node)
        return lambda *args, **kwargs: run_leaf(str(node.target), module, args, kwargs)

    def _module(self, node: fx.Node) -> nn.Module:
        return attribute(self._model, "" if node.target == ROOT else str(node.target))

    def _parameters(self, node: fx.Node) -> list[Tensor]:
        """The tensors of a leaf."""
        if node.op != "call_module":
            return []
        module = self._module(node)
        return [*module.parameters(), *module.buffers()]


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op != "call_function" or bool(schema is None or schema.is_mutable)


def _run_backward(results: list[tuple[Tensor, Tensor]], learnt: list[Tensor]) -> bool:
    """Run a backward pass from tensors with their gradients; False if torch cannot."""
    if not results or not learnt:
        return True
    try:
        torch.autograd.grad([t for t, _ in results], learnt, [g for _, g in results], allow_unused=True)
    except Exception:
        return False
    return True


def _sources(
    saved: list[Tensor], inputs: list[Tensor], outputs: list[Tensor], owned: list[Tensor]
) -> tuple[tuple[Kept, ...], tuple[int | None, ...]]:
    """Where the memory of what was saved comes from, and which outputs share that of which inputs."""
    place: dict[int, tuple[str, int]] = {}
    for source, tensors in (("parameter", owned), ("input", inputs), ("output", outputs)):
        for i, tensor in enumerate(tensors):
            place.setdefault(memory_of(tensor), (source, i))
    found: dict[int, Kept] = {}
    for i, tensor in enumerate(saved):
        source, index = place.get(memory_of(tensor), ("inner", i))
        nbytes = memory_bytes(tensor)
        found.setdefault(memory_of(tensor), Kept(source, index, nbytes))
    shared = [place[memory_of(tensor)] for tensor in outputs]
    aliases = tuple(index if source == "input" else None for source, index in shared)
    return tuple(found.values()), aliases
