"""The index of a sharded checkpoint: which file holds which tensor, as JSON in the layout of Hugging Face.

``{"metadata": {"total_size": bytes}, "weight_map": {tensor name: file name}}``; for an optimizer the names are the
numbers of its parameters, and the metadata also names the file with its ``param_groups``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from colossalai.checkpoint_io.files import read_json, write_file

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
                f"{path} is not the index of a sharded checkpoint: its 'metadata' is no object but {metadata!r}"
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

    get_checkpoint_fileanames = get_checkpoint_filenames  # as the documents spell it

    def param_groups_file(self) -> str | None:
        """The name of the file with an optimizer's parameter groups, if this is an optimizer's checkpoint."""
        return self.metadata.get(PARAM_GROUPS)

    def _root(self) -> Path:
        if self.root_path is None:
            raise RuntimeError(
                "this index has no folder yet: give CheckpointIndexFile a root_path, or load one"
            )
        return self.root_path
