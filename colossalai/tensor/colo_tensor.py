"""``ColoTensor``: a piece of a tensor that knows the whole.

The object itself is the piece that this rank holds: ``shape``, ``data``, ``grad`` and the optimizer see the
piece.  Beside it lie the process group, the layout among the tp ranks (``dist_spec`` is its documented name)
and, for weights, how products with it run (``compute_spec``).  In computations it stands for the whole
tensor: ``size()``, ``view(...)``, indices and the results of functions are those of the whole.

[Note: what a function does with a ColoTensor]
``__torch_function__`` looks at the function and takes the first that fits:

1. an implementation in the table of ``op_wrapper``: ``size``, ``zeros_like``, backward passes, those of
   users;
2. functions about the memory of this rank (attributes, ``numel``, lists of tensors in an optimizer) run on
   the piece;
3. of every other function, torch says of which operations it consists (:mod:`recorded` in ``ops``), and the
   table of :mod:`colossalai.tensor.letters` says what each does with a cut.  Operations with a letter for it
   run on pieces (:mod:`colossalai.tensor.ops.dispatch`);
4. an operation without a rule, or that looks at a whole dim that is cut, gets whole tensors.

The results are ColoTensors, cut or whole; only what is made like a parameter (``zeros_like``) is plain
memory, for its optimizer.

[Note: who may gather] A gather waits for every tp rank, and a script that looks at a tensor on one rank only
would wait for ever, or take the next message of the others for its own.  So tensors that are cut are brought
together where all ranks come by: by the layers of a model (products, and all of ``torch.nn.functional``), by
the methods whose names say so (``to_replicate``), and inside ``DistSpecManager.implicit_gathers()``.  Any
other function that would have to gather, or to add up over the ranks, refuses a tensor that is cut.

[Note: states] A whole tensor is in state I of :mod:`colossalai.mesh.layout`: all tp ranks go on to do the
same with it.  Wherever a rank uses a whole tensor for its own piece of the result, it is moved from I to R or
cut, so that its gradient is the sum over the ranks.  Plain tensors that meet a ColoTensor
count as whole.

[Note: views of tensors that are cut] ``weight[3]`` of a weight that is cut along its rows is a view of a
gathered copy, and whatever is written there is lost.  So it is a ColoTensor that can be read but not written
to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from colossalai.mesh import Layout, move, redistribute
from colossalai.tensor.compute_spec import ComputePattern, ComputeSpec
from colossalai.tensor.dist_spec_mgr import DistSpecManager
from colossalai.tensor.distspec import DistSpec, ReplicaSpec, cut_along, layout_of, spec_of
from colossalai.tensor.op_wrapper import IMPLEMENTATIONS
from colossalai.tensor.pieces import ConvertInPlace, Wrap, as_piece, describe, plain_torch
from colossalai.tensor.process_group import TP, JobProcessGroup, ProcessGroup
from colossalai.tensor.serialization import deep_copy, reduced
from colossalai.tensor.tensor_spec import ColoTensorSpec


class ColoTensor(Tensor):
    """A tensor whose pieces lie on the tp ranks of a process group.

    Args:
        data: this rank's piece, or the whole tensor if ``spec`` says that it is not cut.  Memory is shared,
            and gradients reach ``data``.
        spec: by default whole on every rank of the job.
    """

    process_group: ProcessGroup
    placement: Layout
    full_shape: torch.Size
    compute_spec: ComputeSpec | None
    cut_dim: int | None
    """The dim along which it is cut into several pieces; None if it is whole, also as the only piece."""
    is_copy = False  # [Note: views of tensors that are cut]

    def __new__(cls, data: Tensor, spec: ColoTensorSpec | None = None) -> ColoTensor:
        if not isinstance(data, Tensor):
            raise TypeError(f"{cls.__name__} is made of a tensor, got {type(data).__name__}")
        if spec is None:
            spec = data.spec() if isinstance(data, ColoTensor) else ColoTensorSpec(JobProcessGroup())
        layout = layout_of(spec.dist_attr, data.shape, spec.pg, whole=False)
        piece = as_piece(data) if torch.is_grad_enabled() else as_piece(data).detach()
        return wrap(piece, spec.pg, layout, spec.compute_attr, apart=True)

    @staticmethod
    def from_torch_tensor(tensor: Tensor, spec: ColoTensorSpec | None = None) -> ColoTensor:
        """``ColoTensor(tensor, spec)``."""
        return ColoTensor(tensor, spec)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """See [Note: what a function does with a ColoTensor]."""
        kwargs = kwargs or {}
        if is_in_place(func):
            refuse_lost_writes(func, args)
        implementation = IMPLEMENTATIONS.get(func)
        if implementation is not None:
            return implementation(*args, **kwargs)
        if is_about_memory(func):
            with plain_torch():
                return func(*args, **kwargs)
        return compute(func, args, kwargs)

    # what it knows

    @property
    def dist_spec(self) -> DistSpec:
        return spec_of(self.placement, self.process_group)

    def spec(self) -> ColoTensorSpec:
        return ColoTensorSpec(self.process_group, self.dist_spec, self.compute_spec)

    def get_process_group(self) -> ProcessGroup:
        return self.process_group

    def get_tp_world_size(self) -> int:
        return self.process_group.tp_world_size()

    def get_dp_world_size(self) -> int:
        return self.process_group.dp_world_size()

    def has_compute_spec(self) -> bool:
        return self.compute_spec is not None

    def has_compute_pattern(self, compute_pattern: ComputePattern) -> bool:
        return self.compute_spec is not None and self.compute_spec.compute_pattern is compute_pattern

    def is_model_data(self) -> bool:
        """Whether this is a parameter and no activation."""
        return isinstance(self, torch.nn.Parameter)

    def is_replicate(self) -> bool:
        return not self.placement.sharded

    def is_sharded(self) -> bool:
        return not self.is_replicate()

    def is_shard_1drow(self) -> bool:
        """Cut along the first dim."""
        return self.placement.state(TP) == 0

    def is_shard_1dcol(self) -> bool:
        """Cut along the last dim."""
        return self.placement.state(TP) == self.ndim - 1

    def size_local(self, dim: int | None = None) -> Any:
        """The shape of this rank's piece, or its size along ``dim``."""
        return self.shape if dim is None else self.shape[dim]

    def size_global(self, dim: int | None = None) -> Any:
        """The shape of the whole tensor, or its size along ``dim``."""
        return self.full_shape if dim is None else self.full_shape[dim]

    @property
    def to_local(self) -> Callable[[], Tensor]:
        """Only a tensor that is cut has it: so code that is written for DTensor asks for the piece."""
        if cut_dim(self) is None:
            raise AttributeError("this ColoTensor is whole; only one that is cut has to_local")
        return partial(as_piece, self)

    def numel_global(self) -> int:
        return self.full_shape.numel()

    # changing it

    def set_process_group(self, pg: ProcessGroup) -> None:
        """Let the tensor lie on ``pg``, whole; one that is cut must be brought together first."""
        if not isinstance(pg, ProcessGroup):
            raise TypeError(f"set_process_group takes a ProcessGroup, got {type(pg).__name__} {pg!r}")
        if pg == self.process_group:
            return
        if cut_dim(self) is not None:
            raise ValueError(
                f"a tensor of shape {tuple(self.full_shape)} is cut on {self.process_group}"
                f" ({self.dist_spec}) and cannot go to {pg}; call to_replicate_() first, or"
                " redistribute(dist_spec, pg)"
            )
        describe(self, pg, cut_along(None, self.ndim), self.compute_spec)

    def set_dist_spec(self, dist_spec: DistSpec) -> None:
        """Change in place how the tensor lies among the tp ranks; every tp rank must call it.

        For a tensor with a history this is an operation with a gradient.  A leaf, such as a parameter, is
        simply stored in another way, its gradient too; make optimizers afterwards.  A view that is part of a
        history cannot change its shape; ``redistribute`` makes another tensor of it.
        """
        layout = layout_of(dist_spec, self.full_shape, self.process_group, whole=True)
        if layout == self.placement:
            return
        mesh = self.process_group.mesh
        with plain_torch():
            if self.is_leaf or not DistSpecManager.is_recording():
                if not self.is_leaf:
                    self.detach_()
                grad, self.grad = self.grad, None
                moved = move(self.data, self.placement, layout, mesh)
                # pieces along dim 0 are windows into the whole tensor, and would keep all of it in memory
                self.data = moved.clone() if moved.nbytes < moved.untyped_storage().nbytes() else moved
                self.grad = None if grad is None else move(grad, self.placement, layout, mesh)
            elif self._is_view():
                raise RuntimeError(
                    f"a tensor of shape {tuple(self.full_shape)} is a view of another one and cannot be"
                    f" converted to {dist_spec} in place; write t = t.redistribute(dist_spec)"
                )
            else:
                ConvertInPlace.apply(self, self.placement, layout, mesh)
        describe(self, self.process_group, layout, self.compute_spec)

    def set_tensor_spec(
        self, dist_spec: DistSpec | None = None, compute_spec: ComputeSpec | None = None
    ) -> None:
        """``set_dist_spec``, and how products with this tensor run; None keeps what the tensor has."""
        if compute_spec is not None and not isinstance(compute_spec, ComputeSpec):
            raise TypeError(f"set_tensor_spec takes a ComputeSpec or None, got {type(compute_spec).__name__}")
        if dist_spec is not None:
            self.set_dist_spec(dist_spec)
        if compute_spec is not None:
            self.compute_spec = compute_spec

    def redistribute(self, dist_spec: DistSpec, pg: ProcessGroup | None = None) -> ColoTensor:
        """A tensor with the same values that lies otherwise, with a gradient; ``pg`` may be another process
        group.
        """
        new = pg or self.process_group
        layout = layout_of(dist_spec, self.full_shape, new, whole=True)
        piece, here = as_piece(self), self.placement
        if new != self.process_group:
            piece = DistSpecManager.convert(piece, here, here.whole(), self.process_group.mesh)
            here = here.whole()
        piece = DistSpecManager.convert(piece, here, layout, new.mesh)
        return wrap(piece, new, layout, self.compute_spec, apart=True)

    def to_replicate(self) -> ColoTensor:
        """The whole tensor, on every tp rank."""
        return self.redistribute(ReplicaSpec())

    def to_replicate_(self) -> ColoTensor:
        """``to_replicate`` in place."""
        self.set_dist_spec(ReplicaSpec())
        return self

    # copies and files

    def __deepcopy__(self, memo: dict[int, Any]) -> ColoTensor:
        return cast(ColoTensor, deep_copy(self, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        whole = (
            f"size={tuple(self.full_shape)}, dist_spec={self.dist_spec}, process_group={self.process_group}"
        )
        used = "" if self.compute_spec is None else f", compute_spec={self.compute_spec}"
        return f"{type(self).__name__}({whole}{used},\n{as_piece(self)})"


def wrap(
    piece: Tensor,
    pg: ProcessGroup,
    layout: Layout,
    compute_spec: ComputeSpec | None = None,
    *,
    apart: bool = False,
) -> ColoTensor:
    """``piece``, an object that nothing else refers to, as a ColoTensor; a history goes on.

    A view stays a view, so that autograd sees what is written through it, unless it is set ``apart``: then it
    can be converted in place.
    """
    tensor: Any = piece
    with plain_torch():
        if type(piece) is Tensor and not (apart and piece._is_view()):
            tensor.__class__ = ColoTensor  # a copy of the object would cost more than many functions
        elif piece.grad_fn is not None and torch.is_grad_enabled():
            tensor = Wrap.apply(piece, ColoTensor)
        else:
            tensor = Tensor._make_subclass(ColoTensor, piece, piece.requires_grad)
    describe(tensor, pg, layout, compute_spec)
    return cast(ColoTensor, tensor)


def cut_dim(value: Any) -> int | None:
    """The dim along which ``value`` is cut into several pieces; None if it is whole or no ColoTensor."""
    return value.cut_dim if isinstance(value, ColoTensor) else None


def as_whole(value: Any) -> Any:
    """A tensor that is cut as a plain whole one, in state I; anything else as it is."""
    if cut_dim(value) is None:
        return value
    layout = value.placement
    return redistribute(as_piece(value), layout, layout.whole(), value.process_group.mesh)


def whole_result(value: Tensor, pg: ProcessGroup) -> ColoTensor:
    """The whole result of a function, plain or cut, as a ColoTensor."""
    if type(value) is Tensor:  # what ``wrap`` does, in less time: this comes after every function
        shape: torch.Size = value.shape
        result = cast(ColoTensor, value)
        result.__class__ = ColoTensor
        result.placement, result.full_shape = cut_along(None, len(shape)), shape
        result.process_group, result.compute_spec, result.cut_dim = pg, None, None
        return result
    return wrap(as_whole(value), pg, cut_along(None, value.ndim))


def check_may_gather(tensor: Any, func: Callable[..., Any]) -> None:
    """Refuse to let ``func`` communicate for a tensor that is cut, see [Note: who may gather]."""
    if not (DistSpecManager.may_gather or func in LAYERS):
        name = getattr(func, "__name__", str(func))
        raise RuntimeError(
            f"{name} needs the whole of a tensor of shape {tuple(tensor.full_shape)}, of which this rank"
            f" holds a piece ({tensor.dist_spec}), and gathering it would wait for the ranks"
            f" {tensor.process_group.tp_rank_list()}. Call t.to_replicate() on all of them, outside of any"
            " 'if rank == 0', and use what it returns; or look at the piece, t.data; or, if all ranks do the"
            " same, run them inside `with DistSpecManager.implicit_gathers():`"
        )


def gathered(value: Any, func: Callable[..., Any]) -> Any:
    """``as_whole`` for an argument of ``func``."""
    if cut_dim(value) is not None:
        check_may_gather(value, func)
    return as_whole(value)


def _layers() -> Iterator[Any]:
    products = ("matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "__matmul__")
    for name in (*(n for n in dir(torch.nn.functional) if not n.startswith("_")), *products):
        for owner in (torch.nn.functional, torch, Tensor):
            if callable(found := getattr(owner, name, None)):
                yield found


LAYERS = frozenset(_layers())
"""What the layers of a model call, see [Note: who may gather]: each under all of its names."""


def _group_of_wholes(args: Any, kwargs: Any) -> ProcessGroup | None:
    """The process group of the first ColoTensor, if all are whole and none is in a list: the usual case."""
    found = None
    for value in (*args, *kwargs.values()):
        if isinstance(value, ColoTensor):
            if value.cut_dim is not None or value.is_copy:
                return None
            found = found or value.process_group
        elif type(value) in (list, tuple, dict) and not all(type(inner) is int for inner in value):
            return None
    return found


def compute(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``func`` by the table of letters if a tensor is cut; of whole tensors it is the same on every rank."""
    group = _group_of_wholes(args, kwargs)
    if group is None:
        from colossalai.tensor.ops.dispatch import run  # which needs this module

        return run(func, args, kwargs)
    with plain_torch():
        result = func(*args, **kwargs)
    return _labelled(result, group, {id(value) for value in (*args, *kwargs.values())})


def on_wholes(
    func: Callable[..., Any], args: Any, kwargs: Any, asked: Callable[..., Any] | None = None
) -> Any:
    """``func`` of whole tensors: the same on every tp rank.

    ``asked`` is the function that a script has called, if ``func`` is a part of it.
    """
    asked = asked or func
    refuse_to_write_a_piece(func, _targets(func, args, kwargs))
    owners: list[ColoTensor] = []
    plain: set[int] = set()
    copies: set[int] = set()

    def arrange(value: Any) -> Any:
        if not isinstance(value, ColoTensor):
            plain.add(id(value))
            return value
        new = gathered(value, asked)
        if value.is_copy or new is not value:
            copies.add(_memory(new))
        owners.append(value)
        return new

    args, kwargs = map_values(arrange, args), map_values(arrange, kwargs)
    with plain_torch():
        result = func(*args, **kwargs)
    return _labelled(result, owners[0].process_group, plain, copies) if owners else result


def _labelled(result: Any, pg: ProcessGroup, given: set[int], copies: Collection[int] = ()) -> Any:
    """``result``, in which all plain tensors have become ColoTensors.

    Not those that were ``given``: a tensor that was written to stays the plain object that the script has.
    What lies in the memory of ``copies`` cannot be written to.
    """
    if type(result) is Tensor:
        if id(result) not in given:
            is_copy = bool(copies) and _memory(result) in copies
            whole_result(result, pg).is_copy = is_copy
    elif isinstance(result, ColoTensor):
        with plain_torch():
            turned = result.cut_dim is None and result.shape != result.full_shape
        if turned:  # t_()
            describe(result, result.process_group, cut_along(None, result.ndim), result.compute_spec)
    elif isinstance(result, (tuple, list)):  # also what ``max`` returns
        for inner in result:
            _labelled(inner, pg, given, copies)
    return result


def _targets(func: Callable[..., Any], args: Any, kwargs: Any) -> list[Any]:
    """What ``func`` writes to, by its name."""
    written = [*args[:1], kwargs.get("tensor")] if is_in_place(func) else []
    return [*written, kwargs.get("out")]


def refuse_to_write_a_piece(func: Callable[..., Any], targets: Iterable[Any]) -> None:
    """Whole tensors are gathered for ``func``, so what it writes would be lost."""
    for tensor in targets:
        if isinstance(tensor, ColoTensor) and tensor.cut_dim is not None:
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} writes into a tensor of shape {tuple(tensor.full_shape)}"
                f" of which this rank holds a piece ({tensor.dist_spec}); call to_replicate_() first, or"
                " write to its piece, .data"
            )


def _memory(tensor: Tensor) -> int:
    with plain_torch():
        return tensor.untyped_storage()._cdata


def refuse_lost_writes(func: Callable[..., Any], args: Any) -> None:
    """See [Note: views of tensors that are cut]."""
    targets = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
    if any(isinstance(t, ColoTensor) and t.is_copy for t in targets):
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} writes into a view of a tensor that is cut, which is a view"
            " of a gathered copy: the tensor itself would not change; write to its piece, t.data, or call"
            " t.to_replicate_() first"
        )


def map_values(function: Callable[[Any], Any], value: Any) -> Any:
    """``function`` of every value in nested lists, tuples and dicts."""
    if type(value) in (list, tuple):
        return type(value)(map_values(function, inner) for inner in value)
    if type(value) is dict:
        return {name: map_values(function, inner) for name, inner in value.items()}
    return function(value)


_IN_PLACE = re.compile(
    r"__(setitem|i(add|sub|mul|div|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift))__|.*[^_]_"
)


@lru_cache(maxsize=4096)
def is_in_place(func: Callable[..., Any]) -> bool:
    return bool(_IN_PLACE.fullmatch(getattr(func, "__name__", "")))


_ABOUT_MEMORY = frozenset(
    """__get__ __set__ __delete__ __hash__ dim ndimension numel nelement element_size is_contiguous
    is_floating_point is_complex is_signed is_inference is_pinned is_shared is_conj is_neg
    get_device stride storage storage_offset untyped_storage data_ptr register_hook
    register_post_accumulate_grad_hook retain_grad requires_grad_ detach_ share_memory_
    record_stream new_empty new_zeros new_ones new_full new_tensor zero_ fill_ is_same_size
    as_subclass _is_view _has_compatible_shallow_copy_type""".split()  # noqa: SIM905
)


_COMPUTED = frozenset(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag"))
"""Attributes that are results of functions."""


@lru_cache(maxsize=4096)
def is_about_memory(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__" and func in _COMPUTED:
        return False
    return name in _ABOUT_MEMORY or name.startswith(("_foreach_", "_fused_"))
