"""Name the files of a checkpoint, cut a state dict into shards, and replace a folder of shards safely.

The names are those of Hugging Face: ``pytorch_model.bin`` or ``model.safetensors`` for one file,
``pytorch_model.bin.index.json`` beside ``pytorch_model-00001.bin``, ... for a folder.  A variant goes before
the suffix: ``pytorch_model.fp16.bin``.  The index is JSON: ``{"metadata": {"total_size": bytes},
"weight_map": {tensor name: file name}}``; for an optimizer the names are the numbers of its parameters, and
the metadata also names the file with its ``param_groups``.

A shard is written under a name that the folder's present index does not use; then the new index takes the
place of the old one, in one step; then the old shards go.  Whenever the machine stops, the folder holds one
complete checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from colossalai.checkpoint_io.files.state_file import (
    load_shard_state_dict,
    read_json,
    same_memory,
    save_state_dict,
    stored_names,
    survey_file,
    write_file,
)

MB = 1024 * 1024


def calculate_tensor_size(tensor: Tensor) -> float:
    """Size in MB."""
    return tensor.numel() * tensor.element_size() / MB


def shard_checkpoint(
    state_dict: Mapping[Any, Any], max_shard_size: float = 1024
) -> Iterator[tuple[dict[Any, Any], float]]:
    """Cut a state dict, in order, into shards of at most ``max_shard_size`` MB; yield each with its size.

    An entry may be a tensor or a dict of them (an optimizer's state of one parameter).  One that is larger
    than a shard is a shard of its own, and tied tensors go together.
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
    """Write the shards of one checkpoint and publish them; ``with`` removes what was not published."""

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
    """Yield names and shapes of each shard; a shard that lacks a tensor of the index is an error."""
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
    except RuntimeError:  # there is none, or it is damaged
        return set()
    return {*index.weight_map.values(), *filter(None, [index.param_groups_file()])}


PARAM_GROUPS = "param_groups"


class CheckpointIndexFile:
    """The index in memory; ``root_path`` is the folder of the checkpoint."""

    def __init__(self, root_path: str | Path | None = None) -> None:
        self.root_path = None if root_path is None else Path(root_path)
        self.metadata: dict[str, Any] = {}
        self.weight_map: dict[str, str] = {}

    @classmethod
    def from_file(cls, index_path: str | Path) -> CheckpointIndexFile:
        index = cls()
        index.load(index_path)
        return index

    def load(self, json_path: str | Path) -> None:
        path = Path(json_path)
        content = read_json(path)
        weight_map = content.get("weight_map")
        if not isinstance(weight_map, dict):
            raise RuntimeError(
                f"{path} is not the index of a sharded checkpoint: it has no object 'weight_map'"
            )
        metadata = content.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise RuntimeError(
                f"{path} is not the index of a sharded checkpoint: its 'metadata' is not an object but"
                f" {metadata!r}"
            )
        homes = weight_map | {key: metadata[key] for key in [PARAM_GROUPS] if key in metadata}
        for name, file_name in homes.items():
            if not isinstance(file_name, str) or Path(file_name).name != file_name:
                raise RuntimeError(
                    f"{path} says that {name} is in {file_name!r}, which is not the name of a file beside it"
                )
        self.root_path = path.parent
        self.metadata = metadata
        self.weight_map = weight_map

    def export(self, json_path: str | Path) -> None:
        content = {"metadata": self.metadata, "weight_map": self.weight_map}
        text = json.dumps(content, indent=2) + "\n"
        write_file(Path(json_path), lambda draft: draft.write_text(text, encoding="utf-8"))

    def write_index_file(self, save_index_file: str) -> None:
        """``export`` under a name in the folder of the checkpoint."""
        self.export(self._root() / save_index_file)

    def append_weight_map(self, param_name: str, shard_file: str) -> None:
        self.weight_map[param_name] = shard_file

    def append_meta_data(self, name: str, val: Any) -> None:
        self.metadata[name] = val

    def get_all_param_names(self) -> list[str]:
        return list(self.weight_map)

    def get_checkpoint_file(self, param_name: str) -> str:
        """The name of the file that holds ``param_name``."""
        if param_name not in self.weight_map:
            raise KeyError(f"the index of {self.root_path} has no tensor {param_name!r}")
        return self.weight_map[param_name]

    def get_checkpoint_filenames(self) -> list[str]:
        """The paths of all shards, each once, in order."""
        return [str(self._root() / name) for name in dict.fromkeys(self.weight_map.values())]

    get_checkpoint_fileanames = get_checkpoint_filenames  # an older spelling

    def contains_dtensor(self) -> bool:
        """Return whether a file name has a place for the numbers of ranks: tensors in pieces, which this
        package neither writes to such files nor reads.
        """
        return any("*" in name for name in self.weight_map.values())

    def assert_no_dtensor_checkpoint(self) -> None:
        """Refuse an index of tensors in pieces."""
        if self.contains_dtensor():
            raise ValueError(
                f"the checkpoint {self.root_path} has tensors in pieces, one file for each rank; merge them"
                " with the program that wrote them"
            )

    def param_groups_file(self) -> str | None:
        """The name of the file with an optimizer's parameter groups, if this is an optimizer's checkpoint."""
        return self.metadata.get(PARAM_GROUPS)

    def _root(self) -> Path:
        if self.root_path is None:
            raise RuntimeError(
                "this index has no folder yet: give CheckpointIndexFile a root_path, or load one"
            )
        return self.root_path


INDEX_SUFFIX = ".index.json"
GROUPS_NAME = "pytorch_optim_group.bin"
RUN = "manifest.json"  # the file by which a folder is a checkpoint of booster.save


class FileKind(Enum):
    """What a checkpoint is of; the value lists the file names it may have, without variant."""

    MODEL = ("pytorch_model.bin", "model.safetensors")
    OPTIMIZER = ("pytorch_optim.bin",)


def add_variant(weights_name: str, variant: str | None = None) -> str:
    """``pytorch_model.bin`` and ``fp16`` give ``pytorch_model.fp16.bin``."""
    if not variant:
        return weights_name
    if "/" in variant or "\\" in variant:
        raise ValueError(
            f"a variant is part of a file name, so it must not hold a path separator; got {variant!r}"
        )
    stem, suffix = weights_name.rsplit(".", 1)
    return f"{stem}.{variant}.{suffix}"


def get_base_filenames(
    variant: str | None = None, use_safetensors: bool = False, kind: FileKind = FileKind.MODEL
) -> tuple[str, str]:
    """The name from which the names of shards are made, and the name of the index."""
    weights_name = kind.value[-1 if use_safetensors else 0]
    return add_variant(weights_name, variant), add_variant(weights_name + INDEX_SUFFIX, variant)


def get_shard_filename(weights_name: str, idx: int) -> str:
    """The name of shard ``idx``, counted from 0: ``pytorch_model-00001.bin`` is the first."""
    stem, suffix = weights_name.rsplit(".", 1)
    return f"{stem}-{idx + 1:05d}.{suffix}"


def has_index_file(checkpoint_path: str | Path, kind: FileKind = FileKind.MODEL) -> tuple[bool, Path | None]:
    """Whether the path is, or is a folder with, the index of a sharded checkpoint; and that index."""
    path = Path(checkpoint_path)
    if path.is_file():
        is_index = path.suffix == ".json"
        return is_index, path if is_index else None
    indices = [found for name in kind.value for found in path.glob(f"{name}.index*.json")]
    return bool(indices), _only(indices, path) if indices else None


def find_checkpoint(checkpoint_path: str | Path, kind: FileKind) -> Path:
    """The index or the single file that ``checkpoint_path`` means: itself, or what a folder holds."""
    path = Path(checkpoint_path)
    if path.name == RUN and path.is_file():
        _refuse_run(path.parent, kind)
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    _, index = has_index_file(path, kind)
    if index is not None:
        return index
    single = [found for name in kind.value for found in (path / name, *path.glob(add_variant(name, "*")))]
    single = [found for found in single if found.is_file()]
    if not single:
        _refuse_run(path, kind)
        expected = " or ".join(f"{name}[{INDEX_SUFFIX}]" for name in kind.value)
        raise FileNotFoundError(f"the folder {path} holds no {kind.name.lower()} checkpoint: no {expected}")
    return _only(single, path)


def _refuse_run(path: Path, kind: FileKind) -> None:
    """The folder of a whole run, or of several, is for another call."""
    if any(path.glob(RUN)) or any(path.glob(f"*/{RUN}")):
        raise ValueError(
            f"{path} is a checkpoint of booster.save, which booster.load({str(path)!r}) reads;"
            f" load_{kind.name.lower()} reads files of"
            " whole tensors. `colossalai ckpt convert` makes these of it"
        )


def _only(found: list[Path], folder: Path) -> Path:
    if len(found) > 1:
        names = ", ".join(sorted(path.name for path in found))
        raise ValueError(
            f"the folder {folder} holds several checkpoints ({names}); pass the path of the one to load"
        )
    return found[0]
