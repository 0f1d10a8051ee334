"""Convert the weights of a checkpoint: for Hugging Face, to one file, for ``booster.load``, to another dtype.

One tensor at a time is in memory, twice read: once for its checksum, which lies before the values, and once
to be written. What is written appears under its name when it is complete.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from colossalai.checkpoint_io.boxes import whole
from colossalai.checkpoint_io.files.sharding import (
    MB,
    CheckpointIndexFile,
    FileKind,
    get_base_filenames,
    get_shard_filename,
    plan_shards,
)
from colossalai.checkpoint_io.files.state_file import (
    CHECKSUMS,
    save_state_dict,
    sums_as_text,
    survey_file,
    sync,
    tensor_crc,
)
from colossalai.checkpoint_io.held_tensors import HeldBox, HeldTensor
from colossalai.checkpoint_io.inspection.metaseq import as_hugging_face, is_metaseq
from colossalai.checkpoint_io.inspection.views import Advance, Item, ShardsView, View
from colossalai.checkpoint_io.runs.data_file import TensorToWrite, write_tensors
from colossalai.checkpoint_io.runs.writing import Contents, Writer
from colossalai.checkpoint_io.stored_optimizer import StoredOptimizer


@dataclass(frozen=True)
class Weights:
    """The weights of one model: names, shapes and dtypes as they are written, and a function to read each."""

    blocks: list[TensorToWrite]
    ties: dict[str, str]

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)


def weights_of(view: View, dtype: torch.dtype | None = None, section: str = "model") -> Weights:
    """The weights in a checkpoint; with ``dtype`` those that are floating-point numbers are converted.

    Of a run that trained in half precision, the optimizer has the exact weights; they are taken for a wider
    ``dtype``.
    """
    if view.kind in ("optimizer", "values"):
        raise ValueError(f"{view.path} holds no weights: it is a checkpoint of kind {view.kind!r}")
    prefix = view.prefix(section)
    items = {item.name: item for item in view.items}
    chosen = [item for item in view.items if item.name.startswith(prefix)]
    if not chosen:
        known = sorted({item.name.partition(prefix[-1:] or "/")[0] for item in view.items})
        raise ValueError(
            f"{view.path} has no section {section!r} with tensors; its sections are {', '.join(known)}"
        )
    blocks = [
        _block(view, _finest(item, items, prefix, section, dtype), item.name.removeprefix(prefix), dtype)
        for item in chosen
    ]
    if is_metaseq(block.key for block in blocks):
        blocks = as_hugging_face(blocks)
    ties = {
        a.removeprefix(prefix): b.removeprefix(prefix) for a, b in view.ties.items() if a.startswith(prefix)
    }
    return Weights(blocks, ties)


def _finest(
    item: Item, items: Mapping[str, Item], prefix: str, section: str, dtype: torch.dtype | None
) -> Item:
    if dtype is None or dtype.itemsize <= item.dtype.itemsize or not item.dtype.is_floating_point:
        return item
    name = item.name.removeprefix(prefix)
    master = items.get(f"{section.replace('model', 'optimizer')}/{name}/master")
    return master if master is not None and master.shape == item.shape else item


def _block(view: View, item: Item, name: str, dtype: torch.dtype | None) -> TensorToWrite:
    to = dtype if dtype is not None and item.dtype.is_floating_point else item.dtype

    def read() -> Tensor:
        stored = view.read(item.name)
        tensor = stored.to(to)
        if to != stored.dtype and bool((tensor.isinf() & ~stored.isinf()).any()):
            largest = stored[~stored.isinf()].abs().max().item()
            raise ValueError(f"{name} holds {largest:g}, which {to} cannot; choose bf16 or fp32")
        return tensor

    return TensorToWrite(name, to, item.shape, read)


def write_hugging_face(
    weights: Weights, folder: Path, size_per_shard: float = 5120, advance: Advance = lambda n: None
) -> None:
    """Write a folder that ``from_pretrained`` opens beside a ``config.json``: a file, or shards."""
    weights_name, index_name = get_base_filenames(use_safetensors=True, kind=FileKind.MODEL)
    by_name = {block.key: block for block in weights.blocks}
    units = [([block.key], block.nbytes / MB) for block in weights.blocks]
    shards = [[by_name[key] for key in shard] for shard, _ in plan_shards(units, size_per_shard)]
    if len(shards) == 1:
        _write_safetensors(folder / weights_name, shards[0], weights.ties, advance)
        return
    index = CheckpointIndexFile(folder)
    for i, blocks in enumerate(shards):
        name = get_shard_filename(weights_name, i)
        _write_safetensors(folder / name, blocks, weights.ties, advance)
        for block in blocks:
            index.append_weight_map(block.key, name)
    index.append_meta_data("total_size", weights.nbytes)
    index.write_index_file(index_name)


def write_one_file(weights: Weights, path: Path, advance: Advance = lambda n: None) -> None:
    """One file.

    By its name it is safetensors, or else of ``torch.save``, for which all tensors must fit into memory.
    """
    if path.suffix == ".safetensors":
        _write_safetensors(path, weights.blocks, weights.ties, advance)
        return
    state = {}
    for block in weights.blocks:
        state[block.key] = block.read()
        advance(2 * block.nbytes)
    save_state_dict(state | {name: state[to] for name, to in weights.ties.items()}, path)


def write_run(
    weights: Weights, folder: Path, size_per_shard: float = 1024, advance: Advance = lambda n: None
) -> None:
    """A checkpoint as ``booster.save`` writes it for a model that was boosted alone."""
    names: dict[str, list[str]] = {}
    for alias, name in weights.ties.items():
        names.setdefault(name, []).append(f"model/{alias}")
    entries = [
        HeldTensor(
            f"model/{b.key}",
            b.shape,
            b.dtype,
            [HeldBox(whole(b.shape), _reporting(b, lambda n: advance(2 * n)))],
            aliases=names.get(b.key, []),
        )
        for b in weights.blocks
    ]
    contents = Contents(entries, {"extra": {}, "model": {"extra": {}}}, plan={"converted": True})
    Writer().save(lambda: contents, lambda values, parts: values, folder, size_per_shard=size_per_shard)


def merge_optimizer(view: View, path: Path) -> None:
    """The shards of an optimizer's states as one file, which ``load_optimizer`` and ``torch.load`` read."""
    if not isinstance(view, ShardsView):
        raise ValueError(f"{view.path} is one file already; there is nothing to convert in it")
    index, groups = view.index, view.index.param_groups_file()
    assert groups is not None
    folder = view.path.parent
    stored = StoredOptimizer.from_groups_file(survey_file(folder / groups))
    for name in index.get_checkpoint_filenames():
        stored.add(survey_file(Path(name)))
    save_state_dict(stored.state_dict(), path)


