"""What a function does with tensors that are cut: the table of :mod:`colossalai.tensor.letters` says it.

A function is a few operations (:mod:`recorded`).  For each, the tp axis takes the letter along which an
operand is cut.  Operands that have the letter are cut there, and so are results; operands without it are used
by every rank for its own piece, which is state R, so their gradients are sums; a result without it is a sum
over the ranks.  What moves, and its gradient, is a change of layouts of :mod:`colossalai.mesh`.  Where the
table has no such letter, the operation runs on whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from colossalai.mesh import Layout, redistribute, reduce
from colossalai.tensor.colo_tensor import (
    ColoTensor,
    check_may_gather,
    cut_dim,
    gathered,
    on_wholes,
    refuse_to_write_a_piece,
    whole_result,
    wrap,
)
from colossalai.tensor.compute_spec import ComputePattern, ComputeSpec
from colossalai.tensor.distspec import cut_along
from colossalai.tensor.letters import OpLetters
from colossalai.tensor.ops.recorded import Operation, flattened, recording_of, tensors_in
from colossalai.tensor.pieces import as_piece, plain_torch
from colossalai.tensor.process_group import TP, ProcessGroup

WEIGHTS = {"linear": 1, "addmm": 2, "mm": 1, "matmul": 1, "embedding": 0} | {
    f"conv{kind}{n}d": 1 for kind in ("", "_transpose") for n in (1, 2, 3)
}
"""Operations with a weight, by the number of that operand: its ``ComputeSpec`` says whether it leads."""


@dataclass
class Call:
    """An operation about to run, of whose tensors some are cut.

    Args:
        func: the function of which it is a part; words and permissions are those of the function.
    """

    operation: Operation
    args: Any
    kwargs: Any
    func: Callable[..., Any]
    group: ProcessGroup | None = None
    """That of tensors that were cut, if none is left."""

    def __post_init__(self) -> None:
        self.name = self.operation.call.name
        self.tensors = tensors_in((self.args, self.kwargs), [])
        given = self.given if self.operation.writes else {}
        self.written = [given[n] for n in self.operation.writes if isinstance(given[n], Tensor)]
        cut = [t for t in self.tensors if cut_dim(t) is not None]
        self.pg: ProcessGroup = self.group or cut[0].process_group  # type: ignore[attr-defined]
        for tensor in cut[1:]:
            if (other := tensor.process_group) != self.pg:  # type: ignore[attr-defined]
                raise ValueError(
                    f"one operand of {getattr(self.func, '__name__', self.name)} lies on {self.pg}, another"
                    f" on {other}; bring one to the other's process group with redistribute(dist_spec, pg)"
                )

    @property
    def given(self) -> dict[str, Any]:
        """All arguments by their names in torch's schema."""
        return self.operation.bind(self.args, self.kwargs)

    def whole_shape(self, number: int = 0) -> tuple[int, ...]:
        """The shape of a whole result."""
        return self.operation.call.outputs[number]

    def on_wholes(self) -> Any:
        """Run it on whole tensors."""
        refuse_to_write_a_piece(self.func, self.written)
        return on_wholes(self.operation.op, self.args, self.kwargs, asked=self.func)

    def with_tensors(self, new: list[Tensor]) -> tuple[Any, Any]:
        """The arguments with other tensors."""
        left = iter(new)

        def replaced(value: Any) -> Any:
            if isinstance(value, Tensor):
                return next(left)
            if isinstance(value, (list, tuple)):
                return type(value)([replaced(inner) for inner in value]) if value else value
            return {n: replaced(v) for n, v in value.items()} if isinstance(value, dict) else value

        return replaced(self.args), replaced(self.kwargs)


@dataclass(frozen=True)
class Cut:
    """The letter that the tp axis takes, and the dim of it in each operand and result that has it."""

    letter: str
    operands: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    summed: bool
    """Whether results are sums over the ranks."""
    spec: ComputeSpec | None = None
    """That of the weight whose cut this is."""


Form = Callable[[Call], Any]
FORMS: dict[str, Form] = {}
RANDOM = "random"
"""In place of a name: what draws random numbers and has no form of its own."""


def runs_as(*names: str) -> Callable[[Form], Form]:
    """Make the decorated function run the operations of these names, if one of their tensors is cut.

    It returns NotImplemented where nothing but the table is needed.
    """

    def register(form: Form) -> Form:
        FORMS.update(dict.fromkeys(names, form))
        return form

    return register


