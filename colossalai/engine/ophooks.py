"""Hooks on the operators of a model: they see every layer before and after its forward and backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class BaseOpHook:
    """Override what you need; the engine calls it for every module that has parameters or buffers of its
    own.
    """

    def pre_fwd_exec(self, module: nn.Module, *args: Any) -> None:
        """Before the forward pass of ``module``, with its inputs."""

    def post_fwd_exec(self, module: nn.Module, *args: Any) -> None:
        """After the forward pass of ``module``, with its inputs."""

    def pre_bwd_exec(self, module: nn.Module, input: Any, output: Any) -> None:
        """Before the backward pass of ``module``; ``input`` is not known yet, ``output`` are the gradients it
        receives.
        """

    def post_bwd_exec(self, module: nn.Module, input: Any) -> None:
        """After the backward pass of ``module``, with the gradients of its inputs."""

    def post_iter(self) -> None:
        """After each step of the engine."""


def attach(model: nn.Module, hook: BaseOpHook) -> list[RemovableHandle]:
    """Let ``hook`` see the layers of ``model`` until the handles are removed."""
    if not isinstance(hook, BaseOpHook):
        raise TypeError(f"an operator hook inherits colossalai.engine.BaseOpHook, got {hook!r}")
    return [handle for module in model.modules() if _is_layer(module) for handle in _attach(module, hook)]


def _attach(module: nn.Module, hook: BaseOpHook) -> Iterator[RemovableHandle]:
    def before_forward(module: nn.Module, inputs: Any) -> None:
        hook.pre_fwd_exec(module, *inputs)

    def after_forward(module: nn.Module, inputs: Any, output: Any) -> None:
        hook.post_fwd_exec(module, *inputs)

    def before_backward(module: nn.Module, grad_output: Any) -> None:
        hook.pre_bwd_exec(module, None, grad_output)

    def after_backward(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        hook.post_bwd_exec(module, grad_input)

    yield module.register_forward_pre_hook(before_forward)
    yield module.register_forward_hook(after_forward)
    yield module.register_full_backward_pre_hook(before_backward)
    yield module.register_full_backward_hook(after_backward)


def _is_layer(module: nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return bool(own)
