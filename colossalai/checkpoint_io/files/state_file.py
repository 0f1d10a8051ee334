"""One checkpoint file: written whole or not at all, and read without running anything that is in it.

A file appears under its name only when all of it is on disk, so a crash never leaves half a file behind.  On
loading, the first bytes tell safetensors from torch's own format; the name does not matter.

Both formats are read with checksums.  Torch's is a zip archive, which has them, though torch does not look at
them; safetensors has none, so ours lie in its metadata, where other libraries pass them over.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colossalai.checkpoint_io.byte_io import STRIP, strips_of
from colossalai.utils.text import size_text

StateDict = dict[str, Any]


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a file beside ``path``, then put it in the place of ``path`` in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        draft.touch()
        mode = draft.stat().st_mode
        write(draft)
        draft.chmod(mode)  # as the umask says; safetensors leaves a file that only its owner can read
        sync(draft)
        os.replace(draft, path)
        sync(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def save_state_dict(
    state_dict: Mapping[Any, Any], checkpoint_file_path: str | Path, use_safetensors: bool = False
) -> None:
    """Write ``state_dict`` as one file, in torch's format or as safetensors."""
    path = Path(checkpoint_file_path)
    state = _stand_alone(state_dict, path)
    if use_safetensors:
        write_file(path, lambda draft: _write_safetensors(state, draft, path))
    else:
        write_file(path, lambda draft: _write_torch(state, draft, path))


def load_shard_state_dict(checkpoint_file: str | Path) -> StateDict:
    """Read a file that ``save_state_dict`` or Hugging Face wrote; tensors arrive on the CPU."""
    path = Path(checkpoint_file)
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint file {path}")
    try:
        if is_safetensors(path):
            return _read_safetensors(path)
        check_archive(path)
        with path.open("rb") as file:  # by its name, torch would take a file for safetensors that is none
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise unreadable(path, error) from error
    if not isinstance(state, dict):
        raise RuntimeError(f"{path} holds a {type(state).__name__} where a state dict was expected")
    return state


def survey_file(path: Path) -> StateDict:
    """Read names and shapes of a file; values stay on the disk as far as the format allows."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint file {path}")
    if not is_safetensors(path):
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception:  # torch's old format cannot be mapped; what is damaged is reported there
            return load_shard_state_dict(path)
        return state if isinstance(state, dict) else load_shard_state_dict(path)
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a dict
            ties = file.metadata() or {}
    except SafetensorError as error:
        raise unreadable(path, error) from error
    shapes |= {name: shapes[stored] for name, stored in ties.items() if stored in shapes}
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def unreadable(path: Path, error: Exception) -> RuntimeError:
    return RuntimeError(
        f"{path} is not a checkpoint that can be read (damaged, cut short, or holding objects that are"
        " neither"
        f" tensors nor plain values): {error}"
    )


def _unwritable(path: Path, error: Exception) -> OSError:
    """For libraries whose own words, on a disk that is full, name neither the file nor the disk."""
    free = shutil.disk_usage(path.parent).free
    return OSError(f"{path} cannot be written ({size_text(free)} are free there): {error}")


def same_memory(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return a key that tensors in the same memory share (tied weights); None for a tensor without memory."""
    if tensor.numel() == 0 or tensor.layout != torch.strided:
        return None
    storage = tensor.untyped_storage().data_ptr()
    return tensor.device, storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _stand_alone(state_dict: Mapping[Any, Any], path: Path) -> OrderedDict[Any, Any]:
    """The same state on the CPU, where no tensor is a window into a larger one, which would be written whole.

    Tied tensors stay tied.
    """
    done: dict[tuple[Any, ...], Tensor] = {}

    def convert(value: Any, name: str) -> Any:
        if type(value) is dict:
            return {key: convert(inner, f"{name}.{key}") for key, inner in value.items()}
        if not isinstance(value, Tensor):
            return value
        if type(value).__name__ == "DTensor":  # by name: importing the class takes longer than most saves
            raise TypeError(
                f"cannot write {name} to {path}: it is a part of a tensor cut over several ranks; save it"
                " with the"
                " checkpoint IO of the plugin that cut it"
            )
        if value.is_meta:
            raise ValueError(f"cannot write {name} to {path}: it is on the meta device and has no values yet")
        key = same_memory(value)
        if key in done:
            return done[key]
        tensor = value.detach().cpu()
        if key is not None:
            if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
                tensor = tensor.clone()
            done[key] = tensor
        return tensor

    state = OrderedDict((name, convert(value, str(name))) for name, value in state_dict.items())
    if (metadata := getattr(state_dict, "_metadata", None)) is not None:
        state._metadata = metadata  # type: ignore[attr-defined]  # the modules' versions, which torch looks up here
    return state


def _write_torch(state: Mapping[Any, Any], draft: Path, path: Path) -> None:
    try:
        torch.save(state, draft)
    except RuntimeError as error:
        raise _unwritable(path, error) from error


