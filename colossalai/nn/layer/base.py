"""The base of all tensor-parallel layers: their mode and mesh, and how their parameters are made.

A layer is written once.  It reads where its inputs, weights and outputs lie from a row of
``colossalai.nn.modes``; with one rank it is *plain* and calls torch's own function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from colossalai._numeric import round_up
from colossalai.constants import IS_TENSOR_PARALLEL, NUM_PARTITIONS
from colossalai.mesh import (
    Axes,
    Layout,
    Mesh,
    full_shape,
    local_shape,
    place,
    placement,
    serial_form,
    serial_tensor,
    shard,
)
from colossalai.nn.init import Initializer
from colossalai.nn.modes import TensorParallel, current, mode_serial, set_stream_position, stream_position
from colossalai.utils import get_current_device

# Initializer is one; so is any function that fills a whole tensor of the serial model.
Fill = Callable[..., Any]

FOLLOW_CONFIG = "the mode of the config"


class ParallelLayer(nn.Module):
    """Base of the layers.  ``tp`` and ``mesh`` say how it is cut; by default as the job was launched.

    A subclass bound to one mode (``Linear2D``) names it in ``mode``; with None it is serial under any launch.
    """

    mode: ClassVar[str | None] = FOLLOW_CONFIG

    def __init__(self, tp: TensorParallel | None = None, mesh: Mesh | None = None) -> None:
        super().__init__()
        self.tp, self._mesh = resolve(self, self.mode, tp, mesh)
        self.plain = self._mesh is None or self.tp.size == 1
        """Whether there is nothing to cut, so that torch's own function does."""

    @property
    def mesh(self) -> Mesh:
        assert self._mesh is not None, "a plain layer asks for no mesh"
        return self._mesh

    def _require_hidden(self) -> None:
        """Refuse to be built where the stream is between an expanding and a contracting linear."""
        tp = self.tp
        if not self.plain and tp.hidden != tp.inner and stream_position(self.mesh) == "inner":
            # the model under construction is lost; the next one begins as any other
            set_stream_position("hidden", self.mesh)
            raise ValueError(
                f"{type(self).__name__} works on the hidden layout of the stream, but the last Linear built"
                " without a role left the stream in its inner layout: Linears come in pairs, one that"
                " expands and one that contracts; build the model again with role='expand' or"
                " role='contract', or call colossalai.nn.modes.set_stream_position('hidden', mesh) before"
                " this layer"
            )

    def _check_size(self, what: str, size: int, cuts: Sequence[Axes], blocks: int = 1) -> None:
        """Refuse a size that some of ``cuts`` does not divide, naming the nearest that all do."""
        if self.plain:
            return
        step = blocks * math.lcm(*(self.mesh.group_size(*axes) for axes in cuts))
        if size % step == 0 and size > 0:
            return
        named = dict.fromkeys(" x ".join(f"{a}={self.mesh.size[a]}" for a in axes) for axes in cuts if axes)
        axes = " and ".join(named)
        fused = f" in each of {blocks} blocks" if blocks > 1 else ""
        below, above = size // step * step, round_up(size, step)
        raise ValueError(
            f"{type(self).__name__}: {what}={size} is cut by {axes}{fused} and must be a multiple of {step};"
            f" the nearest valid sizes are {f'{below} and {above}' if below else above}"
        )

    def _parameter(
        self,
        shape: tuple[int, ...],
        layout: Layout,
        fill: Fill | None,
        *,
        fan_in: int | None = None,
        fan_out: int | None = None,
        dtype: torch.dtype | None = None,
        transposed: bool = False,
    ) -> nn.Parameter:
        """A piece of a parameter of ``shape`` (as stored), filled by ``fill`` with the serial model's
        values.
        """
        local = shape if self.plain else local_shape(shape, layout, self.mesh, uneven=True)
        param = nn.Parameter(torch.empty(local, dtype=dtype, device=self._device()))
        if not self.plain:
            place(param, layout, shape, transposed=transposed)
            mark(param, self.mesh.group_size(*layout.sharded))
        if isinstance(fill, Initializer):
            fill.fill(param, self._mesh, fan_in, fan_out)
        elif fill is not None and not param.is_meta:
            whole = torch.empty(shape[::-1] if transposed else shape, dtype=dtype, device="cpu")
            with torch.no_grad():
                fill(whole, fan_in=fan_in, fan_out=fan_out)
                self._load(param, whole)
        return param

    def _device(self) -> torch.device:
        default = torch.get_default_device()
        # The documents build a model and feed it from the current device, without moving it there.
        if default.type == "cpu" and not self.plain and self.mesh.device_type == "cuda":
            return get_current_device()
        return default

    def _load(self, param: nn.Parameter, whole: Tensor) -> None:
        """Write this rank's piece of a tensor of the serial model."""
        stored = serial_form(whole.detach(), param)
        if tuple(stored.shape) != tuple(full_shape(param)):
            raise ValueError(
                f"{type(self).__name__} got a tensor of shape {tuple(whole.shape)} for a parameter of shape "
                f"{tuple(serial_form(param.new_empty(full_shape(param)), param).shape)}"
            )
        piece = stored if self.plain else shard(stored, placement(param), self.mesh, uneven=True)
        with torch.no_grad():
            param.copy_(piece)

    def _adopt(self, name: str, native: Tensor | None) -> None:
        """Make the own parameter ``name`` a piece of a native module's: values, dtype, device and marks."""
        own = getattr(self, name)
        if native is None or own is None:
            if native is not None or own is not None:
                raise ValueError(f"{type(self).__name__}: only one of both modules has a parameter {name!r}")
            return
        data = torch.empty(own.shape, dtype=native.dtype, device=native.device)
        param = nn.Parameter(data, requires_grad=native.requires_grad)
        param.__dict__.update({**native.__dict__, **own.__dict__})
        if not self.plain:
            place(param, placement(own), full_shape(own))
        if not native.is_meta:
            self._load(param, native)
        setattr(self, name, param)

    @classmethod
    @contextmanager
    def use_local_state_dict(cls) -> Iterator[None]:
        """Inside the block, ``state_dict`` gives and takes this rank's pieces; as it always does here."""
        yield

    def global_state_dict(self, prefix: str = "") -> dict[str, Tensor]:
        """The parameters of this layer as the serial model stores them, whole on every rank; all ranks must
        call it.
        """
        whole = {}
        for name, p in self.named_parameters(prefix.rstrip(".")):
            value = p.detach()
            if not self.plain:
                value = serial_tensor(value, p, self.mesh)
            whole[name] = value.clone(memory_format=torch.contiguous_format)
        return whole


