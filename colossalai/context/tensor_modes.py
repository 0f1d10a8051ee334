"""The one table of tensor modes: the mesh axes of each, and the axes that every ``ParallelMode`` joins.

A job is a mesh ``(dp, ep ..., pp, sp, su, tensor axes)``, major first, so tensor ranks are neighbours; a plan
without experts or cut sequences lacks their axes.  A process group is the set of ranks that differ only on
the axes of its mode; in 2D, ``PARALLEL_2D_COL`` holds the ranks of one
column, which differ by their *row*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from colossalai.context.parallel_mode import ParallelMode
from colossalai.mesh import DATA_AXES, DATA_AXIS, EXPERT_AXES, PIPELINE_AXIS, SEQUENCE_AXES, Axes


def _line(size: int) -> tuple[int, ...]:
    return (size,)


def _square(size: int) -> tuple[int, ...]:
    side = math.isqrt(size)
    if side * side != size:
        raise ValueError(f"size {size} is not a square number; use {side**2} or {(side + 1) ** 2}")
    return (side, side)


def _layers_of_squares(size: int, depth: int) -> tuple[int, ...]:
    if size % depth:
        raise ValueError(f"size {size} cannot be divided by depth {depth}")
    side = math.isqrt(size // depth)
    if side * side * depth != size:
        raise ValueError(
            f"size / depth = {size} / {depth} = {size // depth} is not a square number; "
            f"with depth {depth} use {depth * side**2} or {depth * (side + 1) ** 2}"
        )
    return (depth, side, side)


def _cube(size: int) -> tuple[int, ...]:
    side = round(size ** (1 / 3))
    if side**3 != size:
        below = side - 1 if side**3 > size else side
        near = [str(n**3) for n in (below, below + 1) if n > 0]
        raise ValueError(f"size {size} is not a cubic number; use {' or '.join(near)}")
    return (side, side, side)


@dataclass(frozen=True, kw_only=True)
class TensorMode:
    """One row: how a size is cut into axes, which modes exist, and what ``tensor_parallel_env`` says about
    it.
    """

    axes: Axes
    cut: Callable[..., tuple[int, ...]] = _line
    options: tuple[str, ...] = ()
    """Further sizes that the config must name."""
    flags: tuple[str, ...] = ()
    """What the config may switch on with True."""
    modes: Mapping[ParallelMode, Axes] = field(default_factory=dict)
    # field of tensor_parallel_env -> an axis, whose size it holds, or a ParallelMode
    env: Mapping[str, str | ParallelMode] = field(default_factory=dict)

    def sizes(self, size: int, **options: int) -> dict[str, int]:
        return dict(zip(self.axes, self.cut(size, **options), strict=True))

    def env_fields(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        return {name: sizes[v] if isinstance(v, str) else v for name, v in self.env.items()}


# The row of a mode that a user adds, and of no mode at all.
PLAIN = TensorMode(axes=("tp",))

TENSOR_MODES: dict[str | None, TensorMode] = {
    None: PLAIN,
    "1d": TensorMode(axes=("tp",), flags=("sequence_parallel",), modes={ParallelMode.PARALLEL_1D: ("tp",)}),
    "2d": TensorMode(
        axes=("row", "col"),
        cut=_square,
        modes={ParallelMode.PARALLEL_2D_COL: ("row",), ParallelMode.PARALLEL_2D_ROW: ("col",)},
        env={"summa_dim": "row"},
    ),
    "2.5d": TensorMode(
        axes=("dep", "row", "col"),
        cut=_layers_of_squares,
        options=("depth",),
        modes={
            ParallelMode.PARALLEL_2P5D_COL: ("row",),
            ParallelMode.PARALLEL_2P5D_ROW: ("col",),
            ParallelMode.PARALLEL_2P5D_DEP: ("dep",),
            ParallelMode.PARALLEL_2P5D_XZ: ("dep", "row"),
        },
        env={"tesseract_dim": "row", "tesseract_dep": "dep"},
    ),
    "3d": TensorMode(
        axes=("l", "j", "i"),
        cut=_cube,
        modes={
            ParallelMode.PARALLEL_3D_WEIGHT: ("i",),
            ParallelMode.PARALLEL_3D_INPUT: ("j",),
            ParallelMode.PARALLEL_3D_OUTPUT: ("l",),
            ParallelMode.PARALLEL_3D_INPUT_X_WEIGHT: ("j", "i"),
            ParallelMode.PARALLEL_3D_OUTPUT_X_WEIGHT: ("l", "i"),
        },
        env={
            "depth_3d": "l",
            "input_group_3d": ParallelMode.PARALLEL_3D_INPUT,
            "weight_group_3d": ParallelMode.PARALLEL_3D_WEIGHT,
            "output_group_3d": ParallelMode.PARALLEL_3D_OUTPUT,
            "input_x_weight_group_3d": ParallelMode.PARALLEL_3D_INPUT_X_WEIGHT,
            "output_x_weight_group_3d": ParallelMode.PARALLEL_3D_OUTPUT_X_WEIGHT,
        },
    ),
    # the ranks that cut the sequence are the tensor ranks
    "sequence": TensorMode(axes=SEQUENCE_AXES[:1]),
}

# What a plan has whose mesh has axes that cut the sequence, be it by this mode or beside another.
SEQUENCE_MODES = (ParallelMode.SEQUENCE, ParallelMode.SEQUENCE_DP)

# What a plan has that shares experts out.
EXPERT_MODES = (ParallelMode.MOE_MODEL, ParallelMode.MOE_DATA)


def tensor_mode(name: str | None) -> TensorMode:
    return TENSOR_MODES.get(name, PLAIN)


def mode_axes(name: str | None, mesh_axes: Axes) -> dict[ParallelMode, Axes]:
    """The axes that each parallel mode joins when the tensor mode is ``name`` and the mesh has
    ``mesh_axes``.
    """
    row = tensor_mode(name)
    data = tuple(axis for axis in mesh_axes if axis in DATA_AXES)
    sequence = tuple(axis for axis in mesh_axes if axis in SEQUENCE_AXES)
    experts = tuple(axis for axis in mesh_axes if axis in EXPERT_AXES)
    return {
        ParallelMode.GLOBAL: mesh_axes,
        ParallelMode.DATA: data,
        ParallelMode.MODEL: tuple(axis for axis in mesh_axes if axis not in data),
        ParallelMode.PIPELINE: (PIPELINE_AXIS,),
        ParallelMode.TENSOR: row.axes,
        **row.modes,
        **(dict(zip(SEQUENCE_MODES, (sequence, data + sequence), strict=True)) if sequence else {}),
        **(dict(zip(EXPERT_MODES, (experts, (DATA_AXIS,)), strict=True)) if experts else {}),
    }


def creators(mode: ParallelMode) -> list[str]:
    """The tensor modes whose config creates ``mode``."""
    if mode in SEQUENCE_MODES:
        return ["sequence"]
    if mode in EXPERT_MODES:
        return ["moe"]
    return [name for name, row in TENSOR_MODES.items() if name is not None and mode in row.modes]
