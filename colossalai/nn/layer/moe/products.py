"""Products of rows with the weights of their experts, and what is between two of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from colossalai._numeric import autocast_dtype
from colossalai.kernel import expert_rows

Activation = Callable[[Tensor], Tensor]


class RowsPerExpert:
    """How many rows each expert has, one expert after the other; as numbers of the host, or of the device.

    Numbers of the device are read only by those who need them on the host, since this waits for the device.
    """

    def __init__(self, numbers: Sequence[int] | Tensor, ends: Tensor | None = None) -> None:
        self._tensor = numbers if isinstance(numbers, Tensor) else None
        self._sizes = None if isinstance(numbers, Tensor) else list(numbers)
        self._ends = ends
        self._expert: Tensor | None = None

    @property
    def sizes(self) -> list[int]:
        if self._sizes is None:
            assert self._tensor is not None
            self._sizes = self._tensor.tolist()
        return self._sizes

    def on(self, device: torch.device) -> Tensor:
        if self._tensor is None or self._tensor.device != device:
            self._tensor = torch.tensor(self.sizes, dtype=torch.int64, device=device)
        return self._tensor

    def ends(self, device: torch.device) -> Tensor:
        """The row after the last one of each expert."""
        if self._ends is None or self._ends.device != device:
            self._ends = self.on(device).cumsum(0, dtype=torch.int32)
        return self._ends

    def expert_of(self, rows: int, device: torch.device) -> Tensor:
        """The expert of each of ``rows`` rows; of rows after those of all experts, the last one."""
        if self._expert is None or len(self._expert) != rows or self._expert.device != device:
            ends = self.ends(device)
            found = torch.searchsorted(ends, torch.arange(rows, device=device, dtype=ends.dtype), right=True)
            self._expert = found.clamp(max=len(ends) - 1)
        return self._expert


def of_experts(weight: Tensor, some: slice) -> Tensor:
    """``weight`` (experts, ...) of some experts; itself where these are all, since the gradient of a slice is
    a copy.
    """
    return weight if some.indices(len(weight)) == (0, len(weight), 1) else weight[some]


def grouped_product(x: Tensor, weight: Tensor, rows: RowsPerExpert) -> Tensor:
    """``x`` (rows, in), of which each expert has the next ``rows``, times its matrix of ``weight`` (experts,
    in, out).  What stands in rows after those of all experts has no meaning.

    One kernel computes all products where torch has one: on GPUs since Hopper, in bf16, with rows of a
    multiple of 16 bytes.  Elsewhere they are computed one by one.
    """
    if (dtype := autocast_dtype(x.device)) is not None:
        x, weight = (t.to(dtype) for t in (x, weight))
    if _has_kernel(x, weight):
        return F.grouped_mm(x, weight, offs=rows.ends(x.device))
    rest = len(x) - sum(rows.sizes)
    parts = x.split([*rows.sizes, rest] if rest else rows.sizes)
    products = [part @ matrix for part, matrix in zip(parts, weight.unbind(0), strict=not rest)]
    return torch.cat([*products, products[0].new_zeros(rest, weight.size(2))] if rest else products)


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    return (
        x.is_cuda
        and x.dtype is weight.dtype is torch.bfloat16
        and not any(size % 8 for size in weight.shape[1:])
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
        and len(x) > 0
    )


def by_row(vectors: Tensor, rows: RowsPerExpert, number: int | None = None) -> Tensor:
    """For each of ``number`` rows (as many as the experts have, by default) the vector of its expert, of
    ``vectors`` (experts, features).
    """
    if vectors.is_meta:  # where numbers have no values
        number = sum(rows.sizes) if number is None else number
        return vectors[torch.empty(number, dtype=torch.int64, device="meta")]
    if number is None:
        number = sum(rows.sizes)
    return vectors.index_select(0, rows.expert_of(number, vectors.device))


def activated(
    wide: Tensor, bias: Tensor | None, rows: RowsPerExpert, activation: Activation | None, gated: bool = False
) -> Tensor:
    """``activation`` of ``wide`` plus the bias of each row's expert, of ``bias`` (experts, features).

    With ``gated``, the first half of the features are gates, by whose activation the others are multiplied.
    """
    kind = _KINDS.get(activation)
    if kind is not None and expert_rows.available(wide) and (bias is not None or activation is not None):
        result: Tensor = _Activated.apply(wide, bias, rows, kind, gated)
        return result
    return _composed(wide, bias, rows, activation, gated)


_KINDS: dict[Activation | None, str] = {
    None: "none",
    F.gelu: "gelu",
    F.silu: "silu",
    F.relu: "relu",
    torch.relu: "relu",
}
_FUNCTIONS: dict[str, Activation | None] = {kind: function for function, kind in _KINDS.items()}


def _composed(
    wide: Tensor, bias: Tensor | None, rows: RowsPerExpert, activation: Activation | None, gated: bool
) -> Tensor:
    if bias is not None:
        wide = wide + by_row(bias, rows, len(wide))
    if activation is None:
        return wide
    if not gated:
        return activation(wide)
    gate, up = wide.chunk(2, -1)
    return activation(gate) * up


class _Activated(torch.autograd.Function):
    """``_composed`` in one kernel for each pass, and one for the gradient of the bias."""

    @staticmethod
    def forward(
        ctx: Any, wide: Tensor, bias: Tensor | None, rows: RowsPerExpert, kind: str, gated: bool
    ) -> Tensor:
        ctx.save_for_backward(wide, bias)
        ctx.how = rows, kind, gated
        if kind == "none" and bias is not None:  # to launch a kernel of ours takes the host longer
            return wide + by_row(bias, rows, len(wide))
        expert = None if bias is None else rows.expert_of(len(wide), wide.device)
        return expert_rows.activate(wide, bias, expert, kind, gated)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        wide, bias = ctx.saved_tensors
        rows, kind, gated = ctx.how
        if torch.is_grad_enabled():  # the gradient is to be differentiated: the kernels are not
            inputs = [t for t, needed in zip((wide, bias), ctx.needs_input_grad, strict=False) if needed]
            y = _composed(wide, bias, rows, _FUNCTIONS[kind], gated)
            found = iter(torch.autograd.grad(y, inputs, grad, create_graph=True))
            of_wide, of_bias = (next(found) if needed else None for needed in ctx.needs_input_grad[:2])
            return of_wide, of_bias, None, None, None
        expert = None if bias is None else rows.expert_of(len(wide), wide.device)
        same = kind == "none" and not gated
        of_x = grad if same else expert_rows.activate_backward(grad, wide, bias, expert, kind, gated)
        of_bias = None
        if bias is not None and ctx.needs_input_grad[1]:
            of_bias = expert_rows.sum_by_expert(of_x, rows.ends(wide.device)).to(bias.dtype)
        return of_x, of_bias, None, None, None
