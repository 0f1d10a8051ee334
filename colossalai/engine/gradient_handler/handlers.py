"""The built-in gradient handlers: all of them are ``synchronize_gradients``.

Ranks that saw different data average, since every loss is a mean over its own rank's samples; those of one
sequence too, as ``colossalai.nn`` hands back as many times the gradient as there are of them.
Stages that use one weight together add, since the loss depends on it through each use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn
from torch.optim import Optimizer

from colossalai.pipeline.tied import synchronize_gradients
from colossalai.registry import GRADIENT_HANDLER
from colossalai.utils.parallel import launched_mesh


class BaseGradientHandler(ABC):
    """Synchronizes gradients over ranks.  The engine calls ``handle_gradient`` in each step, before it clips.

    Register your own with ``@GRADIENT_HANDLER.register_module`` and name it in the config:
    ``gradient_handler = [dict(type='MyGradientHandler')]``; further items of the dict go to its constructor.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        self._model = model
        self._optimizer: Any = optimizer

    @abstractmethod
    def handle_gradient(self) -> None:
        """Change the gradients in place; every rank calls this."""


@GRADIENT_HANDLER.register_module
class DataParallelGradientHandler(BaseGradientHandler):
    """Averages gradients over the ranks with other data, after the backward pass: data-parallel ranks, and
    those that hold other parts of the sequences, if these are cut.
    """

    def handle_gradient(self) -> None:
        synchronize_gradients(self._model.parameters(), launched_mesh(), stages=False)


@GRADIENT_HANDLER.register_module
class ZeROGradientHandler(BaseGradientHandler):
    """Lets a ZeRO optimizer average its gradients now; it would do so by itself in its step."""

    def handle_gradient(self) -> None:
        if not getattr(self._optimizer, "averages_gradients", False):
            raise TypeError(
                f"ZeROGradientHandler needs an optimizer of ZeRO, got {type(self._optimizer).__name__}; add a"
                " 'zero' section to the config"
            )
        self._optimizer.unscale_grad()


@GRADIENT_HANDLER.register_module
class SequenceParallelGradientHandler(DataParallelGradientHandler):
    """Averages gradients over all ranks that hold other samples or other parts of the sequences: the name of
    ``DataParallelGradientHandler`` where sequences are cut.
    """


@GRADIENT_HANDLER.register_module
class MoeGradientHandler(DataParallelGradientHandler):
    """Averages gradients over all ranks with other data, and those of experts over the ranks that hold the
    same ones: the name of ``DataParallelGradientHandler`` where experts are shared out.
    """


@GRADIENT_HANDLER.register_module
class PipelineSharedModuleGradientHandler(BaseGradientHandler):
    """Adds the gradients of weights that several pipeline stages share (see
    ``pipeline_shared_module_pg``).
    """

    def handle_gradient(self) -> None:
        synchronize_gradients(self._model.parameters(), rows=None)
