"""``ColoParameter`` is to ``ColoTensor`` what ``torch.nn.Parameter`` is to a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from colossalai.tensor.colo_tensor import ColoTensor, build
from colossalai.tensor.tensor_spec import ColoTensorSpec


class ColoParameter(ColoTensor, torch.nn.Parameter):
    """A ColoTensor that a module lists among its parameters.

    Args:
        data: this rank's piece, or the whole tensor if ``spec`` says that it is not cut.  Memory is shared.
        spec: by default whole on every rank of the job.
    """

    def __new__(
        cls, data: Tensor | None = None, requires_grad: bool = True, spec: ColoTensorSpec | None = None
    ) -> ColoParameter:
        tensor = ColoTensor(torch.empty(0) if data is None else data.detach(), spec)
        new = build(
            cls, tensor.data, requires_grad, tensor.process_group, tensor.placement, tensor.compute_spec, {}
        )
        assert isinstance(new, cls)
        return new

    @staticmethod
    def from_torch_tensor(  # type: ignore[override]
        tensor: Tensor, requires_grad: bool = True, spec: ColoTensorSpec | None = None
    ) -> ColoParameter:
        """``ColoParameter(tensor, requires_grad, spec)``."""
        return ColoParameter(tensor, requires_grad, spec)
