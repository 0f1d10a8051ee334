"""``NonPipelineSchedule``: one forward and one backward pass for each batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from colossalai.engine.schedule.base import BaseSchedule, StepResult
from colossalai.registry import SCHEDULE

if TYPE_CHECKING:
    from colossalai.engine.engine import Engine

_LABELS = ("labels", "label")


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
        data, label = self._split(self.load_batch(data_iter), engine)
        with torch.no_grad() if forward_only else nullcontext():
            output = _call(engine, data)
            loss = _loss(engine, output, label) if return_loss else None
        if not forward_only:
            engine.backward(loss)  # type: ignore[arg-type]
        if loss is not None:
            loss = loss.detach()
        return (output, label, loss) if return_output_label else (None, None, loss)

    def _split(self, batch: Any, engine: Engine) -> tuple[Any, Any]:
        if self.data_process_func is not None:
            pair = self.data_process_func(batch)
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise TypeError(f"data_process_func must return (data, label), got {_describe(pair)}")
            return pair[0], pair[1]
        if isinstance(batch, Mapping):
            name = next((name for name in _LABELS if name in batch), None)
            label = None if name is None else batch[name]
            if engine.criterion is None:
                return batch, label
            return {key: value for key, value in batch.items() if key != name}, label
        if isinstance(batch, (tuple, list)):
            if len(batch) != 2:
                raise ValueError(
                    f"a batch of {len(batch)} items is not (data, label); give the schedule a data_process_func that"
                    " makes it so: NonPipelineSchedule(data_process_func)"
                )
            return batch[0], batch[1]
        return batch, None


def _call(function: Any, arguments: Any) -> Any:
    if isinstance(arguments, Mapping):
        return function(**arguments)
    if isinstance(arguments, (tuple, list)):
        return function(*arguments)
    return function(arguments)


def _loss(engine: Engine, output: Any, label: Any) -> Tensor:
    loss = _loss_in(output) if engine.criterion is None else _criterion_loss(engine, output, label)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    who = "model, which has no criterion," if engine.criterion is None else "criterion"
    raise TypeError(
        f"the {who} must return the loss as one tensor with one element, got {_describe(loss)}; return the loss alone,"
        " or wrap it in a function that picks it"
    )


def _criterion_loss(engine: Engine, output: Any, label: Any) -> Any:
    args: list[Any] = []
    keywords: dict[str, Any] = {}
    for part in (output, *(() if label is None else (label,))):
        if isinstance(part, Mapping):
            keywords.update(part)
        elif isinstance(part, (tuple, list)):
            args.extend(part)
        else:
            args.append(part)
    return engine.criterion(*args, **keywords)  # type: ignore[misc]


def _loss_in(output: Any) -> Any:
    """The loss in the output of a model that computes its own."""
    if isinstance(output, Mapping):
        return output.get("loss")
    if isinstance(output, Tensor):
        return output
    return getattr(output, "loss", output)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{type(value).__name__}"
