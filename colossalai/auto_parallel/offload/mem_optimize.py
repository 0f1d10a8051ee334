"""``memory_optimize``: a model whose weights rest on the host, within a budget of the device's memory.

It is Gemini, with room for its chunks found by playing a step on the meta device.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from colossalai.auto_parallel.checkpoint.timeline import TrainingStep
from colossalai.device.presets import DEVICES
from colossalai.utils.text import size_text
from colossalai.zero.gemini import GeminiDDP

_PREFETCH = {"syn": 0, "asyn": 2}


def memory_optimize(
    model: nn.Module,
    inps: Any,
    memory_budget: float = -1.0,
    solver_name: Literal["syn", "asyn"] = "asyn",
) -> GeminiDDP:
    """``model`` with its weights in chunks on the host, which are fetched when they are computed with.

    Train it with ``colossalai.zero.ZeroOptimizer(optimizer, model)``: ``optimizer.backward(loss)`` and
    ``optimizer.step()``.  Needs a launch.

    Args:
        model: the model; what is returned holds its weights.
        inps: arguments of one call, of which the shapes matter: a tensor, a tuple or a dict of keywords.
        memory_budget: bytes of the device for weights, gradients and activations; the weights get what the
            activations of a step leave. -1 sets no limit.
        solver_name: ``"asyn"`` fetches weights ahead while others are computed with, ``"syn"`` does not.
    """
    if solver_name not in _PREFETCH:
        raise ValueError(f"memory_optimize: solver_name is 'syn' or 'asyn', got {solver_name!r}")
    if not (memory_budget == -1 or memory_budget > 0):
        raise ValueError(
            f"memory_optimize: memory_budget is a number of bytes above 0, or -1 for no limit, got"
            f" {memory_budget}"
        )
    capacity = None if memory_budget == -1 else int(memory_budget) - _activations(model, inps)
    if capacity is not None and capacity <= 0:
        needed = int(memory_budget) - capacity
        raise ValueError(
            f"memory_optimize: the activations of a step need {needed} bytes ({size_text(needed)}), which is"
            f" all of memory_budget={memory_budget:.0f}; give more, or recompute activations"
            " (colossalai.auto_parallel.checkpoint.auto_checkpoint) first"
        )
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return GeminiDDP(
        model,
        placement_policy="cpu",
        dtype=dtype,
        compute_capacity=capacity,
        prefetch=_PREFETCH[solver_name],
    )


def _activations(model: nn.Module, inps: Any) -> int:
    """The bytes of a step that are no weights, at the worst moment, gradients of weights left out."""
    preset = DEVICES["h100" if torch.cuda.is_available() else "cpu"]
    line = TrainingStep(model, inps, None, None, None, preset.workspace, preset).play({})
    return line.peak - line.weights - line.gradients
