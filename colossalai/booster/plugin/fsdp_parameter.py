"""``CutParameter``: a parameter under FSDP2, where every write of a script works or raises an error.

torch takes 2 seconds to import ``DTensor``, so this module is imported by the functions that need it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from colossalai.utils import copy_tensor_parallel_attributes
from colossalai.zero.absent_tensors import REASON, away_class


class CutParameter(DTensor):
    """A ``DTensor`` that takes ``p.data = values`` and refuses hooks that FSDP2 never calls.

    FSDP2 computes with whole weights of its own, so autograd never sees this parameter.
    """

    @property
    def data(self) -> Any:
        return torch._C.TensorBase.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, values: Tensor) -> None:
        # on a DTensor the setter of torch has no effect at all
        if values.shape != self.shape or values.dtype != self.dtype:
            raise RuntimeError(
                f"p.data = ... of a parameter of shape {tuple(self.shape)} and {self.dtype} under"
                f" TorchFSDPPlugin needs values of the same shape and dtype, got {tuple(values.shape)} and"
                f" {values.dtype}"
            )
        with torch.no_grad():
            self._local_tensor.copy_(cut_like(self, values)._local_tensor)

    def register_hook(self, hook: Any) -> Any:
        raise RuntimeError(
            f"register_hook on a parameter of shape {tuple(self.shape)} under TorchFSDPPlugin would never be"
            " called: autograd sees the gathered weight. Use register_post_accumulate_grad_hook, which finds"
            " the averaged gradient in p.grad"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = self.detach().clone()
            copied.requires_grad_(self.requires_grad)
            if self.grad is not None:
                copied.grad = self.grad.detach().clone()
            copy_tensor_parallel_attributes(self, copied)
            memo[id(self)] = _as_parameter(copied)
        return memo[id(self)]


def _as_parameter(tensor: Any) -> Any:
    tensor.__class__ = CutParameter
    tensor._is_param = True
    return tensor


def refuse_local_numbers() -> None:
    """Let no ``DTensor`` whose value is still to be summed over the ranks show this rank's part of it as a
    number.

    ``p.grad.norm()`` of a gradient that is cut is such a tensor, and torch's ``float()`` of it is the norm of
    the part.
    """
    for name in ("item", "__float__", "__int__", "__bool__"):
        if name not in DTensor.__dict__:
            setattr(DTensor, name, _checked(name))


def _checked(name: str) -> Any:
    def number(self: Any) -> Any:
        if any(p.is_partial() for p in self.placements):
            raise RuntimeError(
                f"{name.strip('_')}() of a DTensor of which every rank has a part that is not summed yet (a"
                " norm or sum of a weight or gradient that TorchFSDPPlugin has cut): call .full_tensor() on"
                " every rank first"
            )
        return getattr(Tensor, name)(self)

    return number


def cut_like(param: Any, values: Any) -> DTensor:
    """``values``, whole on every rank or cut already, cut as ``param`` is."""
    if isinstance(values, DTensor):
        same = (values.device_mesh, values.placements) == (param.device_mesh, param.placements)
        return values if same else values.redistribute(param.device_mesh, param.placements)
    return distribute_tensor(
        values.to(param.device_mesh.device_type), param.device_mesh, param.placements, src_data_rank=None
    )


def check_hooks(module: nn.Module) -> None:
    """Refuse hooks that would be lost."""
    for name, p in module.named_parameters():
        if p._backward_hooks:
            raise ValueError(
                f"the parameter {name!r} has a hook of register_hook, which TorchFSDPPlugin cannot call:"
                " autograd sees the gathered weight. Use register_post_accumulate_grad_hook, which finds the"
                " averaged gradient in p.grad"
            )


def guard(name: str, old: nn.Parameter, new: Any) -> None:
    """Make ``new``, by which FSDP2 has replaced ``old``, a ``CutParameter`` with the hooks of ``old``, which
    refuses to be used from now on.
    """
    new.__class__ = CutParameter
    if hooks := getattr(old, "_post_accumulate_grad_hooks", None):
        new._post_accumulate_grad_hooks = (
            hooks  # the same object: the handles that the user has still remove them
        )
    setattr(
        old,
        REASON,
        f"the parameter {name!r} that the model had before boost. TorchFSDPPlugin has put another in its"
        " place: take it from model.parameters() again (an optimizer, a list or a closure still has the old"
        " one)",
    )
    old.__class__ = _retired(type(old))


@cache
def _retired(native: type) -> type:
    """The class of parameters that are not in use any more; also that there is no gradient would be a wrong
    answer.
    """

    def get(self: Any) -> Any:
        raise RuntimeError(f"p.grad asks for {getattr(self, REASON)}")

    def put(self: Any, value: Any) -> None:
        get(self)

    return type(native.__name__, (away_class(native),), {"grad": property(get, put)})
