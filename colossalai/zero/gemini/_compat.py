"""The private names of torch that Gemini needs; the same in torch 2.11 and 2.13."""

from __future__ import annotations

import torch

from colossalai.mesh._compat import at_end_of_task as at_end_of_task


def current_task() -> int:
    """The number of the backward pass that this thread is in; nested ones, as reentrant checkpointing makes, have their own."""
    return torch._C._current_graph_task_id()
