"""Which tensor goes to which shard, and how a folder of shards replaces an older one without a moment between.

A shard is written under a name that the folder's present index does not use; then the new index takes the place of the
old one, in one step; then the old shards go.  Whenever the machine stops, the folder holds one complete checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from colossalai.checkpoint_io.files import (
    load_shard_state_dict,
    same_memory,
    save_state_dict,
    stored_names,
    survey_file,
)
from colossalai.checkpoint_io.index import PARAM_GROUPS, CheckpointIndexFile
from colossalai.checkpoint_io.names import get_shard_filename

MB = 1024 * 1024


def calculate_tensor_size(tensor: Tensor) -> float:
    """Size in MB."""
    return tensor.numel() * tensor.element_size() / MB


def shard_checkpoint(
    state_dict: Mapping[Any, Any], max_shard_size: float = 1024
) -> Iterator[tuple[dict[Any, Any], float]]:
    """Cut a state dict, in order, into shards of at most ``max_shard_size`` MB; yield each with its size.

    An entry may be a tensor or a dict of them (an optimizer's state of one parameter).  One that is larger than a shard
    is a shard of its own, and tied tensors go together.
    """
    units: dict[Any, list[Any]] = {}  # names that must not be separated
    for name, value in state_dict.items():
        key = same_memory(value) if isinstance(value, Tensor) else None
        units.setdefault(("name", name) if key is None else key, []).append(name)
    sizes = [(names, size_of(state_dict[names[0]])) for names in units.values()]
    for shard, size in plan_shards(sizes, max_shard_size):
        yield {name: state_dict[name] for name in shard}, size


def plan_shards(
    units: Iterable[tuple[list[Any], float]], max_shard_size: float
) -> Iterator[tuple[list[Any], float]]:
    """Join units, each some names with their size, to shards of at most ``max_shard_size``, in order."""
    shard: list[Any] = []
    shard_size = 0.0
    for names, size in units:
        if shard and shard_size + size > max_shard_size:
            yield shard, shard_size
            shard, shard_size = [], 0.0
        shard = shard + names
        shard_size += size
    if shard:
        yield shard, shard_size


def size_of(value: Any) -> float:
    """Size in MB of a tensor, or of all tensors in a dict."""
    if isinstance(value, Tensor):
        return calculate_tensor_size(value)
    return sum(map(size_of, value.values())) if isinstance(value, dict) else 0.0


class ShardedWriter:
    """Writes the shards of one checkpoint and publishes them; ``with`` removes them again if that is not reached."""

    def __init__(self, folder: Path, weights_name: str, index_name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.index_name = index_name
        self.index = CheckpointIndexFile(folder)
        self._replaced = _files_of(folder / index_name)
        self._written: set[str] = set()
        self._count = 0
        # two sets of names take turns, so that a new shard never overwrites one that is still in use
        stem, suffix = weights_name.rsplit(".", 1)
        second_set = get_shard_filename(weights_name, 0) in self._replaced
        self._weights_name = f"{stem}-b.{suffix}" if second_set else weights_name

    def __enter__(self) -> ShardedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self._written:
            (self.folder / name).unlink(missing_ok=True)

    def add_shard(self, state: Mapping[Any, Any], use_safetensors: bool = False) -> None:
        name = get_shard_filename(self._weights_name, self._count)
        self._count += 1
        self._write(name, state, use_safetensors)
        for key in stored_names(self.folder / name) if use_safetensors else state:
            self.index.append_weight_map(str(key), name)

    def add_param_groups(self, name: str, state: Mapping[Any, Any]) -> None:
        """The file of an optimizer's parameter groups, beside the shards of its states."""
        if name in self._replaced:
            stem, suffix = name.rsplit(".", 1)
            name = f"{stem}-b.{suffix}"
        self._write(name, state, use_safetensors=False)
        self.index.append_meta_data(PARAM_GROUPS, name)

    def publish(self, total_size: float) -> None:
        """Make the checkpoint, of ``total_size`` MB, the one that is in the folder."""
        self.index.append_meta_data("total_size", round(total_size * MB))
        self.index.write_index_file(self.index_name)
        for name in self._replaced - self._written:
            (self.folder / name).unlink(missing_ok=True)
        self._written = set()

    def _write(self, name: str, state: Mapping[Any, Any], use_safetensors: bool) -> None:
        self._written.add(name)
        save_state_dict(state, self.folder / name, use_safetensors)


def read_shards(index: CheckpointIndexFile) -> Iterator[tuple[Path, dict[Any, Any]]]:
    """The shards one by one."""
    for file_name in index.get_checkpoint_filenames():
        path = Path(file_name)
        yield path, load_shard_state_dict(path)


def survey_shards(index: CheckpointIndexFile) -> Iterator[tuple[Path, dict[Any, Any]]]:
    """The shards one by one, for a look at names and shapes; one that lacks what the index promises is an error."""
    for file_name in index.get_checkpoint_filenames():
        path = Path(file_name)
        state = survey_file(path)
        present = set(map(str, state))
        for name, home in index.weight_map.items():
            if home == path.name and name not in present:
                raise RuntimeError(f"the index says that {name} is in {path}, but it is not")
        yield path, state


def _files_of(index_path: Path) -> set[str]:
    """The files that belong to the checkpoint of an existing index."""
    try:
        index = CheckpointIndexFile.from_file(index_path)
    except RuntimeError:  # none, or one that nobody could load either
        return set()
    return {*index.weight_map.values(), *filter(None, [index.param_groups_file()])}
