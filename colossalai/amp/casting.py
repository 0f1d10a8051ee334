"""Models whose weights are of a smaller dtype, with inputs and outputs cast to fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from colossalai.interface import ModelWrapper
from colossalai.interface.arguments import Copies


def cast_floats(values: Any, dtype: torch.dtype) -> Any:
    """``values``, a tensor or nested containers of them, with every floating-point tensor in ``dtype``."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)


def cast_model(
    model: nn.Module, dtype: torch.dtype, keep: Callable[[nn.Module], bool] = lambda module: False
) -> dict[Tensor, Tensor]:
    """Cast floating-point parameters and buffers in place, except those that
    modules chosen by ``keep`` hold directly.

    Parameters stay the same objects, so optimizers, ties and hooks go on.
    Returns the values before, by parameter.
    """
    exact: dict[Tensor, Tensor] = {p: p.data for p in model.parameters() if p.is_floating_point()}
    kept = [module for module in model.modules() if keep(module)]
    buffers = [(module, dict(module.named_buffers(recurse=False))) for module in kept]
    model.to(dtype)
    for module, own in buffers:
        for p in module.parameters(recurse=False):
            p.data = exact[p]
        for name, buffer in own.items():
            setattr(module, name, buffer)
    return exact


def is_batch_norm(module: nn.Module) -> bool:
    """Whether ``module`` keeps running statistics, which need more digits than fp16 has."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


class CastModel(ModelWrapper):
    """A module whose floating-point inputs arrive in ``dtype`` and outputs
    leave in ``output_dtype``, where given.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype | None, output_dtype: torch.dtype | None
    ) -> None:
        super().__init__(module)
        self._cast = (dtype, output_dtype)  # one name, so that `model.dtype` stays the user's

    @property
    def casts_inputs(self) -> bool:
        """Whether it computes in a dtype of its own, so that its outputs may have to be cast for the loss."""
        return self._cast[0] is not None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return call_cast(self.module, args, kwargs, *self._cast)


def call_cast(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None,
    output_dtype: torch.dtype | None,
) -> Any:
    """``function(*args, **kwargs)``, with floating-point arguments cast to ``dtype`` and results to
    ``output_dtype``; ``None`` leaves them.
    """
    passed = (args, kwargs) if dtype is None else cast_floats((args, kwargs), dtype)
    copies = Copies((args, kwargs), passed)
    output = function(*passed[0], **passed[1])
    copies.hand_back()
    return output if output_dtype is None else cast_floats(output, output_dtype)
