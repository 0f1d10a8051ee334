"""The optimizer of an accumulating run: it divides losses, and steps at the end of each group of iterations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.engine.gradient_accumulation.progress import Accumulation
from colossalai.interface import OptimizerWrapper


class GradAccumOptimizer(OptimizerWrapper):
    """Call it in every iteration as usual; the parameters move in the last iteration of each group only.

    Every loss, a mean over its batch, is weighted by its part of the group's samples, so a group equals one batch that
    joins its batches.  Without a ``GradAccumDataloader`` that knows the batches' sizes, each batch counts the same.

    Args:
        optim: the optimizer, boosted or not.
        accumulate_size: iterations per step.
        model: the model that is called; if it synchronizes gradients (``no_sync``), it does so once per group.
        progress: shared with the other parts of the run; its own if left out.
    """

    optim: OptimizerWrapper

    def __init__(
        self,
        optim: Optimizer,
        accumulate_size: int,
        model: nn.Module | None = None,
        *,
        progress: Accumulation | None = None,
    ) -> None:
        super().__init__(optim if isinstance(optim, OptimizerWrapper) else OptimizerWrapper(optim))
        self.progress = progress or Accumulation(accumulate_size)
        self._no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
        if model is not None and hasattr(model, "no_sync"):
            _NoSync(model, self.progress)
            self._no_sync = cast(Any, model).no_sync  # Gemini decides in the backward pass

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with nullcontext() if self.progress.is_last else self._no_sync():
            self.optim.backward(self.progress.share(loss), *args, **kwargs)

    def scale_loss(self, loss: Tensor) -> Tensor:
        return self.optim.scale_loss(self.progress.share(loss))

    def unscale_grad(self) -> None:
        if self.progress.is_last:
            self.optim.unscale_grad()

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clip, in the last iteration of a group; before that the gradients are not complete and nothing happens."""
        if self.progress.is_last:
            self.optim.clip_grad_by_value(clip_value)

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip, in the last iteration of a group; before that nothing happens and the norm is given as 0."""
        if self.progress.is_last:
            return self.optim.clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite)
        return torch.zeros(())

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """End an iteration; step if it was the last one of its group."""
        return self.optim.step(*args, **kwargs) if self.progress.advance() else None

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, unless they hold a part of a group."""
        if self.progress.done == 0:
            self.optim.zero_grad(*args, **kwargs)


class _NoSync:
    """Runs a model's forward passes under its ``no_sync`` in all but the last iteration of a group.

    The forward pass is where torch's DDP decides whether the backward pass will synchronize.
    """

    def __init__(self, model: nn.Module, progress: Accumulation) -> None:
        self.progress = progress
        self.open: list[AbstractContextManager[Any] | None] = []
        model.register_forward_pre_hook(self.enter)
        model.register_forward_hook(self.leave, always_call=True)

    def enter(self, model: Any, args: Any) -> None:
        context: AbstractContextManager[Any] | None = None
        if torch.is_grad_enabled() and not self.progress.is_last:
            context = model.no_sync()
            context.__enter__()
        self.open.append(context)

    def leave(self, model: Any, args: Any, output: Any) -> None:
        context = self.open.pop() if self.open else None
        if context is not None:
            context.__exit__(None, None, None)