def resolve(
    layer: object, mode: str | None, tp: TensorParallel | None, mesh: Mesh | None
) -> tuple[TensorParallel, Mesh | None]:
    """The mode and mesh that ``layer`` lives on: those given, or else those of the launch; it may insist on a
    mode.
    """
    who = type(layer).__name__
    if mode is None:
        return mode_serial(), None
    launched = current()
    row, mesh = (launched.tp if tp is None else tp), (launched.mesh if mesh is None else mesh)
    if mode not in (FOLLOW_CONFIG, row.mode):
        raise ValueError(
            f"{who} needs the tensor mode {mode!r}, but the mode is {row.mode!r}; launch with"
            f" parallel=dict(tensor=dict(size=..., mode={mode!r})), or use the class of colossalai.nn without"
            " a suffix, which follows the config"
        )
    if row.size > 1 and mesh is None:
        raise ValueError(f"{who} is cut into {row.size} pieces and needs a mesh: launch first, or pass mesh=")
    for axis, size in row.axes.items():
        if mesh is not None and mesh.size.get(axis, 1) != size:
            raise ValueError(
                f"{who}: the mode has axis {axis!r} of size {size}, the mesh has {mesh.size.get(axis)}"
            )
    return row, mesh


def mark(param: nn.Parameter, parts: int) -> None:
    """Note on ``param`` into how many parts it is divided, under the documented attributes."""
    setattr(param, IS_TENSOR_PARALLEL, parts > 1)
    setattr(param, NUM_PARTITIONS, parts)
