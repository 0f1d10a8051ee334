"""``Engine``: model, optimizer and criterion as one object, with the features that the config asked for
inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from colossalai.booster import Booster
from colossalai.engine.gradient_accumulation import GradAccumGradientHandler
from colossalai.engine.gradient_handler import BaseGradientHandler
from colossalai.engine.ophooks import BaseOpHook, attach
from colossalai.engine.schedule import BaseSchedule, NonPipelineSchedule
from colossalai.interface import LossWatch, OptimizerWrapper, check_differentiable, check_loss, user_module
from colossalai.utils.parallel import mesh_of_model

Handler = BaseGradientHandler | GradAccumGradientHandler


class Engine:
    """The engine that ``colossalai.initialize`` returns.

    The calls of a training loop go to it: ``engine.zero_grad()``, ``engine(data)``,
    ``engine.criterion(...)``, ``engine.backward(loss)``, ``engine.step()``; or all but the first and last in
    one, ``engine.execute_schedule``.

    Args:
        gradient_handlers: synchronize gradients before each step.
        clip_grad_norm: the largest norm of all gradients; 0 does not clip.
        ophook_list: hooks on the layers of the model.
        verbose: kept for compatibility with scripts that pass it; ``initialize`` does the logging.
        schedule: how ``execute_schedule`` runs an iteration; ``NonPipelineSchedule()`` if left out.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        criterion: Callable[..., Any] | None = None,
        gradient_handlers: Sequence[Handler] | None = None,
        clip_grad_norm: float = 0.0,
        ophook_list: Sequence[BaseOpHook] | None = None,
        verbose: bool = True,
        schedule: BaseSchedule | None = None,
    ) -> None:
        _check(model, optimizer, criterion, clip_grad_norm, schedule)
        self._model = model
        self._optimizer = (
            optimizer if isinstance(optimizer, OptimizerWrapper) else OptimizerWrapper(optimizer)
        )
        if self._optimizer.mesh is None:
            self._optimizer.mesh = mesh_of_model(user_module(model))
        self._criterion = criterion
        self._gradient_handlers = list(gradient_handlers or ())
        self._handled = False
        if self._gradient_handlers and not self._optimizer.averages_gradients:
            self._optimizer.register_step_pre_hook(partial(_refuse_steps_of_others, weakref.ref(self)))
        self._clip_grad_norm = float(clip_grad_norm)
        self._ophooks: dict[BaseOpHook, list[RemovableHandle]] = {}
        for hook in ophook_list or ():
            self.add_hook(hook)
        self.verbose = verbose
        self.training = True
        self.booster: Booster | None = None
        """What ``initialize`` has boosted the model with: ``engine.booster.save(path)`` saves the run."""
        self._watch = LossWatch()
        self._schedule = schedule or NonPipelineSchedule()
        self._schedule.pre_processing(self)

    @property
    def model(self) -> nn.Module:
        return self._model

    @property
    def optimizer(self) -> OptimizerWrapper:
        return self._optimizer

    @property
    def criterion(self) -> Callable[..., Any] | None:
        return self._criterion

    @property
    def schedule(self) -> BaseSchedule:
        return self._schedule

    @property
    def gradient_handlers(self) -> list[Handler]:
        return self._gradient_handlers

    @property
    def ophooks(self) -> list[BaseOpHook]:
        return list(self._ophooks)

    @property
    def uses_pipeline(self) -> bool:
        return self._schedule.uses_pipeline

    def add_hook(self, ophook: BaseOpHook) -> None:
        """Let ``ophook`` see the layers of the model."""
        if ophook not in self._ophooks:
            self._ophooks[ophook] = attach(self._model, ophook)

    def remove_hook(self, ophook: BaseOpHook) -> None:
        """Undo ``add_hook``."""
        if ophook not in self._ophooks:
            raise ValueError(f"{ophook!r} is not a hook of this engine; it has {self.ophooks}")
        for handle in self._ophooks.pop(ophook):
            handle.remove()

    def zero_grad(self) -> None:
        """Clear the gradients, at the start of an iteration."""
        self._handled = False
        self._optimizer.zero_grad()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of the model."""
        return self._model(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of ``loss``."""
        check_loss(loss, "engine.backward")
        self._handled = False
        self._watch.see(loss, self._optimizer.skips_steps)
        self._optimizer.backward(loss)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """``loss`` as it enters its backward pass, for schedules that do that pass themselves."""
        check_loss(loss, "engine.scale_loss")
        self._handled = False
        self._watch.see(loss, self._optimizer.skips_steps)
        return self._optimizer.scale_loss(loss)

    def expect_gradients(self) -> None:
        """A backward pass begins whose loss another rank may have: schedules of pipelines call this."""
        self._optimizer.expect_gradients()

    def backward_by_grad(self, tensor: Tensor, grad: Tensor) -> None:
        """The backward pass from ``tensor``, whose gradient is ``grad``."""
        check_differentiable(tensor)
        self._optimizer.backward(tensor, grad)

    def handle_gradients(self) -> None:
        """Bring the gradients of the ranks together, as ``step`` does first; one ``optimizer.step()`` may
        follow.
        """
        for handler in self._gradient_handlers:
            handler.handle_gradient()
        self._handled = True

    def step(self) -> Any:
        """Synchronize and clip the gradients, then update the parameters."""
        self.handle_gradients()
        if self._clip_grad_norm > 0:
            self._optimizer.clip_grad_by_norm(self._clip_grad_norm)
        result = self._optimizer.step()
        self._handled = False  # an accumulating optimizer may not have stepped
        for hook in self._ophooks:
            hook.post_iter()
        return result

    def execute_schedule(self, data_iter: Iterator[Any], **kwargs: Any) -> tuple[Any, Any, Any]:
        """Take the next batch forward and backward; returns ``(output, label, loss)``.

        Keywords: ``forward_only=False``, ``return_loss=True``, ``return_output_label=True``.
        """
        return self._schedule.forward_backward_step(self, data_iter, **kwargs)

    def train(self) -> None:
        """Training mode, as ``model.train()``."""
        self.training = True
        self._model.train()

    def eval(self) -> None:
        """Evaluation mode, as ``model.eval()``."""
        self._watch.report()
        self.training = False
        self._model.eval()


