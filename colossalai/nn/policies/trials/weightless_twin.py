"""A copy of a model that can be run without the memory of its weights: its code is tried, not its values.

A weight is a window that slides over a few random numbers, ``weight[i, j] = numbers[i + j]``, so a model of
any size takes next to no memory, and no two rows, columns or layers are alike.  Biases that start at 0 and
norms that start at 1 would hide what a copy computes twice; here they are random too.  Buffers keep their
values.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.mesh.weights.deferred import recording_of, tensors_of
from colossalai.nn.policies.trials.meta_inputs import detach_from_script

SEED = 2468


def weightless_twin(model: nn.Module) -> nn.Module | None:
    """A copy of ``model`` that can be run; None if nothing is known of its buffers, as on the plain meta
    device, or if its weights are pieces.
    """
    random = torch.Generator().manual_seed(SEED)
    memo: dict[int, Any] = {}
    for tensor in tensors_of(model):
        recording = recording_of(tensor)
        if recording is None and (tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter)):
            return None
        if id(tensor) in memo:
            continue
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            memo[id(tensor)] = nn.Parameter(_window(tensor, random))
        else:
            value = tensor.detach().clone() if recording is None else recording.values(tensor)
            memo[id(tensor)] = nn.Parameter(value, False) if isinstance(tensor, nn.Parameter) else value
    twin = copy.deepcopy(model, memo)
    detach_from_script(twin)
    return twin


def _window(weight: Tensor, random: torch.Generator) -> Tensor:
    numbers = torch.randn(sum(weight.shape) - weight.ndim + 1, generator=random)
    if weight.ndim > 1:
        numbers *= (len(weight) / weight.numel()) ** 0.5  # as large as those of a layer that was drawn
    return numbers.to(weight.device, weight.dtype).as_strided(weight.shape, (1,) * weight.ndim)
