"""Hooks around every operation that uses ColoParameters, in the forward and in the backward pass.

The parameters and the other tensors of an operation pass through an identity before it, and its results
through another one after it.  In the backward pass the second identity runs first, when the gradients of the
results are known, and the first one when the operation has computed all gradients of its arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from colossalai.tensor.colo_tensor import ColoTensor, map_values, wrap
from colossalai.tensor.pieces import as_piece, plain_torch


class ColoParamOpHook(ABC):
    """A hook around an operation; ``params`` are the ColoParameters among its arguments."""

    @abstractmethod
    def pre_forward(self, params: list[Tensor]) -> None: ...

    @abstractmethod
    def post_forward(self, params: list[Tensor]) -> None: ...

    @abstractmethod
    def pre_backward(self, params: list[Tensor]) -> None: ...

    @abstractmethod
    def post_backward(self, params: list[Tensor]) -> None:
        """The gradients of ``params`` are computed, and about to be added to ``param.grad``."""


class ColoParamOpHookManager:
    """The hooks in use.  Backward passes call the hooks that were in use in their forward pass."""

    hooks: ClassVar[tuple[ColoParamOpHook, ...]] = ()

    @classmethod
    @contextmanager
    def use_hooks(cls, *hooks: ColoParamOpHook) -> Iterator[None]:
        """Call ``hooks``, in this order, around the operations of the block, instead of those in use
        outside.
        """
        for hook in hooks:
            if not isinstance(hook, ColoParamOpHook):
                raise TypeError(
                    f"use_hooks takes objects of class ColoParamOpHook, got {type(hook).__name__}"
                )
        before, cls.hooks = cls.hooks, hooks
        try:
            yield
        finally:
            cls.hooks = before


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, in_backward: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.in_backward = in_backward
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.in_backward()
        return None, *grads


def run_with_hooks(run: Callable[..., Any], params: list[Tensor], args: Any, kwargs: Any) -> Any:
    """``run(args, kwargs)`` between the hooks in use."""
    hooks = ColoParamOpHookManager.hooks

    def all_hooks(name: str) -> Callable[[], None]:
        def call() -> None:
            for hook in hooks:
                getattr(hook, name)(params)

        return call

    all_hooks("pre_forward")()
    args, kwargs = _through_identity(all_hooks("post_backward"), (args, kwargs))
    result = run(args, kwargs)
    all_hooks("post_forward")()
    return _through_identity(all_hooks("pre_backward"), result)


def _through_identity(in_backward: Callable[[], None], values: Any) -> Any:
    """``values`` with an identity behind every tensor in it that has a gradient."""
    found: dict[int, Tensor] = {}

    def collect(value: Any) -> Any:
        if isinstance(value, Tensor) and value.requires_grad:
            found[id(value)] = value
        return value

    map_values(collect, values)
    if not found or not torch.is_grad_enabled():
        return values
    with plain_torch():
        passed = _Identity.apply(in_backward, *(as_piece(t) for t in found.values()))
    new = {key: _like(t, old) for t, (key, old) in zip(passed, found.items(), strict=True)}
    return map_values(lambda value: new.get(id(value), value), values)


def _like(tensor: Tensor, old: Tensor) -> Tensor:
    if not isinstance(old, ColoTensor):
        return tensor
    tensor = wrap(tensor, old.process_group, old.placement, old.compute_spec, apart=True)
    if old.is_model_data():
        tensor._is_param = True  # it still stands for the parameter
    return tensor
