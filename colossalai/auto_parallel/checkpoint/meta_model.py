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
from colossalai.utils.kept_values import KeptValues
from colossalai.utils.layer_drop import all_layers
from colossalai.utils.repeated_attributes import generators_kept
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
    with random_states_kept(), generators_kept(model), all_layers(model):
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
    """A module in training, whose attributes, buffers, parameters, gradients and modes are afterwards what
    they were, as are random numbers; gives the bytes of the copies on its device, and of gradients that wait
    meanwhile.

    Elsewhere than on a CPU, trained parameters of which it is not known that they change without their
    optimizer are not copied, and no operation is watched: runs there are timed.
    """
    before = KeptAttributes(module.modules())
    gradients = [(p, p.grad) for p in module.parameters()]
    device = next(p.device for p in module.parameters())
    values = _watched_values(module, before) if device.type == "cpu" else _copied_values(module)
    try:
        module.train()
        with _alike(module), values as copies:
            held = [*copies, *(gradient for _, gradient in gradients if gradient is not None)]
            yield sum(tensor.nbytes for tensor in held if tensor.device == device)
    finally:
        before.restore()  # modes are attributes
        for p, gradient in gradients:
            p.grad = gradient


@contextmanager
def _watched_values(module: nn.Module, before: KeptAttributes) -> Iterator[list[Tensor]]:
    """Tensors that are held have afterwards the values that they had; only buffers, and what is written to,
    are copied.
    """
    kept = KeptValues(before.tensors(), module.buffers())
    try:
        with kept:
            yield list(kept.copies.values())
    finally:
        kept.restore()


@contextmanager
def _copied_values(module: nn.Module) -> Iterator[list[Tensor]]:
    """Buffers, and parameters that are known to change, have afterwards the values that they had."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with parameters_kept(module) as kept:
        try:
            yield [*(values for _, values in buffers), *kept]
        finally:
            with torch.no_grad():
                for buffer, values in buffers:
                    buffer.copy_(values)
