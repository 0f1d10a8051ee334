"""Functions of single elements: each rank computes its piece of the result.

Where several tensors meet, they are arranged along the cut of the first one that is cut: a piece of the same
cut stays, a whole tensor is cut, and a whole tensor that is broadcast along the cut moves from state I to R:
every rank uses it for its own elements, so its gradient is a sum over the ranks.

Optimizers keep plain tensors of the shape of the piece.  Next to a parameter that is cut, and without
gradients, such a tensor is a piece, and so is the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.mesh import shard, spread
from colossalai.mesh import split as cut
from colossalai.tensor.colo_tensor import ColoTensor, cut_dim, gathered, is_in_place, on_wholes, wrap
from colossalai.tensor.distspec import cut_along
from colossalai.tensor.op_wrapper import colo_op_impl
from colossalai.tensor.pieces import as_piece, plain_torch
from colossalai.tensor.process_group import TP

# with one tensor, which comes first; relu_ and the like follow from the names
_UNARY = """abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square
    reciprocal sin cos tan sinh cosh tanh asinh acosh atanh erf erfc erfinv sigmoid logsigmoid
    relu relu6 leaky_relu elu selu celu gelu silu mish softplus softsign tanhshrink hardtanh
    hardswish hardsigmoid hardshrink softshrink threshold sign floor ceil round trunc frac
    nan_to_num isnan isinf isfinite logical_not bitwise_not __invert__ __neg__ __pos__ __abs__
    contiguous clone detach to float double half bfloat16 int long bool type cpu cuda""".split()  # noqa: SIM905

# with several tensors, which are broadcast against each other
_BROADCAST = """add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow
    maximum minimum fmax fmin where masked_fill clamp clip clamp_min clamp_max lerp addcmul
    addcdiv eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or
    bitwise_xor atan2 hypot copysign xlogy __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__
    __div__ __rdiv__ __truediv__ __rtruediv__ __floordiv__ __rfloordiv__ __mod__ __pow__
    __rpow__ __and__ __or__ __xor__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __iadd__ __isub__
    __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__""".split()  # noqa: SIM905


def _unary(func: Callable[..., Any]) -> Callable[..., Any]:
    in_place = is_in_place(func)

    def implementation(*args: Any, **kwargs: Any) -> Any:
        if not args or cut_dim(args[0]) is None:
            return on_wholes(func, args, kwargs)
        x: ColoTensor = args[0]
        piece = x if in_place else as_piece(x)
        with plain_torch():
            result = func(piece, *args[1:], **kwargs)
        if result is piece or not isinstance(result, Tensor):  # x.contiguous(), x.type()
            return x if result is piece else result
        return wrap(result, x.process_group, x.placement, x.compute_spec)

    return implementation


def _broadcast(func: Callable[..., Any]) -> Callable[..., Any]:
    in_place = is_in_place(func)

    def implementation(*args: Any, **kwargs: Any) -> Any:
        lead = next((a for a in args if cut_dim(a) is not None), None)
        if lead is None or any(isinstance(value, Tensor) for value in kwargs.values()):
            return on_wholes(func, args, kwargs)
        if _is_update(lead, args):
            with plain_torch():
                return func(*args, **kwargs)
        if in_place and args[0] is not lead:
            return on_wholes(func, args, kwargs)
        arranged = [a if in_place and a is lead else arrange(a, lead, func) for a in args]
        with plain_torch():
            result = func(*arranged, **kwargs)
        if in_place:
            return lead
        layout = cut_along(result.ndim + _from_the_end(lead), result.ndim)
        return wrap(result, lead.process_group, layout)

    return implementation


def _is_update(lead: ColoTensor, args: tuple[Any, ...]) -> bool:
    """Whether this is an optimizer at work: a parameter next to plain tensors of its piece's shape, without
    gradients.
    """
    if torch.is_grad_enabled() or not lead.is_model_data():
        return False
    return any(
        isinstance(a, Tensor) and not isinstance(a, ColoTensor) and a.shape == lead.shape for a in args
    )


def _like(func: Callable[..., Any]) -> Callable[..., Any]:
    def implementation(input: Any, *args: Any, **kwargs: Any) -> Any:
        with plain_torch():
            result = func(input, *args, **kwargs)
        # what is made like a parameter is memory of its optimizer
        if not isinstance(input, ColoTensor) or input.is_model_data():
            return result
        return wrap(result, input.process_group, input.placement)

    return implementation


def _from_the_end(lead: ColoTensor) -> int:
    """The cut of ``lead`` as a negative dim: broadcasting aligns the last dims."""
    dim = cut_dim(lead)
    assert dim is not None
    return dim - lead.ndim


def arrange(value: Any, lead: ColoTensor, func: Callable[..., Any]) -> Any:
    """What ``value``, an argument of ``func``, is next to this rank's piece of ``lead``."""
    if not isinstance(value, Tensor):
        return value
    pg, right = lead.process_group, _from_the_end(lead)
    if cut_dim(value) is not None:
        assert isinstance(value, ColoTensor)
        if value.process_group != pg:
            raise ValueError(
                f"one operand lies on {lead.process_group}, another on {value.process_group}; bring one to"
                " the other's process group with redistribute(dist_spec, pg)"
            )
        if _from_the_end(value) == right:
            return as_piece(value)
        value = gathered(value, func)
    value = as_piece(value)
    size = value.size(right) if value.ndim >= -right else 1
    if size == 1:
        return spread(value, TP, pg.mesh) if value.requires_grad else value
    if size == lead.size_global(right):
        return cut(value, TP, pg.mesh, right)
    raise ValueError(
        f"an operand of shape {tuple(value.shape)} does not fit a tensor of shape {tuple(lead.full_shape)},"
        f" which is cut as {lead.dist_spec}: plain tensors count as whole; make a piece known with"
        " ColoTensor.from_torch_tensor(piece, spec)"
    )


