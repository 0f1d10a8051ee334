"""``NonPipelineSchedule``: one forward and one backward pass for each batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from colossalai.engine.schedule.base import BaseSchedule, StepResult
from colossalai.interface.batch import call_with, loss_of, split_batch
from colossalai.registry import SCHEDULE

if TYPE_CHECKING:
    from colossalai.engine.engine import Engine


@SCHEDULE.register_module
class NonPipelineSchedule(BaseSchedule):
    """The usual iteration.

    Without ``data_process_func``, a batch is ``(data, label)``, or a dict whose label is called ``label`` or
    ``labels``, or all data and no label.  Data in a tuple or list are the model's arguments, in a dict its keywords;
    outputs and labels go to the criterion in the same way.  Without a criterion, the model gets the whole dict, and the
    loss is its output, or the ``loss`` in it.
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