def _write_safetensors(state: Mapping[str, Any], draft: Path, path: Path) -> None:
    """Write safetensors, where a tied tensor is stored once.

    The metadata have its other names, as ``other name: stored name``.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    stored: dict[str, Tensor] = {}
    owner: dict[tuple[Any, ...], str] = {}
    metadata = {"format": "pt"}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"cannot write {name} to {path}: safetensors hold tensors only, and it is a"
                f" {type(value).__name__};"
                " save with use_safetensors=False"
            )
        key = same_memory(value)
        if key is not None and owner.setdefault(key, name) != name:
            metadata[name] = owner[key]
        else:
            stored[name] = value.contiguous()
    sums = {name: tensor_crc(tensor) for name, tensor in stored.items()}
    try:
        save_file(stored, draft, metadata={**metadata, CHECKSUMS: sums_as_text(sums)})
    except SafetensorError as error:
        raise _unwritable(path, error) from error


def _read_safetensors(path: Path) -> StateDict:
    from safetensors import safe_open

    with safe_open(path, framework="pt", device="cpu") as file:
        state: StateDict = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        sums = read_checksums(file.metadata())
        for name, tensor in state.items():
            check_tensor(name, tensor, sums)
        for name, stored in (file.metadata() or {}).items():
            if stored in state:
                state.setdefault(name, state[stored])
    return state


def stored_names(path: Path) -> list[str]:
    """The names of the tensors in a safetensors file."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def is_safetensors(path: Path) -> bool:
    """Eight bytes with the length of a JSON header, then the header."""
    with path.open("rb") as file:
        start = file.read(9)
    return len(start) == 9 and start[8:] == b"{" and int.from_bytes(start[:8], "little") < path.stat().st_size


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object; anything else is an error that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise RuntimeError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise RuntimeError(f"{path} holds a {type(content).__name__} where an object was expected")
    return content


def sync(path: Path) -> None:
    """Wait until a file, or the list of files in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


CHECKSUMS = "colossalai.crc32"  # the key in the metadata of a safetensors file
_ZIP = b"PK\x03\x04"


def tensor_crc(tensor: Tensor) -> int:
    """The CRC-32 of a tensor: its dtype and shape, then its bytes."""
    crc = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for strip in strips_of(tensor):
        crc = zlib.crc32(strip, crc)
    return crc


def sums_as_text(sums: Mapping[str, int]) -> str:
    """The sums of all tensors of a file, for its metadata."""
    return json.dumps(sums, separators=(",", ":"))


def read_checksums(metadata: Mapping[str, str] | None) -> dict[str, int] | None:
    """The sums in the metadata of a safetensors file; None in a file without sums."""
    text = (metadata or {}).get(CHECKSUMS)
    if text is None:
        return None
    try:
        sums = json.loads(text)
    except (ValueError, RecursionError):
        sums = None
    if not isinstance(sums, dict):
        raise RuntimeError("the checksums in its metadata are damaged")
    return sums


def check_tensor(name: str, tensor: Tensor, sums: Mapping[str, int] | None) -> None:
    """Compare a tensor with its sum, if there are sums."""
    if sums is not None and sums.get(name) != tensor_crc(tensor):
        raise RuntimeError(
            f"the checksum of {name} is {tensor_crc(tensor)}, and {sums.get(name)} was written"
        )


def is_archive(path: Path) -> bool:
    """Whether torch takes the file for its zip format (the one of before torch 1.6 has no checksums)."""
    with path.open("rb") as file:
        return file.read(len(_ZIP)) == _ZIP


def check_archive(path: Path) -> None:
    """Compare the sums in a file of ``torch.save``; the error names the first tensor that is damaged."""
    for name in damaged_records(path):
        raise RuntimeError(f"the checksum of {name} does not agree with what was written")


def damaged_records(path: Path) -> Iterator[str]:
    """What is damaged in a file of ``torch.save``: names of tensors, or of other records of the archive."""
    if not is_archive(path):
        return
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        for info in infos:
            try:
                with archive.open(info) as record:
                    while record.read(STRIP):
                        pass
            except zipfile.BadZipFile:
                yield _tensor_in(path, info, infos)


def _tensor_in(path: Path, info: zipfile.ZipInfo, infos: list[zipfile.ZipInfo]) -> str:
    """Return the name of the tensor in a record: mapped tensors lie in the order of their records."""
    records = sorted((i.header_offset, i.filename) for i in infos if "/data/" in i.filename and i.file_size)
    names = [name for _, name in records]
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # the record that says what the others are is damaged too
        return info.filename
    by_place: dict[int, str] = {}
    for name, value in flatten(state):
        if isinstance(value, Tensor) and value.numel():
            by_place.setdefault(value.untyped_storage().data_ptr(), name)
    found = [by_place[place] for place in sorted(by_place)]
    if info.filename not in names or len(found) != len(names):
        return info.filename
    return found[names.index(info.filename)]


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts and lists, with their paths."""
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    if not items:
        yield name, value
    for key, inner in items:
        yield from flatten(inner, f"{name}.{key}" if name else str(key))