def _register(names: list[str], make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    for name in names:
        for owner in (torch, Tensor, torch.nn.functional):
            for func in (getattr(owner, name, None), getattr(owner, f"{name}_", None)):
                if callable(func):
                    colo_op_impl(func)(make(func))


_register(_UNARY, _unary)
_register(_BROADCAST, _broadcast)
_register(["zeros_like", "ones_like", "empty_like", "full_like"], _like)


@colo_op_impl(Tensor.copy_)
def _(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """A whole tensor fills all pieces; a plain tensor of the piece's shape fills the piece."""
    if cut_dim(self) is not None:
        assert isinstance(self, ColoTensor)
        if isinstance(src, ColoTensor) or src.shape == self.full_shape:
            src = arrange(src, self, Tensor.copy_)
    else:
        src = gathered(src, Tensor.copy_)
    with plain_torch():
        return Tensor.copy_(self, src, non_blocking)


# Random numbers for tensors that are cut: those of the whole tensor, of which each rank keeps its piece.
#
# So the values do not depend on the number of ranks, and the generators of the tp ranks, which must agree
# for whole tensors, stay in step. The price is that every rank draws numbers for the whole tensor.


def _fill(func: Callable[..., Any]) -> Callable[..., Any]:
    """For functions that give their first argument, or the one called ``tensor``, new values that depend on
    its size.
    """

    def implementation(*args: Any, **kwargs: Any) -> Any:
        target = args[0] if args else kwargs.get("tensor")
        if cut_dim(target) is None:
            return on_wholes(func, args, kwargs)
        assert isinstance(target, ColoTensor)
        whole = torch.empty(target.full_shape, dtype=target.dtype, device=target.device)
        if args:
            func(whole, *args[1:], **kwargs)
        else:
            func(**{**kwargs, "tensor": whole})
        with plain_torch():
            target.copy_(shard(whole, target.placement, target.process_group.mesh))
        return target

    return implementation


for _name in [
    "normal_",
    "uniform_",
    "bernoulli_",
    "exponential_",
    "log_normal_",
    "cauchy_",
    "geometric_",
    "random_",
]:
    colo_op_impl(getattr(Tensor, _name))(_fill(getattr(Tensor, _name)))

for _name in dir(nn.init):
    if _name.endswith("_") and not _name.startswith("_"):
        colo_op_impl(getattr(nn.init, _name))(_fill(getattr(nn.init, _name)))


@colo_op_impl(nn.functional.dropout)
def _(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if cut_dim(input) is None:
        return on_wholes(nn.functional.dropout, (input, p, training, inplace), {})
    assert isinstance(input, ColoTensor)
    if not training:
        return input
    ones = torch.ones(input.full_shape, dtype=input.dtype, device=input.device)
    mask = shard(nn.functional.dropout(ones, p), input.placement, input.process_group.mesh)
    piece = as_piece(input)
    return wrap(piece.mul_(mask) if inplace else piece * mask, input.process_group, input.placement)


@colo_op_impl(Tensor.__format__)
def _(self: Tensor, format_spec: str) -> str:
    """``f"{loss:.3f}"``: torch formats numbers of its own class only."""
    return object.__format__(self, format_spec) if self.ndim else format(as_piece(self), format_spec)
