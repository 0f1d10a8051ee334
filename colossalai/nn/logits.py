"""How a loss knows where the scores it gets lie.

Scores pass through the user's hands, and through wrappers that give them new names and types, before a loss sees them.
So a classifier notes, when it is built, the width of the scores that this rank will hold and where they lie; a loss looks
the width up.  Two classifiers whose scores have one width but lie differently are told apart by saying so to the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from colossalai.mesh import Layout, Mesh, local_range


@dataclass(frozen=True)
class Logits:
    """Where scores (batch, sequence, classes) lie, and how many classes there are in all."""

    layout: Layout
    classes: int

    def width(self, mesh: Mesh) -> int:
        """How many of the classes this rank holds."""
        return local_range(self.classes, self.layout.dims[-1], mesh, uneven=True)[1]


_noted: WeakKeyDictionary[Mesh, set[Logits]] = WeakKeyDictionary()


def note_logits(mesh: Mesh, logits: Logits) -> None:
    _noted.setdefault(mesh, set()).add(logits)


def find_logits(mesh: Mesh, width: int, *, cut: bool | None = None, classes: int | None = None) -> Logits:
    """The scores of ``width`` classes that a classifier of this process makes; ``cut`` and ``classes`` narrow it down."""
    noted = _noted.get(mesh, set())
    found = [
        logits
        for logits in noted
        if logits.width(mesh) == width
        and cut in (None, bool(logits.layout.dims[-1]))
        and classes in (None, logits.classes)
    ]
    if len(found) == 1:
        return found[0]
    known = ", ".join(sorted(f"{n.classes} classes as {n.layout}" for n in noted)) or "none"
    problem = "no Classifier of this job makes" if not found else "several Classifiers of this job make"
    raise ValueError(
        f"{problem} scores of which this rank holds {width} (there are: {known}); give the loss what the model's Classifier "
        "returns, or say which it is with num_classes= or vocab_parallel="
    )
