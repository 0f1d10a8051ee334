"""Tensors whose values are elsewhere: they tell their form, and refuse to be read or written.

Under ZeRO and Gemini a weight or a gradient of a model may lie on other ranks, on another device or on a
disk.  A tensor that is asked for its values then must not show what happens to be in memory.  Its class says
so: ``away_class(native)`` is a subclass of its own class that raises for every operation but questions about
its form (shape, dtype, device, hooks).  When the values are there, the tensor gets its own class back, so
that computing with it costs nothing.

[Note: gradients that are elsewhere] After a backward pass ``p.grad`` holds what this rank has computed
(ZeRO-1), or nothing (ZeRO-2, Gemini); the true gradient is the mean over all ranks, of which each keeps a
piece.  So the parameters that such a plan trains get a class whose attribute ``grad`` asks the plan: None
while there is no gradient, otherwise a tensor of the right form that refuses to be read.  Autograd does not
ask Python for ``grad``, and our own code uses ``own_grad``.  Setting it to None for all parameters, as
``zero_grad`` of a module does, clears the plan's gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from colossalai.mesh import own_grad, set_own_grad
from colossalai.mesh._compat import plain_torch

# The attribute of a tensor that holds the words after "cannot ...: ".
REASON = "_colo_reason"

# By name, as they differ a little between versions of torch.
_QUESTIONS = """
    dtype device layout shape ndim requires_grad is_leaf grad grad_fn _base _version grad_dtype names
    itemsize nbytes output_nr retains_grad is_cpu is_cuda is_meta is_sparse is_sparse_csr is_nested
    is_quantized is_mps is_xpu is_xla is_mkldnn is_ipu is_mtia is_maia is_vulkan _backward_hooks
    _post_accumulate_grad_hooks
"""
_SETTINGS = "requires_grad grad _backward_hooks _post_accumulate_grad_hooks"
_METHODS = """
    size numel nelement dim ndimension stride storage_offset element_size data_ptr untyped_storage is_conj
    is_neg _is_zerotensor is_floating_point is_complex is_signed is_contiguous get_device register_hook
    register_post_accumulate_grad_hook requires_grad_ retain_grad __len__ __hash__ is_inference is_pinned
    is_shared is_same_size has_names dim_order _is_view new_empty new_zeros new_ones new_full new_tensor
"""
_FUNCTIONS = """
    numel is_floating_point is_complex is_same_size is_inference empty_like zeros_like ones_like full_like
    rand_like randn_like randint_like
