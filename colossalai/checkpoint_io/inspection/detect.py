"""Which checkpoints a path means, and of what form they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from colossalai.checkpoint_io.files.sharding import INDEX_SUFFIX, CheckpointIndexFile, FileKind, add_variant
from colossalai.checkpoint_io.inspection.views import (
    Advance,
    Fault,
    FileView,
    RunView,
    ShardsView,
    View,
    shard_faults,
)
from colossalai.checkpoint_io.runs.manifest import MANIFEST, checkpoints, is_checkpoint


def find_forms(path: Path) -> list[Path]:
    """The checkpoints that ``path`` means, oldest first: itself, or what lies in that folder.

    A checkpoint of a run is its folder, a folder with an index is the index, and a file is itself.
    """
    if path.is_file():
        return [path.parent if path.name == MANIFEST else path]
    if not path.is_dir():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    if is_checkpoint(path):
        return [path]
    names = [name for kind in FileKind for name in kind.value]
    single = [p for n in names for p in (path / n, *sorted(path.glob(add_variant(n, "*")))) if p.is_file()]
    shards = {p for p in path.glob(f"*{INDEX_SUFFIX.removesuffix('.json')}*.json") if p.is_file()}
    if found := [*sorted(shards), *(p for p in single if p.name not in _members(shards))]:
        return found
    runs = checkpoints(path) or [p for p in sorted(path.iterdir()) if is_checkpoint(p)]
    if not runs:
        raise FileNotFoundError(
            f"{path} holds no checkpoint: no {MANIFEST} of booster.save in it or in the folders below it, no"
            f" {' or '.join(names)},"
            " no index of shards"
        )
    return runs


def _members(indices: set[Path]) -> set[str]:
    found: set[str] = set()
    for path in indices:
        try:
            index = CheckpointIndexFile.from_file(path)
        except RuntimeError:  # reported when it is opened
            continue
        found |= {*index.weight_map.values(), *filter(None, [index.param_groups_file()])}
    return found


def open_checkpoint(path: Path) -> View:
    """A view of what ``find_forms`` found."""
    if path.is_dir():
        return RunView(path)
    return ShardsView(path) if path.suffix == ".json" else FileView(path)


def faults_of(path: Path, advance: Advance) -> Iterator[Fault]:
    """All that is wrong with what ``find_forms`` found, down to a checkpoint that cannot even be opened."""
    try:
        if path.is_file() and path.suffix == ".json":
            yield from shard_faults(path, advance)
        else:
            yield from open_checkpoint(path).faults(advance)
    except (RuntimeError, OSError) as error:
        file = path / MANIFEST if path.is_dir() else path
        yield Fault(file, str(error).removeprefix(f"{file} "))


def size_on_disk(path: Path) -> int:
    """The bytes of what ``find_forms`` found."""
    if path.is_dir():
        members = [p for p in path.iterdir() if p.is_file()]
    else:
        members = [path, *(path.parent / name for name in _members({path}) if path.suffix == ".json")]
    return sum(p.stat().st_size for p in members if p.is_file())


__all__ = ["faults_of", "find_forms", "open_checkpoint", "size_on_disk"]