def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``func`` of tensors of which some are cut, or may be, in lists."""
    leaves: list[Any] = []
    form = flattened((args, kwargs), leaves)
    cut = [leaf for leaf in leaves if cut_dim(leaf) is not None]
    if not cut or getattr(func, "__name__", "") == "__setitem__":
        return on_wholes(func, args, kwargs)
    if _is_update(func, cut[0], leaves):
        with plain_torch():
            return func(*args, **kwargs)
    recording = recording_of(func, leaves, form, _shape)
    if recording is None:
        _refuse_unknown_pieces(cut[0], leaves)
        return on_wholes(func, args, kwargs)
    if not recording.calls and not any(isinstance(o, torch.fx.Node) for o in recording.outputs):
        with plain_torch():
            return func(*args, **kwargs)  # a fact about the memory of this rank
    return recording.run(leaves, lambda op, args, kwargs: _run(op, args, kwargs, func))


def _shape(tensor: Tensor) -> Any:
    return tensor.full_shape if isinstance(tensor, ColoTensor) else tensor.shape


def _is_update(func: Any, lead: ColoTensor, leaves: list[Any]) -> bool:
    """Whether this is an optimizer at work: a parameter next to plain tensors of its piece's shape, without
    gradients; or whether a piece is copied.
    """
    copied = func is Tensor.copy_ and leaves[0] is lead
    if not copied and (torch.is_grad_enabled() or not lead.is_model_data()):
        return False
    return any(
        isinstance(a, Tensor) and not isinstance(a, ColoTensor) and a.shape == lead.shape for a in leaves
    )


def _refuse_unknown_pieces(lead: ColoTensor, leaves: list[Any]) -> None:
    """Refuse a plain tensor that fits the piece and not the whole, in words that name the reason."""
    assert lead.cut_dim is not None
    right = lead.cut_dim - lead.ndim
    for value in leaves:
        if not isinstance(value, Tensor) or isinstance(value, ColoTensor) or value.ndim < -right:
            continue
        if 1 < value.size(right) == lead.shape[right]:
            raise ValueError(
                f"an operand of shape {tuple(value.shape)} does not fit a tensor of shape"
                f" {tuple(lead.full_shape)}, which is cut as {lead.dist_spec}: plain tensors count as"
                " whole; make a piece known with ColoTensor.from_torch_tensor(piece, spec)"
            )


def _run(operation: Operation, args: Any, kwargs: Any, func: Callable[..., Any]) -> Any:
    if all(cut_dim(t) is None for t in tensors_in((args, kwargs), [])):
        return on_wholes(operation.op, args, kwargs)
    call = _with_usable_weight(Call(operation, args, kwargs, func))
    form = FORMS.get(call.name, FORMS[RANDOM] if operation.is_random else None)
    result = NotImplemented if form is None else form(call)
    if result is not NotImplemented:
        return result
    cut = choose(call)
    return call.on_wholes() if cut is None else on_pieces(call, cut)


# ---- which letter ----


def _weight(call: Call) -> tuple[int, ColoTensor] | None:
    """The weight of an operation, if it is cut."""
    number = WEIGHTS.get(call.name)
    if number is None or (call.name == "matmul" and call.tensors[number].ndim != 2):
        return None
    weight = call.tensors[number]
    return (number, weight) if isinstance(weight, ColoTensor) and cut_dim(weight) is not None else None


def _with_usable_weight(call: Call) -> Call:
    """``call``; a weight that is cut and says nothing of where products with it run is brought together."""
    found = _weight(call)
    if found is None or found[1].has_compute_pattern(ComputePattern.TP1D):
        return call
    tensors = list(call.tensors)
    tensors[found[0]] = whole_result(gathered(found[1], call.func), call.pg)
    return Call(call.operation, *call.with_tensors(tensors), call.func, call.pg)


def choose(call: Call) -> Cut | None:
    """The letter with which the fewest operands have to be brought together; None if there is none."""
    weight = _weight(call)
    key = tuple(map(cut_dim, call.tensors)), call.pg.tp_world_size(), weight is None
    if key not in call.operation.cuts:
        call.operation.cuts[key] = _best(call, weight)
    cut: Cut | None = call.operation.cuts[key]
    return cut if cut is None or weight is None else replace(cut, spec=weight[1].compute_spec)


def _best(call: Call, weight: tuple[int, ColoTensor] | None) -> Cut | None:
    letters = call.operation.letters
    if letters is None:
        return None
    found: list[tuple[int, Cut]] = []
    for number in range(len(call.tensors)) if weight is None else (weight[0],):
        dim = cut_dim(call.tensors[number])
        cut = None if dim is None else _cut(call, letters, letters.operands[number][dim])
        if cut is not None:
            places = zip(call.tensors, cut.operands, strict=True)
            found.append((sum(cut_dim(t) not in (None, d) for t, d in places), cut))
    return min(found, key=lambda one: one[0])[1] if found else None


def _cut(call: Call, letters: OpLetters, letter: str) -> Cut | None:
    """What taking this letter means; None if pieces along it give no pieces, and no sums, of the results."""
    if letter not in letters.letters or letter in letters.sums_inside:
        return None
    places = list(letters.places(letter))
    where, parts = dict(places), call.pg.tp_world_size()
    shapes = [*(_shape(t) for t in call.tensors), *call.operation.call.outputs]
    if len(where) != len(places) or any(letters.blocks.get(p, 1) > 1 for p in places):
        return None
    if any(shapes[number][dim] % parts for number, dim in places):
        return None
    count = len(call.tensors)
    operands = tuple(where.get(i) for i in range(count))
    outputs = tuple(where.get(i + count) for i in range(len(letters.outputs)))
    summed = letter in letters.summed
    if not summed and None in outputs:
        return None
    for number, tensor in enumerate(call.tensors):  # what is written to stays where it is
        is_written = any(tensor is w for w in call.written)
        if is_written and (
            cut_dim(tensor) != operands[number] or letters.operands[number] != letters.outputs[0] or summed
        ):
            return None
    return Cut(letter, operands, outputs, summed)


# ---- on pieces ----


def placed(call: Call, number: int, dim: int | None) -> Tensor:
    """The operand of this number as this rank uses it for its piece: cut along ``dim``, or whole."""
    tensor = call.tensors[number]
    here = tensor.placement if isinstance(tensor, ColoTensor) else cut_along(None, tensor.ndim)
    if cut_dim(tensor) not in (None, dim):
        check_may_gather(tensor, call.func)
    there = cut_along(dim, tensor.ndim)
    if dim is None and tensor.requires_grad:
        there = _used_differently(there)
    if any(tensor is w for w in call.written):
        return tensor
    return redistribute(as_piece(tensor), here, there, call.pg.mesh)


def _used_differently(whole: Layout) -> Layout:
    """State R: the gradient is a sum over the ranks."""
    return Layout(whole.dims, spread=frozenset({TP}))


def on_pieces(call: Call, cut: Cut) -> Any:
    """Run the operation on this rank's pieces."""
    letters = call.operation.letters
    assert letters is not None
    if cut.summed:
        check_may_gather(next(t for t in call.tensors if cut_dim(t) is not None), call.func)
    local = [placed(call, number, dim) for number, dim in enumerate(cut.operands)]
    if cut.summed:
        first = call.pg.mesh.coord[TP] == 0
        for number in letters.bias:  # which is added once
            if not first:
                every = torch.ones((), dtype=torch.bool, device=local[number].device)
                local[number] = local[number].masked_fill(every, 0)
    with plain_torch():
        if letters.sized:
            result = _sized(call, local[0], cut)
        else:
            args, kwargs = call.with_tensors(local)
            result = call.operation.op(*args, **kwargs)
    lead = call.tensors[0]
    if result is local[0] and cut_dim(lead) is not None and cut_dim(lead) == cut.operands[0]:
        return lead  # contiguous()
    return finished(call, cut, result, mean=letters.mean)


