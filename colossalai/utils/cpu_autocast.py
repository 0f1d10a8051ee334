"""Asks torch which arguments of an operation its autocast for the CPU casts, and to which dtypes.

Autocast casts first, and looks at nothing but dtypes.  So the operation is given tensors with hardly any
memory, and is stopped at the first thing that it does beside casts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


def on_cpu(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of this shape on the CPU, for which torch chooses as for a real one.

    It has memory for one row, which no dispatch mode sees.
    """
    with torch._C._DisableTorchDispatch():
        made = torch.empty(tensor.shape[-1:], dtype=dtype or tensor.dtype, device="cpu").expand(tensor.shape)
        return made.requires_grad_(tensor.requires_grad)


def casts_on_cpu(
    operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, torch.dtype]:
    """Which leaves of the arguments torch's autocast for the CPU, which is on, casts, by their places, and to
    which dtypes; the first cast comes first.
    """
    args, kwargs = tree_map_only(Tensor, lambda t: on_cpu(t).requires_grad_(False), (args, kwargs))
    with _CastRecorder(tree_leaves((args, kwargs))) as casts, suppress(_CastsEndError):
        operation(*args, **kwargs)
    return casts.made


class _CastsEndError(Exception):
    """All casts are made."""


class _CastRecorder(TorchDispatchMode):
    """The dtypes that ``leaves`` are cast to before anything else is done."""

    def __init__(self, leaves: list[Any]) -> None:
        super().__init__()
        self._places = {id(leaf): place for place, leaf in enumerate(leaves)}
        self.made: dict[int, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_cast = func is torch.ops.aten._to_copy.default
        place = self._places.pop(id(args[0]), None) if is_cast else None
        if place is None:
            raise _CastsEndError
        self.made[place] = kwargs["dtype"]
        return on_cpu(args[0], kwargs["dtype"])
