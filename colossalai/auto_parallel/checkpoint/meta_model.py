"""A model on the meta device for a while, without a copy of it, or run where it is without a trace.

The modules stay the same objects: what is learnt about them there (such as that a block leaves its inputs
alone) holds afterwards.  Steps are alike: no layer is left out at random, and random numbers begin anew.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from colossalai.utils.activation_checkpoint import random_states_kept
from colossalai.utils.kept_attributes import KeptAttributes
from colossalai.utils.layer_drop import all_layers
from colossalai.utils.repeated_buffers import parameters_kept


@contextmanager
def on_meta(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Inside the block, the tensors of ``model`` lie on the meta device, its weights in ``dtype``, and it is
    in training; afterwards everything is as before, random numbers included.
    """
    before = KeptAttributes(model.modules())
    swapped: dict[int, Tensor] = {}

    def meta(tensor: Tensor) -> Tensor:
        if id(tensor) not in swapped:
            swapped[id(tensor)] = _meta_of(tensor, dtype)
        return swapped[id(tensor)]

    try:
        before.map_tensors(meta)
        for module in model.modules():
            module.training = True
        with _alike(model):
            yield
    finally:
        before.restore()


@contextmanager
def _alike(model: nn.Module) -> Iterator[None]:
    """Steps inside the block compute the same layers; afterwards random numbers go on as before."""
    with random_states_kept(), all_layers(model):
        torch.default_generator.manual_seed(0)  # not CUDA's, which may begin with the script's seed later
        random.seed(0)
        np.random.seed(0)
        yield


def _meta_of(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    made = tensor.detach().to("meta", dtype if tensor.is_floating_point() else None)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        made.__dict__.update(vars(tensor))  # such as its place on a mesh
    return made


@contextmanager
def left_alone(module: nn.Module) -> Iterator[int]:
    """A module in training, whose buffers, parameters that are not trained, gradients and modes are
    afterwards what they were, as are random numbers; gives the bytes of the copies on its device, and of
    gradients that wait meanwhile.
    """
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    gradients = [p.grad for p in module.parameters()]
    training = [(part, part.training) for part in module.modules()]
    device = next(p.device for p in module.parameters())
    try:
        module.train()
        with _alike(module), parameters_kept(module) as kept:
            held = [*buffers.values(), *kept, *(gradient for gradient in gradients if gradient is not None)]
            yield sum(tensor.nbytes for tensor in held if tensor.device == device)
    finally:
        for part, flag in training:
            part.training = flag
        with torch.no_grad():
            for name, value in module.named_buffers():
                value.copy_(buffers[name])
        for p, gradient in zip(module.parameters(), gradients, strict=True):
            p.grad = gradient
