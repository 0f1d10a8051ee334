"""Plan which rank writes which boxes: each rank tells what it holds, and all compute the same plan.

The plan does not ask why a box is on several ranks (data parallelism, an axis that does not cut it, tied
stages): of the ranks that hold it, the one with the least to write so far writes it; of buffers, whose copies
may differ, the first rank.  The same comparison finds what would make a checkpoint wrong, before anything is
written.

[Note: what stages share]
Pipeline stages may share a parameter, under different names.  The first rank that holds it names it, and its
states too, of which that rank may hold none: under ZeRO each owns a slice of a parameter, or nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from colossalai.checkpoint_io.boxes import Box, Shape, disjoint, overlap
from colossalai.checkpoint_io.held_tensors import HeldTensor


class TensorOutline(NamedTuple):
    """A held tensor without its values, as ranks send it to each other."""

    name: str
    shape: Shape
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    shared: tuple[int, int] | None
    stage: int | None
    aliases: tuple[str, ...]
    by_first: bool


class PlannedTensor(NamedTuple):
    """A tensor that all ranks together hold."""

    shape: Shape
    dtype: torch.dtype
    writers: dict[Box, int]
    holders: dict[Box, list[int]]
    """Without common elements, and each a part of a box of every holder."""

    def written_by(self, rank: int) -> list[Box]:
        return [box for box, writer in self.writers.items() if writer == rank]


@dataclass
class WritePlan:
    """What all ranks hold.  ``tensors`` are stored; ``ties`` are further names of them."""

    tensors: dict[str, PlannedTensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(math.prod(t.shape) * t.dtype.itemsize for t in self.tensors.values())


def outline(entries: Sequence[HeldTensor]) -> list[TensorOutline]:
    return [
        TensorOutline(
            e.name,
            e.shape,
            e.dtype,
            tuple(p.box for p in e.pieces),
            e.shared,
            e.stage,
            tuple(e.aliases),
            e.by_first,
        )
        for e in entries
    ]


def make_write_plan(held: Sequence[Sequence[TensorOutline]]) -> WritePlan:
    """The plan of all ranks from what each holds; what cannot be stored is refused."""
    result = WritePlan()
    shared_names: dict[tuple[str, tuple[int, int]], str] = {}
    found: dict[str, tuple[TensorOutline, int, dict[Box, list[int]]]] = {}
    for rank, described in enumerate(held):
        for one in described:
            name = one.name
            if one.shared is not None:  # [Note: what stages share]
                section, param, state = _parts(name)
                param = shared_names.setdefault((_number(section), one.shared), param)
                name = "/".join(filter(None, (section, param, state)))
            for alias in {one.name, *one.aliases} - {name}:
                result.ties[alias] = name
            first, first_rank, holders = found.setdefault(name, (one, rank, {}))
            _check_same(name, first, first_rank, one, rank)
            if (twice := overlap(one.boxes)) is not None:
                raise ValueError(
                    f"rank {rank} holds elements of {name} twice: in {twice[0]} and in {twice[1]}"
                )
            for box in one.boxes:
                holders.setdefault(box, []).append(rank)
    load = [0] * len(held)
    for name, (first, _, held_boxes) in found.items():
        # ranks may cut what they all hold at different places: a replicated weight lies in chunks of Gemini
        # behind pieces of different sizes
        holders = disjoint(held_boxes)
        _check_cover(name, first.shape, list(holders))
        writers = {
            box: _lightest(ranks[:1] if first.by_first else ranks, load, box, first.dtype)
            for box, ranks in sorted(holders.items())
        }
        result.tensors[name] = PlannedTensor(first.shape, first.dtype, writers, holders)
    result.ties = {alias: name for alias, name in result.ties.items() if alias not in result.tensors}
    return result


def _parts(name: str) -> tuple[str, str, str]:
    """The section, the parameter, and which of its states it is: nothing for a weight."""
    section, _, rest = name.partition("/")
    param, _, state = rest.rpartition("/") if "/" in rest else (rest, "", "")
    return section, param, state


def _number(section: str) -> str:
    """Which of several models ``section`` is of, as a word: ``model2`` and ``optimizer2`` belong together."""
    return section.removeprefix("model").removeprefix("optimizer")


def _lightest(ranks: list[int], load: list[int], box: Box, dtype: torch.dtype) -> int:
    writer = min(ranks, key=lambda rank: (load[rank], rank))
    load[writer] += box.numel * dtype.itemsize
    return writer


def _check_same(name: str, first: TensorOutline, first_rank: int, other: TensorOutline, rank: int) -> None:
    if (first.shape, first.dtype) != (other.shape, other.dtype):
        raise ValueError(
            f"{name} is {first.dtype} of shape {first.shape} on rank {first_rank} and {other.dtype} of shape"
            f" {other.shape} on"
            f" rank {rank}; one name is one tensor"
        )
    apart = None not in (first.stage, other.stage) and first.stage != other.stage
    if apart and (first.shared is None or first.shared != other.shared):
        raise ValueError(
            f"the pipeline stages {first.stage} and {other.stage} (ranks {first_rank} and {rank}) both have a"
            f" parameter {name},"
            " and do not share it: so their names are not those of the whole model. Build the stages with"
            " PipelinableContext or build_pipeline_model, or give the stage a method serial_name(name) that"
            " returns the"
            " name in the whole model; share tied parameters by PipelineSharedModuleWrapper"
        )


def _check_cover(name: str, shape: Shape, boxes: list[Box]) -> None:
    """All elements must be there."""
    count, total = sum(box.numel for box in boxes), math.prod(shape)
    outside = [box for box in boxes if any(end > size for end, size in zip(box.ends, shape, strict=True))]
    if outside or count != total:
        raise ValueError(
            f"the ranks hold {count} of the {total} elements of {name} (shape {shape}) in {len(boxes)} boxes;"
            " all must be there"
            f"{f', and {outside[0]} is outside' if outside else ''}"
        )
