"""Measures the time of each layer of a model, for ``partition_balanced``.

An embedding has many parameters and hardly computes; an attention over long sequences has few and computes a
lot. ``estimate_costs`` counts operations on the meta device and needs no memory; ``measure_costs`` runs the
layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from colossalai.pipeline.calls import build_kwargs_for_module, call_module, exec_funcs_with_kwargs
from colossalai.pipeline.sequence import LayerStep
from colossalai.utils import synchronize
from colossalai.utils.throughput import OperationCounter

Layers = Sequence[nn.Module] | Sequence[LayerStep]
_Call = Callable[..., Any]


def estimate_costs(layers: Layers, *inputs: Any, **kwargs: Any) -> list[float]:
    """How many floating-point operations the products of each layer take in a forward pass.

    ``layers`` run one after the other: modules, or ``PipelinableContext.layers``.  ``inputs`` and ``kwargs``
    are a batch, of which only the shapes matter.
    """

    def count(module: nn.Module, call: _Call) -> tuple[Any, float]:
        state = {name: _to_meta(t) for name, t in (*module.named_parameters(), *module.named_buffers())}
        with OperationCounter() as counter:
            out = call(lambda *args, **named: functional_call(module, state, args, named))
        return out, float(counter.operations)

    with torch.no_grad():
        return _along(layers, count, tree_map(_to_meta, inputs), tree_map(_to_meta, kwargs))


def measure_costs(layers: Layers, *inputs: Any, repeat: int = 3, **kwargs: Any) -> list[float]:
    """The seconds that a forward and a backward pass of each layer take, the shortest of ``repeat`` times.

    The layers have memory and lie where ``inputs`` and ``kwargs``, a batch, lie; their gradients are dropped.
    """
    if repeat < 1:
        raise ValueError(f"measure_costs needs at least one repetition, got {repeat}")

    def measure(module: nn.Module, call: _Call) -> tuple[Any, float]:
        times = []
        for _ in range(repeat):
            synchronize()
            start = time.perf_counter()
            out = call(module)
            learnt = [t for t in _tensors(out) if t.requires_grad]
            if learnt:
                torch.autograd.backward(learnt, [torch.ones_like(t) for t in learnt])
            synchronize()
            times.append(time.perf_counter() - start)
            module.zero_grad()
        # the next layer differentiates with respect to its input, as it does in training
        return tree_map(_as_input, out), min(times)

    return _along(layers, measure, inputs, kwargs)


def _along(
    layers: Layers, cost: Callable[[nn.Module, _Call], tuple[Any, float]], inputs: Any, kwargs: dict[str, Any]
) -> list[float]:
    """Send a batch through the layers and note what each costs, without the functions between them."""
    x = inputs[0] if len(inputs) == 1 else inputs or None
    costs = []
    for layer in layers:
        step = layer if isinstance(layer, LayerStep) else LayerStep("", layer)
        x = exec_funcs_with_kwargs({0: step.front}, 0, x, kwargs)
        named = build_kwargs_for_module(step.module, x, kwargs)
        x, spent = cost(step.module, lambda run, x=x, named=named: call_module(run, x, named))
        x = exec_funcs_with_kwargs({0: step.behind}, 0, x, kwargs)
        costs.append(spent)
    return costs


def _to_meta(item: Any) -> Any:
    return item.to("meta") if isinstance(item, Tensor) else item


def _as_input(item: Any) -> Any:
    return item.detach().requires_grad_() if isinstance(item, Tensor) and item.requires_grad else item


def _tensors(nest: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map(lambda item: found.append(item) if isinstance(item, Tensor) else None, nest)
    return found
