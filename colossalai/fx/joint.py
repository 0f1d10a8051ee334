"""``trace_step``: the forward and backward pass of a model as one graph of torch's kernels.

Where ``OpGraph`` keeps the operations as a model's author wrote them, and leaves the backward pass to
autograd, this graph has both, down to the kernels: what runs in which order, and how long each tensor lives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from colossalai.fx.capture import check_inputs, in_words, quiet
from colossalai.fx.leaves import ModuleCalls, failing_line
from colossalai.fx.op_graph import check_recorded, loss_of, recorded_leaves
from colossalai.fx.twin import fake_device, fake_like, fake_model, forward_with_loss


@dataclass
class StepGraph:
    """A training step without its optimizer: calling it gives the loss, and the gradient of each parameter.

    Args:
        module: the graph; it takes parameters, buffers and the tensors of the inputs as flat lists.
        parameters: names of the parameters that learn, in the order of the gradients.
        state: names of all parameters and buffers, in the order of the first list.
    """

    module: fx.GraphModule
    model: nn.Module
    parameters: list[str]
    state: list[str]
    in_spec: TreeSpec
    recorded: list[Any]

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
        """The loss and the gradients (None for a parameter that is not used) of these inputs."""
        leaves, spec = tree_flatten((args, kwargs))
        if spec != self.in_spec:
            raise ValueError(f"the step was recorded for inputs {self.in_spec}, got {spec}")
        check_recorded(leaves, self.recorded)
        own = dict((*self.model.named_parameters(), *self.model.named_buffers()))
        with torch.no_grad():
            loss, grads = self.module(
                [own[name] for name in self.state], [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            )
        return loss, dict(zip(self.parameters, grads, strict=True))


def trace_step(
    model: nn.Module,
    *args: Any,
    loss: Callable[..., Tensor] | None = None,
    targets: tuple[Any, ...] = (),
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> StepGraph:
    """Record the forward and the backward pass of ``model``, on tensors without memory.

    ``loss`` and ``targets`` are as for ``trace_model``; without them the model returns its loss.

    Raises:
        ValueError: the inputs do not fit, there is no loss, or the model's code depends on values.
    """
    check_inputs(model, args, kwargs)
    if loss is not None:
        kwargs = {**kwargs, "loss_targets": tuple(targets)}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    place = fake_device(model, device)
    flat, spec = tree_flatten(fake_like((args, kwargs), mode, place))
    places = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
    with quiet(), torch.random.fork_rng(devices=[]), fake_model(model, mode, place):
        if loss is not None:
            forward_with_loss(model, loss)
        state = dict((*model.named_parameters(), *model.named_buffers()))
        learnt = {name: p for name, p in model.named_parameters() if p.requires_grad}

        def step(state: list[Tensor], inputs: list[Tensor]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
            now = list(flat)
            for place, tensor in zip(places, inputs, strict=True):
                now[place] = tensor
            now_args, now_kwargs = tree_unflatten(now, spec)
            found = loss_of(model(*now_args, **now_kwargs))
            return found, torch.autograd.grad(found, list(learnt.values()), allow_unused=True)

        calls = ModuleCalls(model, ())
        try:
            with mode, calls:
                module = make_fx(step, tracing_mode="real")(list(state.values()), [flat[i] for i in places])
        except Exception as error:
            where = f"module {calls.failed!r} of " if calls.failed else ""
            raise ValueError(
                f"the step of {where}{type(model).__name__} was not recorded: {in_words(error)}"
                f" ({failing_line(error)}); trace_model records its forward pass, with such modules as leaves"
            ) from error
    return StepGraph(module, model, list(learnt), list(state), spec, recorded_leaves(flat))
