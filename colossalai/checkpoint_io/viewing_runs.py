"""A look at a checkpoint of ``booster.save``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from colossalai.checkpoint_io.blocks import StoredFile
from colossalai.checkpoint_io.manifest import MANIFEST, left_behind, read_manifest
from colossalai.checkpoint_io.reading import Reader
from colossalai.checkpoint_io.run_state import RANDOM
from colossalai.checkpoint_io.values import decode
from colossalai.checkpoint_io.viewing import Advance, Fault, Item, View


class RunView(View):
    """Everything that a run needs to go on: ``facts`` has the plan it was written under and what the script added."""

    form = "a run (booster.save)"
    has_checksums = True
    kind = "run"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.manifest = read_manifest(folder)
        self._reader = Reader(folder, self.manifest)
        self.items = [
            Item(t.name, t.shape, t.dtype, tuple(dict.fromkeys(stored.file for stored in t.boxes)))
            for t in self.manifest.tensors.values()
        ]
        self.ties = self.manifest.ties
        self.facts = {
            "number": self.manifest.number,
            "written by": f"colossalai {self.manifest.library}, torch {self.manifest.torch}",
            "plan": self.manifest.plan,
            "extra": self.extra,
        }

    @property
    def extra(self) -> dict[str, Any]:
        """What the training script saved beside the run: the step, the epoch."""
        found = decode(self.manifest.values.get("extra", {}), "extra")
        return found if isinstance(found, dict) else {}

    def prefix(self, section: str) -> str:
        return f"{section}/"

    def read(self, name: str) -> Tensor:
        return self._reader.whole(self.manifest.tensors[name])

    def faults(self, advance: Advance) -> Iterator[Fault]:
        opened = yield from self._open()
        for tensor in self.manifest.tensors.values():
            for stored in tensor.boxes:
                file = opened[stored.file]
                if file is not None:
                    try:
                        file.check(tensor.key(stored.box), tensor.dtype, stored.box.sizes, stored.crc)
                    except (RuntimeError, OSError) as error:
                        what = str(error).removeprefix(f"{file.path} ")
                        yield Fault(file.path, what, tensor.name)
                advance(stored.box.numel * tensor.dtype.itemsize)
        yield from self._absent_ranks()
        if all(file is not None for file in opened.values()):
            for path, key in self._reader.unnamed():
                yield Fault(
                    path, f"{MANIFEST} does not name it; it was edited, or is of another save", key or None
                )

    def _open(self) -> Any:
        """The data files; None for one that cannot be read, of which all tensors are named."""
        opened: dict[str, StoredFile | None] = {}
        for name in self.manifest.files:
            opened[name] = None
            path = self.path / name
            try:
                opened[name] = StoredFile(path)
            except (RuntimeError, OSError) as error:
                what = str(error).removeprefix(f"{path} ")
                for tensor in self.manifest.tensors.values():
                    if any(stored.file == name for stored in tensor.boxes):
                        yield Fault(path, what, tensor.name)
        return opened

    def _absent_ranks(self) -> Iterator[Fault]:
        """Every rank stores its random state; one that has none was lost."""
        said = self.manifest.values.get(RANDOM)
        for rank in range(said.get("world", 0) if isinstance(said, dict) else 0):
            if f"{RANDOM}/{rank}" not in self.manifest.tensors:
                yield Fault(
                    self.path / MANIFEST, "the random state of this rank is missing", f"{RANDOM}/{rank}"
                )

    def leftovers(self) -> list[Path]:
        """Files of a save that was interrupted; the next save removes them."""
        return sorted(left_behind(self.path, set(self.manifest.files)))


__all__ = ["RunView"]
