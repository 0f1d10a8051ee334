"""A look at checkpoints of ``save_model``, ``save_optimizer``, ``colossalai.utils`` and Hugging Face: one file, or shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from colossalai.checkpoint_io.index import CheckpointIndexFile
from colossalai.checkpoint_io.state_file import StateFile, open_state_file
from colossalai.checkpoint_io.viewing import Advance, Fault, Item, View


class FileView(View):
    """One file: weights, an optimizer's states, or a whole training checkpoint of ``colossalai.utils``."""

    form = "one file"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = open_state_file(path)
        self.items = _items(self._file)
        self.ties = self._file.ties
        self.facts = {"format": self._file.format, **self._file.facts()}

    @property
    def kind(self) -> str:
        names = self._file.top_names()
        rows = [("training", {"epoch", "model"}), ("optimizer", {"state", "param_groups"})]
        plain = "model" if self.items else "values"
        return next((kind for kind, needed in rows if needed <= names), plain)

    def prefix(self, section: str) -> str:
        return f"{section}." if self.kind == "training" else ""

    @property
    def has_checksums(self) -> bool:
        return self._file.has_checksums

    def read(self, name: str) -> Tensor:
        return self._file.read(name)

    def faults(self, advance: Advance) -> Iterator[Fault]:
        for tensor, what in self._file.faults(advance):
            yield Fault(self.path, what, tensor)


class ShardsView(View):
    """A folder with an index, as Hugging Face has them: weights, or with a file of groups an optimizer's states."""

    form = "shards with an index"

    def __init__(self, index_path: Path) -> None:
        super().__init__(index_path)
        self.index = CheckpointIndexFile.from_file(index_path)
        self._opened: dict[str, StateFile] = {}
        self.facts = {f"index: {key}": value for key, value in self.index.metadata.items()}
        for name in self._names():
            file = self._file(name)
            self.facts.setdefault("format", file.format)
            self.items += _items(file)
            self.ties |= file.ties
            if name == self.index.param_groups_file():
                self.facts |= file.facts()
        self._homes = {item.name: item.files[0] for item in self.items}

    @property
    def kind(self) -> str:
        return "model" if self.index.param_groups_file() is None else "optimizer"

    def _names(self) -> list[str]:
        groups = self.index.param_groups_file()
        return list(dict.fromkeys([*self.index.weight_map.values(), *([groups] if groups else [])]))

    def _file(self, name: str) -> StateFile:
        if name not in self._opened:
            self._opened[name] = open_state_file(self.path.parent / name)
        return self._opened[name]

    @property
    def has_checksums(self) -> bool:
        return all(self._file(name).has_checksums for name in self._names())

    def read(self, name: str) -> Tensor:
        return self._file(self._homes[name]).read(name)

    def faults(self, advance: Advance) -> Iterator[Fault]:
        yield from shard_faults(self.path, advance)


def shard_faults(index_path: Path, advance: Advance) -> Iterator[Fault]:
    """What is wrong with a folder of shards; needs no more than an index that can be read."""
    index = CheckpointIndexFile.from_file(index_path)
    groups = index.param_groups_file()
    for name in dict.fromkeys([*index.weight_map.values(), *([groups] if groups else [])]):
        path = index_path.parent / name
        try:
            file = open_state_file(path)
        except (RuntimeError, OSError) as error:
            yield Fault(path, _without(path, error), _listed(index, name))
            continue
        for tensor, what in file.faults(advance):
            yield Fault(path, what, tensor)
        present = file.top_names()
        for tensor, home in index.weight_map.items():
            if home == name and tensor not in present:
                yield Fault(path, f"the index {index_path.name} says that it is here, and it is not", tensor)


def _listed(index: CheckpointIndexFile, file: str) -> str:
    names = [name for name, home in index.weight_map.items() if home == file]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _without(path: Path, error: Exception) -> str:
    return str(error).removeprefix(f"{path} ")


def _items(file: StateFile) -> list[Item]:
    return [
        Item(name, spec.shape, spec.dtype, (file.path.name,))
        for name, spec in file.specs.items()
        if name not in file.ties
    ]


__all__ = ["FileView", "ShardsView"]
