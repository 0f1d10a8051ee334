"""``OpGraph``: a model's forward pass as operations with what each costs, which can also be executed."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from colossalai.fx.kernels import OpWork
from colossalai.fx.leaves import LeafModule


@dataclass(frozen=True)
class TensorInfo:
    """The shape, dtype and bytes of a tensor, and whose memory it has.

    ``memory`` names the node (or parameter) that made the memory: a view has that of its base.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    memory: str
    requires_grad: bool = False


@dataclass(frozen=True)
class OpNode:
    """One operation of a model, with what its forward and its backward pass take.

    Args:
        name: that of the node of the ``fx.Graph``.
        operation: as torch calls it (``aten.linear.default``), or the class of a leaf.
        module: the path of the innermost module whose code does it; empty for the model itself.
        inputs: names of the nodes that it takes tensors from, in order; parameters are not among them.
        parameters: names of the parameters and buffers that it reads, as in ``model.state_dict()``.
        outputs: its tensors.
        forward, backward: operations and bytes of each pass; the backward pass is empty where no gradient
            of the loss, or of the outputs, goes through.
        saved: memory that it keeps for the backward pass, with its bytes; parameters are not among it.
        without_rule: kernels that no formula counts, so ``operations`` lacks theirs.
        estimated: whether the backward pass could not be run, and is taken for twice the forward pass.
        random: whether it draws random numbers.
        saved_parameters: names of the parameters and buffers whose values its backward pass needs.
    """

    name: str
    operation: str
    module: str
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    outputs: tuple[TensorInfo, ...]
    forward: OpWork
    backward: OpWork
    saved: dict[str, int]
    without_rule: tuple[str, ...] = ()
    estimated: bool = False
    random: bool = False
    saved_parameters: tuple[str, ...] = ()

    @property
    def saved_bytes(self) -> int:
        """What it keeps, some of which other operations may keep as well."""
        return sum(self.saved.values())


@dataclass
class OpGraph:
    """The operations of a model in the order in which they run, and how they were found.

    Calling it runs the recorded operations on the model's own parameters: the result, and the gradients
    of the parameters, are those of the model.

    Args:
        module: the graph as a ``GraphModule`` over flat lists of tensors; it shares the model's parameters.
        nodes: the operations by the names of their ``fx`` nodes.
        route: ``export``, ``make_fx``, or ``modules`` where some are leaves.
        failures: why earlier routes did not work.
        leaves: the modules that are one operation.
        notes: what the graph does otherwise than the model.
    """

    module: fx.GraphModule
    nodes: dict[str, OpNode]
    in_spec: TreeSpec
    recorded: list[Any]
    """The leaves of the inputs it was recorded for: shapes and dtypes of tensors, and other values."""
    out_spec: TreeSpec
    constants: dict[int, Any]
    inputs: dict[str, TensorInfo]
    parameters: dict[str, TensorInfo]
    loss: str | None
    """The node that is differentiated; None where no output is a loss, and all outputs are."""
    route: str
    failures: dict[str, str] = field(default_factory=dict)
    leaves: list[LeafModule] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        if spec != self.in_spec:
            ordered = {key: kwargs[key] for key in self._keywords if key in kwargs}
            leaves, spec = tree_flatten((args, ordered if len(ordered) == len(kwargs) else kwargs))
        if spec != self.in_spec:
            raise ValueError(f"the graph was recorded for inputs {self.in_spec}, got {spec}")
        check_recorded(leaves, self.recorded)
        results = self.module(*leaves)
        found = [self.constants.get(i) if i in self.constants else r for i, r in enumerate(results)]
        return tree_unflatten(found, self.out_spec)

    @property
    def _keywords(self) -> list[str]:
        return list(tree_unflatten(list(range(self.in_spec.num_leaves)), self.in_spec)[1])

    def __iter__(self) -> Iterator[OpNode]:
        return iter(self.nodes.values())

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def forward(self) -> OpWork:
        return sum((node.forward for node in self), OpWork())

    @cached_property
    def backward(self) -> OpWork:
        return sum((node.backward for node in self), OpWork())

    @cached_property
    def saved(self) -> dict[str, int]:
        """All memory that is kept for the backward pass, each once."""
        return {memory: nbytes for node in self for memory, nbytes in node.saved.items()}

    @property
    def saved_bytes(self) -> int:
        return sum(self.saved.values())

    @property
    def without_rule(self) -> dict[str, list[str]]:
        """Kernels that no formula counts, with the operations that use them."""
        found: dict[str, list[str]] = {}
        for node in self:
            for kernel in node.without_rule:
                found.setdefault(kernel, []).append(node.name)
        return found

    def memory(self, node: fx.Node) -> set[str]:
        """Where the tensors of a node of ``module.graph`` lie."""
        while node.target in (operator.getitem, getattr):
            node = node.args[0]  # type: ignore[assignment]
        if node.op == "get_attr":
            return {str(node.target)}
        return (
            {info.memory for info in self.nodes[node.name].outputs}
            if node.name in self.nodes
            else {node.name}
        )

    def __str__(self) -> str:
        total, back = self.forward, self.backward
        lines = [
            f"{len(self)} operations, recorded by {self.route}: {total.operations / 1e9:.4g} Gflop forward,"
            f" {back.operations / 1e9:.4g} backward, {self.saved_bytes / 2**20:.4g} MiB kept"
        ]
        lines += [f"{route} did not work: {reason}" for route, reason in self.failures.items()]
        lines += [f"leaf {leaf}" for leaf in self.leaves]
        lines += [
            f"no rule counts {kernel} ({', '.join(names[:3])}{' ...' if len(names) > 3 else ''})"
            for kernel, names in self.without_rule.items()
        ]
        return "\n".join(lines + self.notes)


def recorded_leaves(leaves: list[Any]) -> list[Any]:
    """What a graph depends on of its inputs: shapes and dtypes of tensors, and all other values."""
    return [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves]


def check_recorded(leaves: list[Any], recorded: list[Any]) -> None:
    """Refuse inputs for which another graph would have been recorded."""
    for i, (got, want) in enumerate(zip(recorded_leaves(leaves), recorded, strict=True)):
        if type(got) is not type(want) or got != want:
            raise ValueError(
                f"input {i} is {got}, and the graph was recorded for {want}: shapes, dtypes and values other"
                " than tensors are part of a graph; trace the model again for other ones"
            )


def loss_of(output: Any) -> Tensor:
    """The loss that a model returned: the output itself, its ``loss``, or the first of a list."""
    found = output
    if isinstance(output, dict):
        found = output.get("loss")
    elif not isinstance(output, Tensor) and hasattr(output, "loss"):
        found = output.loss
    elif isinstance(output, (list, tuple)) and output:
        found = output[0]
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.is_floating_point():
        raise ValueError(
            f"the model's output, of {type(output).__name__}, has no loss: neither a number, nor one under"
            " 'loss', nor one as its first element; give labels to a model that computes it, or loss=..."
        )
    return found