def _sized(call: Call, piece: Tensor, cut: Cut) -> Tensor:
    """A view of other sizes: those of this rank's piece of the result."""
    shape = list(call.whole_shape())
    if (dim := cut.outputs[0]) is not None:
        shape[dim] //= call.pg.tp_world_size()
    kind = call.name if call.name in ("view", "expand") else "reshape"
    kind = {"view_as": "view", "expand_as": "expand", "broadcast_to": "expand"}.get(call.name, kind)
    return getattr(piece, kind)(shape)


def finished(call: Call, cut: Cut, result: Any, *, mean: bool = False) -> Any:
    """The pieces of a result as ColoTensors, or their sum."""
    if isinstance(result, (list, tuple)):
        return type(result)([_labelled(call, cut, r, i, mean) for i, r in enumerate(result)])
    return _labelled(call, cut, result, 0, mean)


def _labelled(call: Call, cut: Cut, piece: Tensor, number: int, mean: bool) -> Tensor:
    for tensor in call.tensors:
        if piece is tensor:
            return tensor  # it was written to
    if cut.summed:
        total = reduce(piece, TP, call.pg.mesh)
        return whole_result(total / call.pg.tp_world_size() if mean else total, call.pg)
    lead = call.tensors[0]
    spec = lead.compute_spec if call.operation.permutes and isinstance(lead, ColoTensor) else None
    result = wrap(piece, call.pg, cut_along(cut.outputs[number], piece.ndim), spec)
    replicate = cut.spec is not None and cut.spec.output_replicate
    return whole_result(result, call.pg) if replicate else result