def _refuse_steps_of_others(owner: weakref.ref[Engine], *_: Any) -> None:
    """Before a step of the optimizer: gradients that no handler has seen are those of this rank alone."""
    engine = owner()
    if engine is not None and not engine._handled:
        names = ", ".join(type(handler).__name__ for handler in engine.gradient_handlers)
        raise RuntimeError(
            f"optimizer.step() past the engine, whose gradient handlers ({names}) bring the gradients of the"
            " ranks together in engine.step(); call engine.step()"
        )
    if engine is not None:
        engine._handled = False


def _check(model: Any, optimizer: Any, criterion: Any, clip_grad_norm: Any, schedule: Any) -> None:
    for name, value, kind in (("model", model, nn.Module), ("optimizer", optimizer, Optimizer)):
        if not isinstance(value, kind):
            raise TypeError(f"Engine needs {name} as a torch {kind.__name__}, got {value!r}")
    if criterion is not None and not callable(criterion):
        raise TypeError(f"the criterion of an Engine is a function of outputs and labels, got {criterion!r}")
    if not clip_grad_norm >= 0:
        raise ValueError(f"clip_grad_norm must be 0 (do not clip) or more, got {clip_grad_norm!r}")
    if schedule is not None and not isinstance(schedule, BaseSchedule):
        raise TypeError(
            "the schedule of an Engine is an instance of colossalai.engine.schedule.BaseSchedule, got"
            f" {schedule!r}"
        )
