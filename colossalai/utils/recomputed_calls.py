"""Several calls of a forward pass that are computed again together in the backward pass.

``checkpoint`` recomputes one function.  Here the calls are those that a model's own code makes, with whatever
it does between them; of all of them only what came from outside is kept.  In the second run a call gets the
outputs that the calls before it give then.  What the model itself computed between two calls comes from
outside, too: so it need not be known what that is, and the second run is right whatever it is.

Calls may contain checkpoints and others of these: what an inner one keeps, it keeps by ``save_for_backward``,
and the outer one sees that and computes it again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from colossalai.utils.activation_checkpoint import SameRandomNumbers, as_it_is, may_change


class RecomputedCalls:
    """``run`` calls a function and keeps nothing of what it computes; the first backward pass that needs it
    runs all functions again that have been run until then.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._outputs: list[_Output] = []
        self._packed: list[weakref.ref[_Packed]] = []

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)``."""
        leaves, spec = tree_flatten((tuple(args), kwargs))
        known = [self._place_of(leaf) for leaf in leaves]
        outside = [
            leaf
            for leaf, place in zip(leaves, known, strict=True)
            if place is None and isinstance(leaf, Tensor)
        ]
        kept = _kept(outside)
        again = SameRandomNumbers(function)
        given = [
            place if place is not None else _OUTSIDE if isinstance(leaf, Tensor) else _kept_as_it_is(leaf)
            for leaf, place in zip(leaves, known, strict=True)
        ]
        needs_grad = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        autocasts = _autocasts()
        with saved_tensors_hooks(self._pack, self._unpack):
            result = again(*args, **kwargs)
        number = len(self._calls)
        self._calls.append(_Call(again, given, needs_grad, spec, kept, autocasts))
        self._outputs += [
            _Output(weakref.ref(leaf), leaf._version, _Place(number, place))
            for place, leaf in enumerate(tree_leaves(result))
            if isinstance(leaf, Tensor)
        ]
        return result

    def _place_of(self, leaf: Any) -> _Place | None:
        """Which output of the calls so far this is, if it is as it was then."""
        if isinstance(leaf, Tensor):
            for output in self._outputs:
                if output.tensor() is leaf and output.version == leaf._version:
                    return output.place
        return None

    def _pack(self, tensor: Tensor) -> _Packed:
        packed = _Packed(tensor.shape, tensor.dtype)
        self._packed.append(weakref.ref(packed))
        return packed

    def _unpack(self, packed: _Packed) -> Tensor:
        if packed.tensor is None:
            self._compute_again()
        if packed.tensor is None:
            raise RuntimeError(
                "blocks that are computed again together kept fewer tensors the second time than the first; a"
                " block must take the same way both times"
            )
        return packed.tensor

    def _compute_again(self) -> None:
        last_use = {
            place.call: number
            for number, call in enumerate(self._calls)
            for place in call.given
            if isinstance(place, _Place)
        }
        found: dict[int, list[Any]] = {}
        try:
            with torch.enable_grad(), saved_tensors_hooks(_Refill(self._packed), _refuse):
                for number, call in enumerate(self._calls):
                    found[number] = tree_leaves(call.again_with(found))
                    found = {n: leaves for n, leaves in found.items() if last_use.get(n, -1) > number}
        except _EnoughError:
            pass


class _Place(NamedTuple):
    """A leaf of the output of a call."""

    call: int
    leaf: int


class _Output(NamedTuple):
    tensor: weakref.ref[Tensor]
    version: int
    place: _Place


_OUTSIDE = object()
"""A tensor that was there before the calls, or was made between them."""


class _Call(NamedTuple):
    """A call, with what it needs for its second run."""

    function: Callable[..., Any]
    given: list[Any]
    needs_grad: list[bool]
    spec: Any
    kept: Tensor | None
    autocasts: list[dict[str, Any]]

    def again_with(self, found: dict[int, list[Any]]) -> Any:
        node: Any = None if self.kept is None else self.kept.grad_fn
        outside = iter(() if node is None else node.saved_tensors)
        leaves = []
        for place, needs_grad in zip(self.given, self.needs_grad, strict=True):
            leaf = next(outside) if place is _OUTSIDE else place
            if isinstance(leaf, _Place):
                leaf = found[leaf.call][leaf.leaf]  # itself, which calls inside of this one may look for
            elif isinstance(leaf, _Structure):
                leaf = as_it_is(leaf.value)
            elif isinstance(leaf, Tensor) and not isinstance(leaf, torch.nn.Parameter):
                leaf = leaf.detach().requires_grad_(needs_grad)
                leaf = leaf.view_as(leaf) if needs_grad else leaf  # no leaf, which may not be written to
            leaves.append(leaf)
        args, kwargs = tree_unflatten(leaves, self.spec)
        with ExitStack() as stack:
            for options, now in zip(self.autocasts, _autocasts(), strict=True):
                if options != now:  # in a played step a block for the GPU would set the state of the CPU
                    stack.enter_context(torch.autocast(**options))
            return self.function(*args, **kwargs)


class _Structure(NamedTuple):
    """An object with tensors, as it was in the first run."""

    value: Any


def _kept_as_it_is(leaf: Any) -> Any:
    return _Structure(as_it_is(leaf)) if may_change(leaf) else leaf


class _Packed:
    """Stands for a tensor that autograd asked to keep."""

    __slots__ = ("__weakref__", "dtype", "shape", "tensor")

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.tensor: Tensor | None = None


class _EnoughError(Exception):
    """All that was packed is there; the rest of the second run is not needed."""


class _Refill:
    """Gives what is packed in the second run to what was packed at the same place in the first."""

    def __init__(self, packed: list[weakref.ref[_Packed]]) -> None:
        self._packed, self._next = packed, 0

    def __call__(self, tensor: Tensor) -> None:
        place, self._next = self._next, self._next + 1
        if place >= len(self._packed):
            raise RuntimeError(
                "blocks that are computed again together kept more tensors the second time than the first; a"
                " block must take the same way both times"
            )
        packed = self._packed[place]()
        if packed is not None:  # autograd still needs it
            if (packed.shape, packed.dtype) != (tensor.shape, tensor.dtype):
                raise RuntimeError(
                    f"blocks that are computed again together kept a tensor {tuple(tensor.shape)}"
                    f" {tensor.dtype} where the first run kept {tuple(packed.shape)} {packed.dtype}; a block"
                    " must take the same way both times"
                )
            packed.tensor = tensor if tensor.is_leaf else tensor.detach()
        if self._next == len(self._packed):
            raise _EnoughError


def _refuse(_: None) -> Tensor:
    raise RuntimeError("a block that is computed again computes gradients in its forward pass")


class _Keep(torch.autograd.Function):
    """Keeps tensors as autograd does: seen by the hooks around it, and by the check of versions."""

    @staticmethod
    def forward(ctx: Any, hook: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return hook.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("this is never differentiated")


def _kept(tensors: list[Tensor]) -> Tensor | None:
    """A tensor whose node keeps ``tensors``.

    Only a tensor keeps its node alive: the Python object of a node outlives what the node has saved.
    """
    found: Tensor | None = None
    if tensors:
        found = _Keep.apply(torch.empty(0, requires_grad=True), *tensors)
    return found


def _autocasts() -> list[dict[str, Any]]:
    """The state of autocast on the CPU and on the accelerator.

    A call may get all of its tensors from calls before it, so its arguments do not say where it computes.
    """
    accelerator = torch.accelerator.current_accelerator()
    return [
        {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for kind in ["cpu", *([] if accelerator is None else [accelerator.type])]
        if torch.amp.is_autocast_available(kind)
    ]
