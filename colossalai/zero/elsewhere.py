"""Tensors whose values are elsewhere: they tell their form, and refuse to be read or written.

Under ZeRO and Gemini a weight or a gradient of a model may lie on other ranks, on another device or on a disk.  A tensor that is asked for
its values then must not show what happens to be in memory.  Its class says so: ``away(native)`` is a subclass of its own
class that raises for every operation but questions about its form (shape, dtype, device, hooks).  When the values are there, the
tensor gets its own class back, so that computing with it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from colossalai.mesh._compat import plain_torch

# The attribute of a tensor that holds the words after "cannot ...: ".
REASON = "_colo_reason"

# By name, as they differ a little between versions of torch.
_QUESTIONS = """
    dtype device layout shape ndim requires_grad is_leaf grad grad_fn _version names itemsize nbytes output_nr retains_grad
    is_cpu is_cuda is_meta is_sparse is_sparse_csr is_nested is_quantized is_mps is_xpu is_xla is_mkldnn is_ipu is_mtia is_maia
    is_vulkan _backward_hooks _post_accumulate_grad_hooks
"""
_SETTINGS = "requires_grad grad _backward_hooks _post_accumulate_grad_hooks"
_METHODS = """
    size numel nelement dim ndimension stride storage_offset element_size data_ptr is_floating_point is_complex is_signed
    is_contiguous get_device register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad __len__ __hash__
    is_inference is_pinned is_shared is_same_size has_names dim_order _is_view new_empty new_zeros new_ones new_full new_tensor
"""
_FUNCTIONS = """
    numel is_floating_point is_complex is_same_size is_inference empty_like zeros_like ones_like full_like rand_like randn_like
    randint_like
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
        return f"<{type(self).__name__} of shape {tuple(self.shape)} whose values are elsewhere>"  # type: ignore[attr-defined]

    __format__ = __repr__

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


@cache
def away(native: type) -> type:
    """The subclass of ``native`` of a tensor whose values are elsewhere."""
    names = {"__module__": native.__module__, "__qualname__": native.__qualname__, "__doc__": native.__doc__}
    return type(native.__name__, (Away, native), names)
