"""``ColoGraphModule``: a recorded graph as a module, whose labelled regions are recomputed."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from torch import fx, nn
from torch.fx.node import map_arg

from colossalai.fx.twin import RECOMPUTED
from colossalai.utils import checkpoint


class ColoGraphModule(fx.GraphModule):
    """Runs a recorded graph on the parameters of ``root``.

    Neighbouring nodes with the same ``node.meta["activation_checkpoint"]`` (a list, of which the first number
    counts) keep no activations: they run again in the backward pass, with the same random numbers.  After a
    change of labels, ``recompile()``.
    """

    def __init__(
        self, root: nn.Module | dict[str, Any], graph: fx.Graph, class_name: str = "ColoGraphModule"
    ) -> None:
        super().__init__(root, graph, class_name)

    def recompile(self) -> Any:
        code = super().recompile()
        if any(_label(node) is not None for node in self.graph.nodes):
            type(self).forward = _run_regions
        return code


def _label(node: fx.Node) -> Any:
    label = node.meta.get(RECOMPUTED)
    if node.op in ("placeholder", "output", "get_attr") or label is None:
        return None
    return label[0] if isinstance(label, (list, tuple)) else label


def _run_regions(module: ColoGraphModule, *args: Any, **kwargs: Any) -> Any:
    interpreter = _Values(module)
    names = [node.target for node in module.graph.find_nodes(op="placeholder")]
    given = dict(zip(names, args, strict=False)) | kwargs
    body = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            value = given[node.target] if node.target in given else next(iter(node.args), None)
            interpreter.values[node] = value
        elif node.op == "get_attr":
            interpreter.run([node])
        elif node.op != "output":
            body.append(node)
    for label, nodes in groupby(body, key=_label):
        region = list(nodes)
        if label is None:
            interpreter.run(region, free=True)
        else:
            interpreter.recompute(region)
    result = module.graph.find_nodes(op="output")[0].args[0]
    return map_arg(result, lambda node: interpreter.values[node])


class _Values:
    """The values of the nodes of a graph in one of its runs."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._interpreter = fx.Interpreter(module)  # which finds out who uses a value last
        self.values: dict[fx.Node, Any] = {}

    def run(self, nodes: list[fx.Node], *, free: bool = False) -> None:
        for node in nodes:
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: self.values[n])
            self.values[node] = getattr(self._interpreter, node.op)(node.target, args, kwargs)
            if free:
                del args, kwargs
                self._free(node)

    def _free(self, node: fx.Node) -> None:
        """Let go of the values that nothing after ``node`` uses."""
        for used in self._interpreter.user_to_last_uses.get(node, ()):
            self.values.pop(used, None)

    def recompute(self, nodes: list[fx.Node]) -> None:
        """Run ``nodes``, of which only what others use is kept."""
        inside = set(nodes)
        taken = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
        given = [node for node in nodes if any(user not in inside for user in node.users)]
        interpreter = self._interpreter  # not all values, which the function would keep until it runs again

        def function(*values: Any) -> tuple[Any, ...]:
            part = _Values.__new__(_Values)
            part._interpreter = interpreter
            part.values = dict(zip(taken, values, strict=True))
            part.run(nodes)
            return tuple(part.values[node] for node in given)

        results = checkpoint(function, False, *(self.values[n] for n in taken), use_reentrant=False)
        self.values.update(zip(given, results, strict=True))
        for node in nodes:
            self._free(node)
