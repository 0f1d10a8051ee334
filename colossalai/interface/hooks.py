"""Hooks that scripts register on parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from colossalai.logging import get_dist_logger
from colossalai.mesh.parameter import own_grad


def tell_of_local_hooks(optimizer: Optimizer, params: Iterable[Tensor], who: str) -> None:
    """In the first step of ``optimizer``, warn of hooks that have changed the gradients of ``params`` before
    ``who`` averaged them.

    A hook that scales gradients has the same effect before and after; one that clamps or normalizes them has
    not.
    """
    optimizer.register_step_pre_hook(_Tell([weakref.ref(p) for p in params], who))


def arrived_gradient(p: Tensor) -> Tensor | None:
    """The gradient of ``p``, for a hook that autograd calls when it has added one to ``p.grad``; None if it
    has not.

    autograd calls these hooks without a gradient, too: behind a custom function that has returned None, or an
    output of the model that has no part in the loss.  But if a hook of the script is there, it may have taken
    the gradient away.
    """
    grad = own_grad(p)
    if grad is None and any(
        map(_is_foreign, (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values())
    ):
        raise used_up(p)
    return grad


def used_up(p: Tensor) -> RuntimeError:
    return RuntimeError(
        f"a hook of a parameter of shape {tuple(p.shape)} has used up its gradient in the backward pass,"
        " before it was averaged over the replicas, which would drift apart; step and clear gradients after"
        " the backward pass, not in it"
    )


class _Tell:
    """Looks for hooks, once."""

    def __init__(self, params: list[weakref.ref[Tensor]], who: str) -> None:
        self._params: list[weakref.ref[Tensor]] | None = params
        self._who = who

    def __call__(self, *_: Any) -> None:
        params, self._params = self._params, None
        if params is not None:
            _tell([p for ref in params if (p := ref()) is not None], self._who)

    def __reduce__(self) -> Any:
        return _Tell, ([], self._who)  # with a copy of the optimizer


def _tell(params: list[Tensor], who: str) -> None:
    hooked = [p for p in params if any(map(_is_foreign, _hooks(p)))]
    if hooked:
        get_dist_logger().warning(
            f"{len(hooked)} parameters have hooks (the first has shape {tuple(hooked[0].shape)}), which see"
            f" the gradients of this rank's part of the batch, before {who} averages them over the ranks: a"
            " hook that only scales gradients is right, one that clamps or normalizes them does not do what"
            " it does on one device. Change gradients after the backward pass instead"
            " (optimizer.clip_grad_by_value, clip_grad_by_norm)",
            ranks=[0],
        )


def _hooks(p: Tensor) -> list[Callable[..., Any]]:
    found: list[Any] = [p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None)]
    return [hook for hooks in found if hooks for hook in hooks.values()]


def _is_foreign(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return not module.startswith("colossalai.")
