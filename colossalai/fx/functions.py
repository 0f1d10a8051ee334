"""Code with a backward pass of its own: ``torch.autograd.Function``, and hooks on gradients.

A graph of operations has the gradients that autograd gives them, which knows nothing of such code.  So a
function becomes one node, which calls it; and a module is a leaf if it has hooks on gradients, or if its code
puts a hook on a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.utils._pytree import (
    GetAttrKey,
    MappingKey,
    SequenceKey,
    tree_flatten_with_path,
    tree_map_only,
)


class OwnBackward(RuntimeError):
    """Code was met whose gradients a graph of operations would not have."""


class AsksForGradients(OwnBackward):
    """Code was met that asks for gradients itself; those of tensors of other modules may be among them."""


def has_gradient_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks that see or change its gradients."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


@contextmanager
def own_gradients(*, as_nodes: bool) -> Iterator[None]:
    """While torch records in the block, autograd functions become nodes, or are refused if not ``as_nodes``;
    hooks on tensors, and calls of ``torch.autograd.grad``, are refused.
    """

    def apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
        mode: Any = get_proxy_mode()
        plain: Any = super(_SingleLevelFunction, function).apply  # type: ignore[misc]
        if mode is None:
            return plain(*args, **kwargs)
        if not as_nodes:
            raise OwnBackward(f"{function.__name__} has a backward pass of its own")
        return record_call(mode.tracer, as_operation(function), args, kwargs, lambda: plain(*args, **kwargs))

    def register_hook(tensor: Tensor, hook: Any) -> Any:
        if get_proxy_mode() is not None:
            raise OwnBackward("it puts a hook on the gradient of a tensor")
        return before(tensor, hook)

    def run_backward(*args: Any, **options: Any) -> Any:
        if get_proxy_mode() is not None:
            raise AsksForGradients("its code asks for gradients (torch.autograd.grad)")
        return run_before(*args, **options)

    # below Function.apply, which code may have kept under another name
    base: Any = _SingleLevelFunction
    before: Any = Tensor.register_hook
    autograd: Any = torch.autograd
    run_before = autograd._engine_run_backward  # what grad and backward call
    base.apply = classmethod(apply)
    Tensor.register_hook = register_hook  # type: ignore[method-assign]
    autograd._engine_run_backward = run_backward
    try:
        yield
    finally:
        del base.apply
        Tensor.register_hook = before  # type: ignore[method-assign]
        autograd._engine_run_backward = run_before


@cache
def as_operation(function: type[Function]) -> Callable[..., Any]:
    """``function.apply`` as a node can call it, under the name of the function."""

    def operation(*args: Any, **kwargs: Any) -> Any:
        return function.apply(*args, **kwargs)

    operation.__name__ = operation.__qualname__ = function.__name__
    operation.__module__ = function.__module__
    return operation


def record_call(
    tracer: Any, target: Callable[..., Any], args: Any, kwargs: Any, run: Callable[[], Any]
) -> Any:
    """Let ``tracer`` record a call of ``target`` as one node, whatever else happens in ``run``, which gives
    its result.
    """

    def proxy(tensor: Tensor) -> Any:
        slot = get_proxy_slot(tensor, tracer, None)
        return tensor if slot is None else slot.proxy

    taken = tree_map_only(Tensor, proxy, (tuple(args), dict(kwargs)))
    called = tracer.create_proxy("call_function", target, *taken)
    with disable_proxy_modes_tracing():
        result = run()
    called.node.meta["val"] = result
    for keys, tensor in tree_flatten_with_path(result)[0]:
        if isinstance(tensor, Tensor):
            part = called
            for key in keys:
                part = _part(part, key)
            track_tensor_tree(tensor, part, constant=None, tracer=tracer)
    return result


def _part(proxy: Any, key: Any) -> Any:
    if isinstance(key, SequenceKey):
        return proxy[key.idx]
    if isinstance(key, MappingKey):
        return proxy[key.key]
    if isinstance(key, GetAttrKey):
        return getattr(proxy, key.name)
    raise TypeError(f"an output that is found by {key!r} is no list, dict or object with attributes")
