"""``BaseSchedule``: how the forward and backward passes of one iteration are executed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from colossalai.interface.batch import call_with, loss_of, next_batch, split_batch
from colossalai.interface.nest import batch_size, to_device, token_count
from colossalai.registry import SCHEDULE
from colossalai.utils import get_current_device

if TYPE_CHECKING:
    from colossalai.engine.engine import Engine


StepResult = tuple[Any, Any, Any]


class BaseSchedule:
    """Inherit and implement ``forward_backward_step``, or ``forward_back_step``, the name in some documents.

    Args:
        data_process_func: turns a batch of the data loader, already on the device, into ``(data, label)``.
    """

    uses_pipeline = False

    def __init__(self, data_process_func: Callable[[Any], tuple[Any, Any]] | None = None) -> None:
        if data_process_func is not None and not callable(data_process_func):
            raise TypeError(
                f"data_process_func is a function from a batch to (data, label), got {data_process_func!r}"
            )
        self.data_process_func = data_process_func
        self.batch_size = 0
        self.tokens = 0  # of a batch of texts
        self._device: torch.device | None = None

    @property
    def has_loss(self) -> bool:
        """Whether this rank computes the loss and the outputs."""
        return True

    def pre_processing(self, engine: Engine) -> None:
        """Called once, by the engine that will use this schedule."""
        self._device = next((p.device for p in engine.model.parameters()), None)

    def load_batch(self, data_iter: Iterator[Any], to_gpu: bool = True) -> Any:
        """The next batch, with ``to_gpu`` on the device of the model; any nest of tensors will do."""
        batch = next_batch(data_iter, "execute_schedule")
        self.batch_size, self.tokens = batch_size(batch), token_count(batch)
        return to_device(batch, self._device or get_current_device()) if to_gpu else batch

    def forward_backward_step(
        self,
        engine: Engine,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> StepResult:
        """Take a batch from ``data_iter`` through the engine; returns ``(output, label, loss)``, None where
        not asked for.
        """
        if type(self).forward_back_step is BaseSchedule.forward_back_step:
            raise TypeError(
                f"{type(self).__name__} must implement forward_backward_step(engine, data_iter, forward_only,"
                " return_loss, return_output_label)"
            )
        return self.forward_back_step(engine, data_iter, forward_only, return_loss, return_output_label)

    def forward_back_step(self, *args: Any, **kwargs: Any) -> StepResult:
        """Another name of ``forward_backward_step``."""
        return self.forward_backward_step(*args, **kwargs)


@SCHEDULE.register_module
class NonPipelineSchedule(BaseSchedule):
    """The usual iteration.

    Without ``data_process_func``, a batch is ``(data, label)``, or a dict whose label is called ``label`` or
    ``labels``, or all data and no label.  Data in a tuple or list are the model's arguments, in a dict its
    keywords; outputs and labels go to the criterion in the same way.  Without a criterion, the model gets the
    whole dict, and the loss is its output, or the ``loss`` in it.
    """

    def forward_backward_step(
        self,
        engine: Engine,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> StepResult:
        if not (forward_only or return_loss):
            raise ValueError("a backward pass needs the loss: pass return_loss=True or forward_only=True")
        batch = self.load_batch(data_iter)
        data, label = split_batch(
            batch, self.data_process_func, engine.criterion is not None, type(self).__name__
        )
        with torch.no_grad() if forward_only else nullcontext():
            output = call_with(engine, data)
            loss = loss_of(engine.criterion, output, label) if return_loss else None
        if not forward_only:
            engine.backward(loss)  # type: ignore[arg-type]
        if loss is not None:
            loss = loss.detach()
        return (output, label, loss) if return_output_label else (None, None, loss)
