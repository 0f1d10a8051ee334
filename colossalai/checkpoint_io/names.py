"""What the files of a checkpoint are called, and how a checkpoint is found again.

The names are those of Hugging Face: ``pytorch_model.bin`` or ``model.safetensors`` for one file,
``pytorch_model.bin.index.json`` beside ``pytorch_model-00001.bin``, ... for a folder.  A variant goes before the
suffix: ``pytorch_model.fp16.bin``.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path

INDEX_SUFFIX = ".index.json"
GROUPS_NAME = "pytorch_optim_group.bin"
RUN = "manifest.json"  # the file by which a folder is a checkpoint of booster.save


class Kind(Enum):
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
    variant: str | None = None, use_safetensors: bool = False, kind: Kind = Kind.MODEL
) -> tuple[str, str]:
    """The name from which the names of shards are made, and the name of the index."""
    weights_name = kind.value[-1 if use_safetensors else 0]
    return add_variant(weights_name, variant), add_variant(weights_name + INDEX_SUFFIX, variant)


def get_shard_filename(weights_name: str, idx: int) -> str:
    """The name of shard ``idx``, counted from 0: ``pytorch_model-00001.bin`` is the first."""
    stem, suffix = weights_name.rsplit(".", 1)
    return f"{stem}-{idx + 1:05d}.{suffix}"


def has_index_file(checkpoint_path: str | Path, kind: Kind = Kind.MODEL) -> tuple[bool, Path | None]:
    """Whether the path is, or is a folder with, the index of a sharded checkpoint; and that index."""
    path = Path(checkpoint_path)
    if path.is_file():
        is_index = path.suffix == ".json"
        return is_index, path if is_index else None
    indices = [found for name in kind.value for found in path.glob(f"{name}.index*.json")]
    return bool(indices), _only(indices, path) if indices else None


def find_checkpoint(checkpoint_path: str | Path, kind: Kind) -> Path:
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


def _refuse_run(path: Path, kind: Kind) -> None:
    """The folder of a whole run, or of several, is for another call."""
    if any(path.glob(RUN)) or any(path.glob(f"*/{RUN}")):
        raise ValueError(
            f"{path} is a checkpoint of booster.save, which booster.load({str(path)!r}) reads; load_{kind.name.lower()} reads files of"
            " whole tensors. `colossalai ckpt convert` makes these of it"
        )


def _only(found: list[Path], folder: Path) -> Path:
    if len(found) > 1:
        names = ", ".join(sorted(path.name for path in found))
        raise ValueError(
            f"the folder {folder} holds several checkpoints ({names}); pass the path of the one to load"
        )
    return found[0]