def _write_safetensors(
    path: Path, blocks: Sequence[TensorToWrite], ties: Mapping[str, str], advance: Advance
) -> None:
    sums = {}
    for block in blocks:
        sums[block.key] = tensor_crc(block.read())
        advance(block.nbytes)
    tied = {alias: name for alias, name in ties.items() if name in sums}
    reporting = [TensorToWrite(b.key, b.dtype, b.shape, _reporting(b, advance)) for b in blocks]
    write_tensors(path, reporting, {**tied, CHECKSUMS: sums_as_text(sums)})


def _reporting(block: TensorToWrite, advance: Advance) -> Callable[[], Tensor]:
    def read() -> Tensor:
        advance(block.nbytes)
        return block.read()

    return read


@contextmanager
def complete_or_absent(target: Path) -> Iterator[Path]:
    """A path beside ``target`` for a new file or folder, which takes its place when all went well."""
    draft = target.with_name(f".{target.stem}.{uuid.uuid4().hex}.tmp{target.suffix}")
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    try:
        yield draft
        os.replace(draft, target)  # an empty folder may be there
        sync(target.absolute().parent)
    finally:
        if draft.is_dir():
            shutil.rmtree(draft)
        draft.unlink(missing_ok=True)


__all__ = [
    "Weights",
    "complete_or_absent",
    "merge_optimizer",
    "weights_of",
    "write_hugging_face",
    "write_one_file",
    "write_run",
]
