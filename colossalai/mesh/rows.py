"""The row axes of a mesh: their ranks compute with different tokens, and average what they learn.

Data, experts and cut sequences are such axes.  A rank holds its weights whole along a row axis, or, of
experts, some of them.  Gradients of a parameter are averaged over the row axes that do not cut it; whatever
averages, or starts replicas alike, asks here which those are.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from colossalai.mesh.mesh import EXPERT_AXES, ROW_AXES, SEQUENCE_AXES, Axes, Mesh
from colossalai.mesh.parameter import placement


def row_axes(mesh: Mesh) -> Axes:
    """The row axes that ``mesh`` has, major first."""
    return tuple(axis for axis in mesh.size if axis in ROW_AXES)


def sequence_axes(mesh: Mesh) -> Axes:
    """The axes of ``mesh`` that cut sequences: their ranks are given the same batch."""
    return tuple(axis for axis in mesh.size if axis in SEQUENCE_AXES)


def expert_axes(mesh: Mesh, experts: int | None = None) -> Axes:
    """The axes of ``mesh`` over which experts are shared out; those over which ``experts`` are, if there are
    fewer than ranks: the minor ones, so that their ranks are neighbours.
    """
    every = tuple(axis for axis in mesh.size if axis in EXPERT_AXES)
    ranks = mesh.group_size(*every)
    if experts is None or experts % ranks == 0:
        return every
    if ranks % experts:
        raise ValueError(
            f"{experts} experts and {ranks} ranks that share them (parallel.moe.size) do not divide each"
            f" other; use a number of experts that is a multiple or a factor of {ranks}"
        )
    found: list[str] = []
    for axis in reversed(every):
        if experts % mesh.size[axis] == 0:
            experts //= mesh.size[axis]
            found.insert(0, axis)
    return tuple(found)


def averaging_axes(param: Tensor, mesh: Mesh) -> Axes:
    """The axes over which the gradient of ``param`` is averaged: the row axes that do not cut it."""
    cut = placement(param).sharded
    return tuple(axis for axis in row_axes(mesh) if axis not in cut)


def averaging_choices(mesh: Mesh) -> list[Axes]:
    """All axes over which gradients may be averaged, whatever the numbers of experts of the layers: their
    process groups are made by all ranks at the launch, as a stage of a pipeline may lack such layers.
    """
    ranks = mesh.group_size(*expert_axes(mesh))
    cuts = {expert_axes(mesh, experts) for experts in range(1, ranks + 1) if ranks % experts == 0}
    return sorted(tuple(axis for axis in row_axes(mesh) if axis not in cut) for cut in cuts)


def by_averaging_axes(params: Iterable[Tensor], mesh: Mesh) -> dict[Axes, list[Tensor]]:
    """Parameters by the axes over which their gradients are averaged; the same groups in the same order on
    every rank, of which some may hold nothing here.
    """
    found: dict[Axes, list[Tensor]] = {}
    for param in params:
        found.setdefault(averaging_axes(param, mesh), []).append(param)
    return dict(sorted(found.items()))
