"""Tells a loss how the scores that it gets are cut.

Scores pass through the user's hands, and through wrappers that give them new names and types, before a loss
sees them. So every classifier of a job is noted while it lives, and a loss looks for the one whose scores
have the widths of what its ranks got.  Scores that no classifier made are taken to lie as the mode's own
would, if the loss knows whether they are cut along the classes; otherwise they are refused.

A width may fit by chance.  So when scores lie in a place for the first time, the ranks compare what they
have: copies must be alike, and the rows of a batch that is cut must not be, nor the classes of scores that
are cut along them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from colossalai.mesh import Axes, Layout, Mesh
from colossalai.mesh.agreement import can_compare, differ, everyone, fingerprint, project
from colossalai.mesh.layout import piece
from colossalai.nn.modes import TensorParallel


@dataclass(frozen=True)
class Logits:
    """The layout of scores (batch, sequence, classes), and the number of classes in all."""

    layout: Layout
    classes: int

    def width_at(self, coord: Mapping[str, int], mesh: Mesh) -> int:
        """How many of the classes the rank at ``coord`` holds."""
        width = self.classes
        for axis in self.layout.dims[-1]:
            width = piece(width, mesh.size[axis], coord[axis])[1]
        return width

    def widths(self, mesh: Mesh) -> set[int]:
        """How many of the classes a rank may hold."""
        found = {self.classes}
        for axis in self.layout.dims[-1]:
            parts = mesh.size[axis]
            found = {piece(n, parts, i)[1] for n in found for i in (0, parts - 1)}
        return found

    def __str__(self) -> str:
        return f"{self.classes} classes as {self.layout}"


class MakesLogits(Protocol):
    def place(self) -> Logits: ...


_noted: WeakKeyDictionary[Mesh, WeakSet[MakesLogits]] = WeakKeyDictionary()
# places of which ranks have compared the scores; alike on all tensor ranks
_compared: WeakKeyDictionary[Mesh, set[Logits]] = WeakKeyDictionary()


def note_classifier(mesh: Mesh, classifier: MakesLogits) -> None:
    _noted.setdefault(mesh, WeakSet()).add(classifier)


# rows of scores that ranks compare: all rows of a large vocabulary would need much memory
_SAMPLE = 64


class _Held(NamedTuple):
    """What one rank tells the others of the scores and labels that it was given."""

    width: int
    numbers: tuple[float, float, float]
    scores: Any
    labels: Any
    same_rows: bool
    """Whether there are as many labels as scores here, so that both may be of a batch that is not cut."""
    flat: bool
    """Whether each row has one score for all classes, as from a Linear of zeros."""
    one_row: bool
    """Whether all rows are alike."""


@dataclass(eq=False)
class LogitsFinder:
    """Finds where the scores lie that one loss or metric is given.

    ``cut`` says whether the scores are cut along the classes, and ``classes`` how many these are, where that
    is known; ``own_cut`` is ``cut`` for scores that no classifier made.
    """

    who: str
    tp: TensorParallel
    mesh: Mesh
    cut: bool | None = None
    classes: int | None = None
    own_cut: bool | None = None
    counts: bool = False
    """Whether rows are counted, so that copies of a batch would be counted several times."""
    _own: Logits | None = None
    """Where scores lay that no classifier made."""

    def find(self, logits: Tensor, targets: Tensor) -> Logits:
        """Every rank that shares the model calls this; all of them raise, or none."""
        width, here = logits.size(-1), self.mesh.coord
        place = self._only_one(width)
        done = place is not None and (place == self._own or place in _compared.get(self.mesh, ()))
        if place is not None and done and place.width_at(here, self.mesh) == width:
            return place
        if not can_compare(logits, targets):
            return self._choose([(here, width)], width)
        told = everyone(_held(logits, targets), tuple(self.tp.axes), self.mesh)
        place = self._choose([(coord, held.width) for coord, held in told], width)
        self._check_copies(place, told, logits.dtype)
        self._check_labels(place, told)
        made = place in self._noted()
        doubtful = not made and self._check_classes(place, told)
        if not made:
            self._check_whole_rows(place, told, targets)
        # a mean over copies of a batch that went through our layers uncut is right; a count of them is not,
        # and neither are gradients of scores that come from elsewhere
        if self.counts or not made:
            self._check_rows(place, told)
        if made:
            _compared.setdefault(self.mesh, set()).add(place)
        elif not doubtful:
            self._own = place
        return place

    def _noted(self) -> set[Logits]:
        return {
            place
            for place in _all_noted(self.mesh)
            if self.cut in (None, bool(place.layout.dims[-1])) and self.classes in (None, place.classes)
        }

    def _only_one(self, width: int) -> Logits | None:
        """The one place in which scores of this width may lie, if also no other rank sees a second one."""
        known = self._noted() | ({self._own} if self._own is not None else set())
        widths = {place: place.widths(self.mesh) for place in known}
        here = [found for found in widths.values() if width in found]
        alike = [place for place, found in widths.items() if any(found & other for other in here)]
        return alike[0] if len(alike) == 1 else None

    def _choose(self, widths: Sequence[tuple[Mapping[str, int], int]], width: int) -> Logits:
        """The place that fits the widths of all ranks."""
        fitting = [place for place in self._noted() if self._fits(place, widths)]
        if len(fitting) > 1:
            raise ValueError(
                f"several Classifiers of this job make scores of which this rank holds {width}"
                f" ({_listed(fitting)}); say which it is with num_classes= or vocab_parallel="
            )
        if fitting:
            return fitting[0]
        if self.own_cut is None:
            raise ValueError(
                f"no Classifier of this job makes scores of which this rank holds {width} (there are:"
                f" {_listed(_all_noted(self.mesh))}); give {self.who} what the model's Classifier returns, or"
                " say how your own scores are cut: vocab_parallel=True if each rank has some of the classes,"
                f" as {self._own_layout(True)}, and False if it has all, as {self._own_layout(False)}"
            )
        return self._own_place(widths, self.own_cut)

    def _fits(self, place: Logits, widths: Sequence[tuple[Mapping[str, int], int]]) -> bool:
        return all(place.width_at(coord, self.mesh) == width for coord, width in widths)

    def _own_layout(self, cut: bool) -> Layout:
        # as a classifier of this mode would leave them
        return self.tp.inner if cut else Layout((self.tp.hidden.dims[0], (), ()))

    def _own_place(self, widths: Sequence[tuple[Mapping[str, int], int]], cut: bool) -> Logits:
        layout = self._own_layout(cut)
        axes = layout.dims[-1]
        along = [w for coord, w in widths if all(c == 0 for a, c in coord.items() if a not in axes)]
        # in a dry run only this rank has spoken
        total = sum(along) if len(widths) > 1 else widths[0][1] * self.mesh.group_size(*axes)
        place = Logits(layout, total if self.classes is None else self.classes)
        if not self._fits(place, widths):
            raise ValueError(
                f"{self.who}: {place} give the ranks"
                f" {[place.width_at(coord, self.mesh) for coord, _ in widths]} scores of a row, but they have"
                f" {[w for _, w in widths]}; give it what the model's Classifier returns, cut your own scores"
                " like that (colossalai.mesh.shard), or change num_classes= or vocab_parallel="
            )
        return place

    def _check_copies(
        self, place: Logits, told: Sequence[tuple[dict[str, int], _Held]], dtype: torch.dtype
    ) -> None:
        """Refuse scores that differ where the place says that they are copies."""
        copies = tuple(axis for axis in self.tp.axes if axis not in place.layout.sharded)
        tolerance = math.sqrt(torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0
        for group in _groups(told, copies):
            if differ([held.numbers for held in group], tolerance):
                raise ValueError(
                    f"{self.who}: scores of {place} are alike on ranks that differ only in"
                    f" {' and '.join(copies)}, but these ranks have different ones; give it what the model's"
                    " Classifier returns, and all ranks of a model the same batch. Your own scores of part of"
                    f" the classes lie as {self._own_layout(True)} (VocabParallelCrossEntropyLoss*,"
                    f" vocab_parallel=True), those of all as {self._own_layout(False)}"
                )

    def _check_labels(self, place: Logits, told: Sequence[tuple[dict[str, int], _Held]]) -> None:
        """Refuse labels that differ on ranks with the same rows."""
        rows = place.layout.dims[0] if all(held.same_rows for _, held in told) else ()
        copies = tuple(axis for axis in self.tp.axes if axis not in rows)
        if any(held.labels != group[0].labels for group in _groups(told, copies) for held in group):
            raise ValueError(
                f"{self.who}: ranks that differ only in {' and '.join(copies)} share a model and were given"
                " different labels; give all of them the same batch, with the labels of all of its rows"
            )

    def _check_classes(self, place: Logits, told: Sequence[tuple[dict[str, int], _Held]]) -> bool:
        """Refuse scores of all classes where each rank should have its own part of them.

        Says whether the scores do not tell, since each row has only one value.
        """
        axes = tuple(axis for axis in place.layout.dims[-1] if self.mesh.size[axis] > 1)
        if not axes or len(told) == 1:
            return False
        copies = [
            group
            for group in _groups(told, axes)
            if all(held.scores == group[0].scores and math.prod(held.scores[1]) for held in group)
        ]
        if any(not group[0].flat for group in copies):
            raise ValueError(
                f"{self.who}: scores of {place} are of other classes on ranks that differ in"
                f" {' and '.join(axes)}, but these ranks have the same scores; {self._all_classes(told)}"
            )
        return bool(copies)

    def _check_whole_rows(
        self, place: Logits, told: Sequence[tuple[dict[str, int], _Held]], targets: Tensor
    ) -> None:
        """Refuse scores of all classes in a mode that cuts the rows of such scores along other axes.

        Ranks that should have other rows then have the same scores, though the labels of these rows differ.
        """
        rows, whole = place.layout.dims[0], self._own_layout(False).dims[0]
        sizes = [self.mesh.size[axis] for axis in rows]
        if not place.layout.dims[-1] or len(told) == 1 or targets.size(0) % math.prod(sizes):
            return
        if any(held.same_rows or held.one_row for _, held in told):
            return
        labels = targets.unflatten(0, (*sizes, -1)).flatten(len(sizes))[..., :_SAMPLE]
        for k, axis in enumerate(rows):
            first = labels.narrow(k, 0, 1)
            if axis in whole or not bool(((labels != first) & (labels >= 0) & (first >= 0)).any()):
                continue
            if all(held.scores == group[0].scores for group in _groups(told, (axis,)) for held in group):
                raise ValueError(
                    f"{self.who}: scores of {place} are of other rows on ranks that differ in {axis}, but"
                    f" these ranks have the same scores; {self._all_classes(told)}"
                )

    def _all_classes(self, told: Sequence[tuple[dict[str, int], _Held]]) -> str:
        return (
            f"if each rank has all {told[0][1].width} classes, use the loss without VocabParallel in its"
            " name, or vocab_parallel=False, and otherwise give each rank its own part of the classes"
            " (colossalai.mesh.shard)"
        )

    def _check_rows(self, place: Logits, told: Sequence[tuple[dict[str, int], _Held]]) -> None:
        """Refuse the scores and labels of the whole batch where each rank should have its own rows."""
        axes = tuple(axis for axis in place.layout.dims[0] if self.mesh.size[axis] > 1)
        alike = all(
            (held.scores, held.labels) == (group[0].scores, group[0].labels)
            for group in _groups(told, axes)
            for held in group
        )
        if axes and alike and all(held.same_rows for _, held in told):
            raise ValueError(
                f"{self.who}: scores of {place} are of other rows of the batch on ranks that differ in"
                f" {' and '.join(axes)}, but these ranks have the same scores and the same labels; cut the"
                " batch before the model's first layer (partition_batch), and give the loss the labels of the"
                " whole batch"
            )


def _held(logits: Tensor, targets: Tensor) -> _Held:
    sample = logits.detach().flatten(0, -2)[:_SAMPLE]
    same_rows = targets.shape == logits.shape[:-1]
    flat = bool((sample == sample[:, :1]).all())
    one_row = bool((sample == sample[:1]).all())
    labels = fingerprint(targets)
    return _Held(logits.size(-1), project(sample), fingerprint(sample), labels, same_rows, flat, one_row)


def _groups(told: Sequence[tuple[dict[str, int], _Held]], axes: Axes) -> list[list[_Held]]:
    """What ranks hold that differ only on ``axes``."""
    found: dict[tuple[int, ...], list[_Held]] = {}
    for coord, held in told:
        found.setdefault(tuple(c for a, c in coord.items() if a not in axes), []).append(held)
    return list(found.values())


def _all_noted(mesh: Mesh) -> set[Logits]:
    return {classifier.place() for classifier in _noted.get(mesh, ())}


def _listed(places: Iterable[Logits]) -> str:
    return ", ".join(sorted(map(str, places))) or "none"
