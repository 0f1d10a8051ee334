"""The private names of torch that Gemini needs; the same in torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable

import torch


def current_task() -> int:
    """The number of the backward pass that this thread is in; nested ones, as reentrant checkpointing makes, have their own."""
    return torch._C._current_graph_task_id()


def at_end_of_task(function: Callable[[], None]) -> None:
    """Call ``function`` when the backward pass that this thread is in is over."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
