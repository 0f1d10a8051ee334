"""FSDP2 gathers the weights of a unit again when the gradient of its output is known, by a hook that an operation in place on a view loses.

Then the backward pass finds weights that are not there, and torch warns that it may be wrong.  So the same moment is also seen where the memory of the
view was made; see [Note: outputs that change] in ``mesh.backward``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from colossalai.interface.nest import tensors
from colossalai.mesh.backward import Once, before_backward


def see_views(unit: nn.Module) -> None:
    """Let ``unit``, which ``fully_shard`` was applied to, gather its weights also for outputs that are changed in place."""
    unit.register_forward_hook(_see_views, prepend=True)


def _see_views(unit: nn.Module, args: Any, output: Any) -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        views = [t for t in tensors(output) if t.requires_grad and t._base is not None]
        before_backward(views, Once(partial(_gather, unit)))


def _gather(unit: Any) -> None:
    """Do what torch's own hook does."""
    unit._get_fsdp_state()._pre_backward(None)
