"""Tells a loss how the scores that it gets are cut.

Scores pass through the user's hands, and through wrappers that give them new names and types, before a loss
sees them. So every classifier of a job is noted while it lives, and a loss asks for the one whose scores have
the width of what it got.  Two classifiers that a width does not tell apart are told apart by saying so to the
loss; all ranks agree on whether they need to be, although uneven pieces differ in width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

from colossalai.mesh import Layout, Mesh
from colossalai.mesh.layout import piece


@dataclass(frozen=True)
class Logits:
    """The layout of scores (batch, sequence, classes), and the number of classes in all."""

    layout: Layout
    classes: int

    def widths(self, mesh: Mesh) -> set[int]:
        """How many of the classes a rank may hold."""
        found = {self.classes}
        for axis in self.layout.dims[-1]:
            parts = mesh.size[axis]
            found = {piece(n, parts, i)[1] for n in found for i in (0, parts - 1)}
        return found


class MakesLogits(Protocol):
    def place(self) -> Logits: ...


_noted: WeakKeyDictionary[Mesh, WeakSet[MakesLogits]] = WeakKeyDictionary()


def note_classifier(mesh: Mesh, classifier: MakesLogits) -> None:
    _noted.setdefault(mesh, WeakSet()).add(classifier)


def find_logits(mesh: Mesh, width: int, *, cut: bool | None = None, classes: int | None = None) -> Logits:
    """The scores of ``width`` classes that a classifier of this job makes; ``cut`` and ``classes`` narrow it
    down.
    """
    noted = {classifier.place() for classifier in _noted.get(mesh, ())}
    wanted = {
        place: place.widths(mesh)
        for place in noted
        if cut in (None, bool(place.layout.dims[-1])) and classes in (None, place.classes)
    }
    here = [widths for widths in wanted.values() if width in widths]
    # also those that only other ranks would confuse with it: all ranks must raise, or none
    alike = [place for place, widths in wanted.items() if any(widths & other for other in here)]
    if len(alike) == 1:
        return alike[0]
    known = ", ".join(sorted(f"{n.classes} classes as {n.layout}" for n in noted)) or "none"
    problem = "no Classifier of this job makes" if not alike else "several Classifiers of this job make"
    raise ValueError(
        f"{problem} scores of which this rank holds {width} (there are: {known}); give the loss what the"
        " model's Classifier returns, or say which it is with num_classes= or vocab_parallel="
    )