"""


def _allowed() -> frozenset[Callable[..., Any]]:
    """The functions that need no values."""
    found: list[Any] = [getattr(Tensor, n).__get__ for n in _QUESTIONS.split() if hasattr(Tensor, n)]
    found += [getattr(Tensor, n).__set__ for n in _SETTINGS.split()]
    found += [getattr(Tensor, n) for n in _METHODS.split() if hasattr(Tensor, n)]
    return frozenset([*found, *(getattr(torch, name) for name in _FUNCTIONS.split())])


ALLOWED = _allowed()


class Away:
    """What a tensor does while its values are elsewhere."""

    def __hash__(self) -> int:  # as torch's own, without its long way: dicts of parameters ask often
        return id(self)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in ALLOWED:
            with plain_torch():
                return func(*args, **kwargs)
        raise _refusal(next(_absent((args, kwargs))), f"{_name(func)} needs")

    def __repr__(self, *_: Any, **__: Any) -> str:
        shape = tuple(self.shape)  # type: ignore[attr-defined]
        return f"<{type(self).__name__} of shape {shape} whose values are elsewhere>"

    __format__ = __repr__

    def as_subclass(self, cls: type) -> Any:
        raise _refusal(self, "as_subclass needs")

    def __deepcopy__(self, memo: Any) -> Any:
        raise _refusal(self, "a copy needs")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal(self, "pickling needs")


def _absent(values: Any) -> Iterator[Any]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Away))


def _name(func: Any) -> str:
    if getattr(func, "__name__", "") in ("__get__", "__set__"):  # of an attribute
        return f".{func.__self__.__name__}"
    return getattr(func, "__name__", str(func))


def _refusal(tensor: Any, who: str) -> RuntimeError:
    return RuntimeError(f"{who} {getattr(tensor, REASON, 'a tensor whose values are elsewhere')}")


def away_class(native: type) -> type:
    """A subclass of ``native`` for tensors whose values are elsewhere."""
    return _named(native, (Away, native), {})


def _named(native: type, bases: tuple[type, ...], body: dict[str, Any]) -> type:
    """A class that goes by the name of ``native``, in messages."""
    names = {"__module__": native.__module__, "__qualname__": native.__qualname__, "__doc__": native.__doc__}
    return type(native.__name__, bases, {**names, **body})


# Gradients


class Keeper(Protocol):
    """A plan that keeps the gradients of parameters."""

    def keeps_gradient(self, param: Tensor) -> bool:
        """Whether there is a gradient of ``param``."""

    def shown_gradient(self, param: Tensor) -> Tensor | None:
        """The gradient of ``param``, if the script may read it and write to it."""

    def why_no_gradient(self, param: Tensor) -> str:
        """Where the gradient of ``param`` is, and what to do."""

    def zero_grad(self) -> None: ...


class KeptGradients:
    """What scripts see in ``grad`` of the ``params`` of a plan, see the note.

    It is known to them by a weak reference: when the plan is gone, they are ordinary parameters again.
    """

    def __init__(self, keeper: Keeper, params: Iterable[Tensor]) -> None:
        self._keeper = weakref.ref(keeper)
        self._params = {id(p): p for p in params}
        self._left: set[int] | None = None  # of a script that sets ``grad`` to None: those still to come
        self._classes: dict[type, type] = {}

    def guard(self) -> None:
        """Give all parameters their class."""
        for param in self._params.values():
            param.__class__ = self.class_of(type(param))

    def class_of(self, native: type) -> type:
        """The subclass of ``native`` whose ``grad`` asks the plan."""
        if native not in self._classes:
            self._classes[native] = _kept(native, weakref.ref(self))
        return self._classes[native]

    def get(self, param: Tensor) -> Tensor | None:
        keeper = self._keeper()
        if keeper is None or id(param) not in self._params:  # of the same class, made like another
            return own_grad(param)
        if not keeper.keeps_gradient(param) or (self._left is not None and id(param) not in self._left):
            return None
        shown = keeper.shown_gradient(param)
        return shown if shown is not None else _stand_in(param, keeper.why_no_gradient(param))

    def set(self, param: Tensor, grad: Tensor | None) -> None:
        keeper = self._keeper()
        if keeper is None or id(param) not in self._params:
            set_own_grad(param, grad)
            return
        if grad is not None:
            if keeper.keeps_gradient(param) and grad is keeper.shown_gradient(param):
                return  # ``p.grad *= 2`` and the like have written to it
            raise RuntimeError(f"setting p.grad needs {keeper.why_no_gradient(param)}")
        if self._left is None:
            self._left = {key for key, p in self._params.items() if keeper.keeps_gradient(p)}
        self._left.discard(id(param))
        if not self._left:
            self._left = None
            keeper.zero_grad()

    def forget(self) -> None:
        """All gradients have been cleared."""
        self._left = None

    def check(self) -> None:
        """Refuse to go on if a script has cleared some gradients and not others."""
        if self._left:
            raise RuntimeError(
                f"p.grad was set to None for some parameters, but {len(self._left)} others have gradients"
                " from before; this plan keeps gradients of many parameters together, so clear all of them:"
                " optimizer.zero_grad()"
            )


class PieceGradients:
    """What scripts see in ``grad`` of the pieces that an optimizer steps in the place of parameters.

    They get their gradients in the step, or when they are clipped; None before
    would mean that there are none.
    """

    def __init__(self, keeper: Keeper, kept: KeptGradients, params: Mapping[Tensor, Tensor]) -> None:
        self._keeper, self._kept = weakref.ref(keeper), kept
        self._params = {id(value): param for value, param in params.items()}
        weak, kinds = weakref.ref(self), {type(value) for value in params}
        guarded = {kind: _kept(kind, weak) for kind in kinds}
        self._classes = [(value, type(value), guarded[type(value)]) for value in params]
        self.close()

    def open(self) -> None:
        """The plan is at work, and gives pieces their gradients: what they have is what they show."""
        for value, native, _ in self._classes:
            value.__class__ = native

    def close(self) -> None:
        """Pieces without a gradient ask the plan from now on."""
        for value, _, guarded in self._classes:
            value.__class__ = guarded

    def get(self, value: Tensor) -> Tensor | None:
        own, keeper = own_grad(value), self._keeper()
        if own is not None or keeper is None:
            return own
        param = self._params.get(id(value))
        if param is None or not keeper.keeps_gradient(param):
            return None
        return _stand_in(value, keeper.why_no_gradient(param))

    def set(self, value: Tensor, grad: Tensor | None) -> None:
        keeper, param = self._keeper(), self._params.get(id(value))
        if grad is not None or keeper is None or param is None:
            pass
        elif keeper.keeps_gradient(param):
            self._kept.set(param, None)  # ``zero_grad`` of the optimizer inside
        set_own_grad(value, grad)


def why_no_gradient(what: str, who: str) -> str:
    """What is said of the gradient of ``what`` that the plan ``who`` keeps."""
    return (
        f"the gradient of {what}, which {who} averages over the ranks and keeps in pieces: p.grad is not"
        " there, or not the average. Clip by torch.nn.utils.clip_grad_norm_(model.parameters(), ...),"
        " optimizer.clip_grad_by_norm or the plugin's max_norm, and clear by optimizer.zero_grad(). To work"
        " on gradients by hand use TorchDDPPlugin, which leaves the average in p.grad"
    )


def _kept(native: type, weak: weakref.ref[KeptGradients] | weakref.ref[PieceGradients]) -> type:
    def get(self: Tensor) -> Tensor | None:
        kept = weak()
        return own_grad(self) if kept is None else kept.get(self)

    def put(self: Tensor, grad: Tensor | None) -> None:
        kept = weak()
        set_own_grad(self, grad) if kept is None else kept.set(self, grad)

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = native.__deepcopy__(self, memo)  # type: ignore[attr-defined]
            copied.__class__ = native  # no plan keeps its gradient
            memo[id(self)] = copied
        return memo[id(self)]

    body = {"grad": property(get, put, lambda self: put(self, None)), "__deepcopy__": deepcopy}
    return _named(native, (native,), body)


@cache
def _away_tensor() -> type:
    return away_class(Tensor)


def _stand_in(param: Tensor, reason: str) -> Tensor:
    """A tensor like the gradient of ``param`` that refuses to be read."""
    blank = torch.full((), float("nan"), dtype=param.dtype, device=param.device).expand(tuple(param.shape))
    found: Tensor = blank.as_subclass(_away_tensor())
    setattr(found, REASON, reason)
    return found
