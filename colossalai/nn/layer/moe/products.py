"""Products of rows with the weights of their experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from colossalai._numeric import autocast_dtype


class RowsPerExpert:
    """How many rows each expert has, one expert after the other; as numbers of the host, or of the device.

    Numbers of the device are read only by those who need them on the host, since this waits for the device.
    """

    def __init__(self, numbers: Sequence[int] | Tensor) -> None:
        self._tensor = numbers if isinstance(numbers, Tensor) else None
        self._sizes = None if isinstance(numbers, Tensor) else list(numbers)

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


def grouped_product(x: Tensor, weight: Tensor, rows: RowsPerExpert) -> Tensor:
    """``x`` (rows, in), of which each expert has the next ``rows``, times its matrix of ``weight`` (experts,
    in, out).

    One kernel computes all products where torch has one: on GPUs since Hopper, in bf16, with rows of a
    multiple of 16 bytes.  Elsewhere they are computed one by one.
    """
    if (dtype := autocast_dtype(x.device)) is not None:
        x, weight = (t.to(dtype) for t in (x, weight))
    if _has_kernel(x, weight):
        return F.grouped_mm(x, weight, offs=rows.on(x.device).cumsum(0, dtype=torch.int32))
    parts = x.split(rows.sizes)
    return torch.cat([part @ matrix for part, matrix in zip(parts, weight.unbind(0), strict=True)])


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    return (
        x.is_cuda
        and x.dtype is weight.dtype is torch.bfloat16
        and not any(size % 8 for size in weight.shape[1:])
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
        and len(x) > 0
    )


def by_row(vectors: Tensor, rows: RowsPerExpert) -> Tensor:
    """For each row the vector of its expert, of ``vectors`` (experts, features)."""
    if vectors.is_meta:  # where numbers have no values
        return vectors[torch.empty(sum(rows.sizes), dtype=torch.int64, device="meta")]
    return vectors.repeat_interleave(rows.on(vectors.device), dim=0)
