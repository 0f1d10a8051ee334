"""How an operation runs on the pieces of its operands, where this is not the same call on smaller tensors.

Most operations are: a product of pieces is a product.  Others have sizes of the whole tensor among their
arguments (``view``), divide by a number of elements (``mean``), add a bias that counts once, or look at
more than this rank holds (a table that is cut by rows, statistics of a batch).  Each of these is one function
here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from colossalai.auto_parallel.tensor_shard.runtime.bound_calls import bound_call
from colossalai.auto_parallel.tensor_shard.runtime.random_pieces import RandomPieces, draws
from colossalai.auto_parallel.tensor_shard.runtime.whole_statistics import batch_norm_of_whole
from colossalai.auto_parallel.tensor_shard.sharded_plan import NodePlan
from colossalai.mesh import Axes, Layout, Mesh, local_shape
from colossalai.tensor.ops.rows import lookup, row_loss

aten: Any = torch.ops.aten

_SIZED = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel")
_MEANS = (
    "mean",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "soft_margin_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)


@dataclass
class LocalCall:
    """One operation of a traced model, about to be put into the graph of this rank.

    Args:
        node: the operation on whole tensors.
        name: what it is called, without namespace and overload.
        plan: how it runs.
        args, kwargs: its arguments, with nodes of this rank's graph that have the operands in the layouts of
            the plan.
        graph: this rank's graph.
        numbers: the random numbers of the model.
        key: the node of the key that a forward pass draws them with.
    """

    node: fx.Node
    name: str
    plan: NodePlan
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    graph: fx.Graph
    mesh: Mesh
    numbers: RandomPieces
    key: fx.Node
    given: dict[str, Any] = field(init=False)
    """All arguments by their names."""

    def __post_init__(self) -> None:
        schema = getattr(self.node.target, "_schema", None)
        named = () if schema is None else schema.arguments
        self.given = {a.name: a.default_value for a in named if a.has_default_value()}
        self.given |= {a.name: value for a, value in zip(named, self.args, strict=False)} | self.kwargs

    def emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Call an operation of torch."""
        return self.graph.call_function(target, args, kwargs)

    def call(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        """Call a function of ours, some of whose arguments are objects."""
        return bound_call(self.graph, function, *args)

    def again(self, **changed: Any) -> fx.Node:
        """The same operation with other values of some arguments."""
        return self.graph.call_function(self.node.target, (), {**self.given, **changed})  # type: ignore[arg-type]

    def whole_shape(self, number: int = 0) -> tuple[int, ...]:
        """The shape of a tensor of the result."""
        tensors = [t for t in tree_leaves(self.node.meta["val"]) if isinstance(t, Tensor)]
        return tuple(tensors[number].shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this rank's piece of the result."""
        return local_shape(self.whole_shape(), self.plan.computed[0], self.mesh)

    @property
    def summed(self) -> Axes:
        """The axes over which the results of the ranks are still to be added."""
        return self.mesh.in_order(tuple(self.plan.computed[0].partial)) if self.plan.computed else ()

    @property
    def is_cut(self) -> bool:
        """Whether this rank computes less than the whole."""
        return any(layout.sharded for layout in (*self.plan.inputs, *self.plan.computed))


Finish = Callable[[fx.Node], fx.Node]
"""What is done with the result after it has been moved to where it is handed on."""
LocalForm = Callable[[LocalCall], "fx.Node | tuple[fx.Node, Finish] | None"]
_FORMS: dict[str, LocalForm] = {}


def runs_locally(*names: str) -> Callable[[LocalForm], LocalForm]:
    """Make the decorated function put the operations of these names into the graph of a rank.

    It returns the node of the result (with what is done after the result was moved, if anything is), or None
    for the same call on the pieces.
    """

    def register(form: LocalForm) -> LocalForm:
        for name in names:
            _FORMS[name] = form
        return form

    return register


def run_on_pieces(call: LocalCall) -> tuple[fx.Node, Finish | None]:
    """Put an operation into the graph of this rank."""
    form = _FORMS.get(call.name)
    made = None
    if form is not None and (call.is_cut or call.name in _ALWAYS):
        made = form(call)
    if made is None and draws(call.node):
        made = call.call(
            call.numbers.draw_alike, call.key, call.node.target, call.args, call.kwargs, call.node.name
        )
    if made is None:
        made = call.graph.create_node(call.node.op, call.node.target, call.args, call.kwargs)
    return made if isinstance(made, tuple) else (made, None)


# ---- sizes among the arguments ----


@runs_locally(*_SIZED)
def _sized(call: LocalCall) -> fx.Node | None:
    if call.given.get("dtype") is not None:
        return None
    return call.emit(aten.reshape.default, call.given["self"], list(call.shape))


@runs_locally("expand", "broadcast_to", "expand_as")
def _expand(call: LocalCall) -> fx.Node:
    return call.emit(aten.expand.default, call.given["self"], list(call.shape))


@runs_locally("view_as", "reshape_as")
def _view_as(call: LocalCall) -> fx.Node:
    return call.emit(aten.reshape.default, call.given["self"], list(call.shape))


@runs_locally("split", "split_with_sizes")
def _split(call: LocalCall) -> fx.Node:
    dim = call.given.get("dim") or 0
    outputs = range(len(call.plan.computed))
    shapes = [local_shape(call.whole_shape(i), call.plan.computed[i], call.mesh) for i in outputs]
    return call.emit(aten.split_with_sizes.default, call.given["self"], [s[dim] for s in shapes], dim)


# ---- sums ----


@runs_locally(*_MEANS)
def _mean(call: LocalCall) -> fx.Node | None:
    """The mean of a piece counts as much as the piece is of the whole."""
    if not call.summed or call.given.get("reduction", 1) != 1:
        return None
    parts = call.mesh.group_size(*call.summed)
    return call.emit(aten.div.Scalar, call.again(), float(parts))


def _is_postponed(call: LocalCall) -> bool:
    """Whether a bias is added after the result was moved: of a sum over ranks it counts once."""
    return call.plan.computed[0] != call.plan.outputs[0]


@runs_locally("linear")
def _linear(call: LocalCall) -> tuple[fx.Node, Finish] | None:
    bias = call.given["bias"]
    if bias is None or not _is_postponed(call):
        return None
    return call.again(bias=None), lambda y: call.emit(aten.add.Tensor, y, bias)


@runs_locally("addmm")
def _addmm(call: LocalCall) -> tuple[fx.Node, Finish] | None:
    if not _is_postponed(call):
        return None
    given = call.given
    product = call.emit(aten.mm.default, given["mat1"], given["mat2"])
    if given["alpha"] != 1:
        product = call.emit(aten.mul.Scalar, product, given["alpha"])
    return product, lambda y: call.emit(aten.add.Tensor, y, given["self"], alpha=given["beta"])


_CONVOLUTIONS = [f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)]


@runs_locally(*_CONVOLUTIONS)
def _convolution(call: LocalCall) -> tuple[fx.Node, Finish] | None:
    bias = call.given["bias"]
    if bias is None or not _is_postponed(call):
        return None
    ones = [1] * int(call.name[-2])

    def add(y: fx.Node) -> fx.Node:
        return call.emit(aten.add.Tensor, y, call.emit(aten.view.default, bias, [-1, *ones]))

    return call.again(bias=None), add


# ---- what looks at more than this rank holds ----


@runs_locally("embedding")
def _embedding(call: LocalCall) -> fx.Node | None:
    rows = call.plan.inputs[0].dims[0]
    if not rows:
        return None
    size = call.node.args[0].meta["val"].size(0)  # type: ignore[union-attr]
    padding = call.given["padding_idx"]
    padding = None if padding is None or padding == -1 else padding % size
    return call.call(lookup, call.given["indices"], call.given["weight"], size, rows, padding, call.mesh)


@runs_locally("cross_entropy_loss", "nll_loss", "nll_loss_nd")
def _cross_entropy(call: LocalCall) -> fx.Node | None:
    if not call.summed or call.given["reduction"] != 1:
        return None
    total = call.again(reduction=2)
    ignored = call.given["ignore_index"]
    return call.call(row_loss, total, call.given["target"], ignored, call.summed, call.mesh)


@runs_locally("batch_norm")
def _batch_norm(call: LocalCall) -> fx.Node | None:
    given, rows = call.given, call.plan.inputs[0].dims[0]
    if not rows or not (given["training"] or given["running_mean"] is None):
        return None
    names = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
    return call.call(batch_norm_of_whole, *(given[name] for name in names), rows, call.mesh)


# ---- random numbers ----


@runs_locally("dropout", "dropout_", "native_dropout", "alpha_dropout", "feature_dropout", "bernoulli")
def _dropout(call: LocalCall) -> fx.Node | None:
    if not draws(call.node):
        return None
    place = call.whole_shape(), call.plan.computed[0]
    if call.name == "dropout":
        x, p = call.given["input"], call.given["p"]
        return call.call(call.numbers.dropout, call.key, x, p, *place, call.node.name)
    return call.call(
        call.numbers.draw, call.key, call.node.target, call.args, call.kwargs, *place, call.node.name
    )


@runs_locally("scaled_dot_product_attention")
def _attention(call: LocalCall) -> fx.Node | None:
    if not draws(call.node):
        return None
    query, key = (call.node.args[i].meta["val"] for i in (0, 1))  # type: ignore[union-attr]
    scores = (*query.shape[:-1], key.shape[-2])
    lead = call.plan.inputs[0].dims[:-2]
    place = scores, Layout((*lead, (), ()))
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = {name: call.given[name] for name in names}
    return call.call(call.numbers.attention, call.key, given, *place, call.node.name)


_ALWAYS = ("dropout", "scaled_dot_product_attention")
"""What draws random numbers in its own way, also where nothing is cut."""
