"""``DTensor``: a piece of a tensor that knows its layout on a grid of devices.

The object is the piece: ``shape``, ``data`` and ``grad`` are those of this rank, and what is written in
place, as by an optimizer that works element by element, goes there.  Any other function computes with the
whole tensor, which all ranks of the grid bring together for it, so results and gradients are those of one
device; for products of pieces use :mod:`colossalai.nn` or ``ColoTensor``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from colossalai.mesh import shard
from colossalai.mesh._compat import plain_torch
from colossalai.tensor.colo_tensor import is_about_memory, is_in_place, map_values
from colossalai.tensor.d_tensor.layout import DeviceLayout
from colossalai.tensor.d_tensor.layout_converter import LayoutConverter
from colossalai.tensor.sharding_spec import ShardingSpec, ShardingSpecException

_SAME_LAYOUT = (Tensor.detach, Tensor.requires_grad_, Tensor.clone)
_TURNED = ("T", "mT", "H", "mH")  # attributes that are functions: their dims are not those of the layout


class DTensor(Tensor):
    """A tensor whose pieces lie on a grid of devices.

    Args:
        local_tensor: this rank's piece; memory is shared, and gradients reach it.
        dist_layout: how the whole lies.
    """

    dist_layout: DeviceLayout

    def __new__(cls, local_tensor: Tensor, dist_layout: DeviceLayout) -> DTensor:
        with plain_torch():
            expected = dist_layout.get_sharded_shape_per_device()
            if tuple(local_tensor.shape) != expected:
                raise ShardingSpecException(
                    f"a piece of {dist_layout} has the shape {expected}, got {tuple(local_tensor.shape)};"
                    " distribute_tensor cuts a whole tensor"
                )
            made = local_tensor.as_subclass(cls)
        made.dist_layout = dist_layout
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_in_place(func):
            _check_same_pieces(func, args)
        elif not _is_local(func):
            args, kwargs = map_values(_whole, (args, kwargs))
        with plain_torch():
            result = func(*args, **kwargs)
            if func in _SAME_LAYOUT and result is not args[0]:
                return DTensor(result.as_subclass(Tensor), args[0].dist_layout)
        return result

    def to_local(self) -> Tensor:
        """This rank's piece as a plain tensor with the same memory."""
        with plain_torch():
            return self.as_subclass(Tensor)

    def to_global(self) -> Tensor:
        """The whole tensor on every rank; all ranks of the grid call it."""
        layout = self.dist_layout
        whole = layout.with_spec(ShardingSpec(len(layout.entire_shape)))
        return LayoutConverter().apply(self.to_local(), layout, whole)

    def layout_convert(self, target_layout: DeviceLayout) -> DTensor:
        """The same tensor in another layout; all ranks of the grid call it."""
        moved = LayoutConverter().apply(self.to_local(), self.dist_layout, target_layout)
        return DTensor(moved, target_layout)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            twin = DTensor(copy.deepcopy(self.to_local().detach(), memo), self.dist_layout)
            is_parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(twin, self.requires_grad) if is_parameter else twin
        found: Tensor = memo[id(self)]
        return found

    def __repr__(self) -> str:  # type: ignore[override]
        # without the others: one rank alone may print
        return f"DTensor({self.to_local()!r}, {self.dist_layout})"


def _is_local(func: Callable[..., Any]) -> bool:
    """Whether a function is about the piece: its memory, not the numbers of the whole."""
    if func.__name__ == "__get__":
        return getattr(func, "__self__", func).__name__ not in _TURNED
    return is_about_memory(func) or func in _SAME_LAYOUT or func.__name__.endswith("_like")


def _whole(value: Any) -> Any:
    return value.to_global() if isinstance(value, DTensor) else value


def _check_same_pieces(func: Callable[..., Any], args: Any) -> None:
    """Refuse to write something into a piece that is not cut as it is."""
    target = args[0]
    for other in args[1:] if isinstance(target, DTensor) else ():
        if isinstance(other, Tensor) and other.numel() > 1 and other.shape != target.shape:
            raise ShardingSpecException(
                f"{func.__name__} writes into the piece of a DTensor, of shape {tuple(target.shape)}, a"
                f" tensor of shape {tuple(other.shape)}: cut it first, as {target.dist_layout}"
            )
        if isinstance(other, DTensor) and other.dist_layout != target.dist_layout:
            raise ShardingSpecException(
                f"{func.__name__}: {other.dist_layout} is not {target.dist_layout}; use layout_convert"
            )


def distribute_tensor(tensor: Tensor, dist_layout: DeviceLayout) -> DTensor:
    """This rank's piece of a tensor that every rank holds whole; no communication."""
    if tuple(tensor.shape) != dist_layout.entire_shape:
        raise ShardingSpecException(f"a tensor of shape {tuple(tensor.shape)} does not fit {dist_layout}")
    if dist_layout.sharding_spec.partial:
        raise ShardingSpecException(f"{dist_layout}: a whole tensor has no pieces that add up to it")
    piece = shard(tensor, dist_layout.sharding_spec.layout, dist_layout.device_mesh.mesh)
    return DTensor(piece.to(dist_layout.device_type), dist_layout)


def distribute_module(
    module: nn.Module, partition_fn: Callable[[str, nn.Parameter], DeviceLayout | None] | None = None
) -> nn.Module:
    """Cut the parameters of a module, which every rank holds whole, in place.

    ``partition_fn(name, parameter)`` gives the layout of each, or None for one that stays as it is; without
    it nothing is cut.  A parameter that several modules share stays shared.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, owner in module.named_modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter not in made:
                full_name = f"{path}.{name}" if path else name
                layout = partition_fn(full_name, parameter) if partition_fn is not None else None
                made[parameter] = parameter
                if layout is not None:
                    piece = distribute_tensor(parameter.detach(), layout)
                    made[parameter] = nn.Parameter(piece, parameter.requires_grad)
            owner.register_parameter(name, made[parameter])
    return module


def construct_default_sharding_spec(tensor: Tensor) -> ShardingSpec:
    """The spec of a tensor that is whole on every rank."""
    return ShardingSpec(tensor.ndim)
