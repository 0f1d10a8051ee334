"""``ColoParameter`` is to ``ColoTensor`` what ``torch.nn.Parameter`` is to a tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from colossalai.tensor.colo_tensor import ColoTensor, is_about_memory, is_in_place, map_values
from colossalai.tensor.param_op_hook import ColoParamOpHookManager, run_with_hooks
from colossalai.tensor.pieces import as_piece
from colossalai.tensor.serialization import build
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
        if spec is None and isinstance(data, ColoTensor):
            spec = data.spec()
        tensor = ColoTensor(torch.empty(0) if data is None else as_piece(data).detach(), spec)
        where = tensor.process_group, tensor.placement, tensor.compute_spec
        return build(cls, tensor.data, requires_grad, *where, {})

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not ColoParamOpHookManager.hooks or is_about_memory(func) or is_in_place(func):
            return super().__torch_function__(func, types, args, kwargs)
        params: list[Tensor] = []

        def note(value: Any) -> Any:
            if isinstance(value, ColoParameter) and all(value is not p for p in params):
                params.append(value)
            return value

        map_values(note, (args, kwargs or {}))
        run = partial(super().__torch_function__, func, types)
        return run_with_hooks(run, params, args, kwargs or {})

    @staticmethod
    def from_torch_tensor(  # type: ignore[override]
        tensor: Tensor, requires_grad: bool = True, spec: ColoTensorSpec | None = None
    ) -> ColoParameter:
        """``ColoParameter(tensor, requires_grad, spec)``."""
        return ColoParameter(tensor, requires_grad, spec)
