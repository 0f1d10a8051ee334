"""A mode for decode steps on a GPU: linear layers of one row read their weights at the memory's speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from colossalai.kernel.probe import triton_works

MOST = 3  # weights of one kernel


@dataclass(eq=False)
class Product:
    """A product that a step computed when it ran the first time."""

    weight: Tensor
    bias: Tensor | None
    joins: bool
    """Whether it has the input, unchanged, and the form of the one before."""


class ThinProducts(TorchFunctionMode):
    """Linear layers of one row, and layer norms, by our kernels, without gradients; all else is torch's.

    Layers of one input (queries, keys and values) are computed together, when the first one is called.

    Args:
        plan: the products of the step, noted here if it is empty.
    """

    def __init__(self, plan: list[Product] | None = None) -> None:
        super().__init__()
        self._plan = [] if plan is None else plan
        self._notes = not self._plan
        self._turn = 0
        self._ready: list[tuple[Tensor, Tensor]] = []  # weights, and results that were not asked for yet
        self._input: Tensor | None = None
        self._version = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear:
            return self._linear(*args, **kwargs or {})
        if func is F.layer_norm:
            return _layer_norm(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if input.numel() != input.size(-1) or weight.dim() != 2 or not _takes(input, weight, bias):
            return F.linear(input, weight, bias)
        again = input is self._input and input._version == self._version
        self._input, self._version = input, input._version
        turn, self._turn = self._turn, self._turn + 1
        if self._notes:
            before = self._plan[-1] if self._plan else None
            joins = again and before is not None and _alike(before, weight, bias)
            self._plan.append(Product(weight, bias, joins))
        if again and self._ready and self._ready[0][0] is weight:
            result = self._ready.pop(0)[1]
        else:
            group = [] if self._notes else _group(self._plan, turn, weight, bias)
            results = _one_row(input, group or [Product(weight, bias, False)])
            self._ready = [(p.weight, r) for p, r in zip(group[1:], results[1:], strict=False)]
            result = results[0]
        return result.view(*input.shape[:-1], -1)


def _group(plan: Sequence[Product], turn: int, weight: Tensor, bias: Tensor | None) -> list[Product]:
    """The products that are computed with that of ``weight``, it first; none if another one was expected."""
    if turn >= len(plan) or plan[turn].weight is not weight or plan[turn].bias is not bias:
        return []
    group = [plan[turn]]
    for product in plan[turn + 1 : turn + MOST]:
        if not product.joins:
            break
        group.append(product)
    return group


def _alike(product: Product, weight: Tensor, bias: Tensor | None) -> bool:
    other = product.weight
    same = other.stride(0) == weight.stride(0) and other.size(1) == weight.size(1)
    return same and (product.bias is None) == (bias is None)


def _one_row(input: Tensor, products: Sequence[Product]) -> list[Tensor]:
    from colossalai.kernel import triton_rows

    row = input.reshape(1, -1)
    return triton_rows.one_row(row, [p.weight for p in products], [p.bias for p in products])


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if len(normalized_shape) != 1 or normalized_shape[0] > 1 << 14 or not _takes(input, weight, bias):
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    from colossalai.kernel import triton_exact

    return triton_exact.normalize(input, weight, bias, eps, centered=True, width=input.size(-1))[0]


def _takes(*tensors: Tensor | None) -> bool:
    first = tensors[0]
    assert first is not None
    return (
        first.is_cuda
        and first.dtype in (torch.bfloat16, torch.float16)
        and all(t is None or (t.dtype == first.dtype and t.stride(-1) == 1) for t in tensors)
        and triton_works()
    )
