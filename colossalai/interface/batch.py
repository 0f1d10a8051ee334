"""The form of a batch, an output and a loss: the conventions of all schedules.

A batch is ``(data, label)``, or a dict whose label is called ``label`` or ``labels``, or all data and no
label.  Data in a tuple or list are the model's arguments, in a dict its keywords; outputs and labels go to
the criterion in the same way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

Criterion = Callable[..., Any]
DataProcess = Callable[[Any], tuple[Any, Any]]

_LABELS = ("labels", "label")


_NOTHING = object()


def next_batch(data_iter: Any, who: str) -> Any:
    """The next batch of an iterator, for ``who`` was given it; refuses what is none, or has none left."""
    if not hasattr(data_iter, "__next__"):
        raise TypeError(
            f"{who} takes the next batch of an iterator, got {type(data_iter).__name__}; call iter() on the"
            " data loader once per pass and give that"
        )
    batch = next(data_iter, _NOTHING)
    if batch is _NOTHING:
        raise RuntimeError(
            f"{who} has no batch left: the iterator has come to the end of the data; take iter(dataloader)"
            " anew for each pass, and at most len(dataloader) batches of it"
        )
    return batch


def split_batch(batch: Any, process: DataProcess | None, has_criterion: bool, who: str) -> tuple[Any, Any]:
    """``(data, label)`` of ``batch``; ``process`` is the user's own way, ``who`` would take it."""
    if process is not None:
        pair = process(batch)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"data_process_func must return (data, label), got {describe(pair)}")
        return pair[0], pair[1]
    if isinstance(batch, Mapping):
        name = next((name for name in _LABELS if name in batch), None)
        label = None if name is None else batch[name]
        if not has_criterion:
            return batch, label  # the model itself makes a loss of the label
        return {key: value for key, value in batch.items() if key != name}, label
    if isinstance(batch, (tuple, list)):
        if len(batch) != 2:
            raise ValueError(
                f"a batch of {len(batch)} items is not (data, label); give the schedule a data_process_func"
                f" that makes it so: {who}(data_process_func)"
            )
        return batch[0], batch[1]
    return batch, None


def call_with(function: Any, arguments: Any) -> Any:
    """Call ``function`` with a nest: a dict as its keywords, a tuple or list as its arguments, else one
    argument.
    """
    if isinstance(arguments, Mapping):
        return function(**arguments)
    if isinstance(arguments, (tuple, list)):
        return function(*arguments)
    return function(arguments)


def loss_of(criterion: Criterion | None, output: Any, label: Any) -> Tensor:
    """The loss of an output; without a criterion it is the output, or the ``loss`` in it."""
    loss = _loss_in(output) if criterion is None else _criterion_loss(criterion, output, label)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    who = "model, which has no criterion," if criterion is None else "criterion"
    raise TypeError(
        f"the {who} must return the loss as one tensor with one element, got {describe(loss)}; return the"
        " loss alone, or wrap it in a function that picks it"
    )


def _criterion_loss(criterion: Criterion, output: Any, label: Any) -> Any:
    args: list[Any] = []
    keywords: dict[str, Any] = {}
    for part in (output, *(() if label is None else (label,))):
        if isinstance(part, Mapping):
            keywords.update(part)
        elif isinstance(part, (tuple, list)):
            args.extend(part)
        else:
            args.append(part)
    try:
        return criterion(*args, **keywords)
    except TypeError as error:
        _check_arguments(criterion, output, label, args, keywords, error)
        raise


def _check_arguments(
    criterion: Criterion, output: Any, label: Any, args: list[Any], keywords: dict[str, Any], cause: TypeError
) -> None:
    """Raise if ``criterion`` cannot take these arguments at all; ``cause`` is what it said."""
    name = getattr(criterion, "__name__", type(criterion).__name__)
    try:
        signature = inspect.signature(criterion.forward if isinstance(criterion, nn.Module) else criterion)
    except ValueError:  # a function that does not tell
        return
    try:
        signature.bind(*args, **keywords)
    except TypeError as error:
        raise TypeError(
            f"the criterion {name}{signature} cannot take the output, {describe(output)}, with the label,"
            f" {describe(label)}: {error}. A tuple or list is given as several arguments, a dict as keywords;"
            " labels are tensors as a rule"
        ) from cause


def _loss_in(output: Any) -> Any:
    """The loss in the output of a model that computes its own."""
    if isinstance(output, Mapping):
        return output.get("loss")
    if isinstance(output, Tensor):
        return output
    return getattr(output, "loss", output)


def describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        kinds = sorted({type(item).__name__ for item in value})
        plain = len(kinds) == 1 and not isinstance(value[0], Tensor)
        return f"a {type(value).__name__} of {len(value)}" + (f" {kinds[0]}" if plain else "")
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(repr, value)) or 'nothing'}"
    return f"{type(value).__name__}"
