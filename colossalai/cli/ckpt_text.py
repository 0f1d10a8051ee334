"""Checkpoints in words and tables, for ``colossalai ckpt show``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from colossalai.checkpoint_io.byte_io import name_of
from colossalai.checkpoint_io.inspection.views import View
from colossalai.utils.text import size_text, table


def as_data(view: View, *, tensors: bool = True) -> dict[str, Any]:
    """A checkpoint as plain values."""
    data: dict[str, Any] = {
        "path": str(view.path),
        "kind": view.kind,
        "form": view.form,
        "bytes": view.nbytes,
        "checksums": view.has_checksums,
        "files": view.files,
        "sections": _sections(view),
        **{key: _plain(value) for key, value in view.facts.items()},
    }
    if tensors:
        data["ties"] = view.ties
        data["tensors"] = {
            item.name: {
                "shape": list(item.shape),
                "dtype": name_of(item.dtype),
                "bytes": item.nbytes,
                "files": list(item.files),
            }
            for item in view.items
        }
    return data


def describe(view: View, *, tensors: bool = True) -> str:
    """A checkpoint as a page of text."""
    checksums = "with checksums" if view.has_checksums else "without checksums"
    rows = [
        ("holds", f"{view.kind}, {len(view.items)} tensors, {size_text(view.nbytes)}"),
        ("form", f"{view.form}, {len(view.files)} files, {checksums}"),
        *((key, _words(value)) for key, value in view.facts.items()),
    ]
    if view.kind in ("run", "training"):
        rows += [
            (name, f"{said['tensors']} tensors, {size_text(said['bytes'])}")
            for name, said in _sections(view).items()
        ]
    lines = [str(view.path), *table(rows, indent=2)]
    if tensors and view.items:
        cells = [("tensor", "shape", "dtype", "size", "files")]
        for item in view.items:
            shape = " x ".join(map(str, item.shape)) or "number"
            cells.append((item.name, shape, name_of(item.dtype), size_text(item.nbytes), _short(item.files)))
        cells += [(alias, f"is {name}", "", "", "") for alias, name in view.ties.items()]
        lines += ["", *table(cells)]
    return "\n".join(lines)


def listing(views: Sequence[View]) -> str:
    """Several checkpoints of one run, a line for each."""
    cells = [("checkpoint", "number", "size", "plan", "extra")]
    for view in views:
        facts = view.facts
        cells.append(
            (
                view.path.name,
                str(facts["number"]),
                size_text(view.nbytes),
                _words(facts["plan"]),
                _words(facts["extra"]),
            )
        )
    return "\n".join(table(cells))


def _sections(view: View) -> dict[str, dict[str, int]]:
    separator = "/" if view.kind == "run" else "."
    found: dict[str, dict[str, int]] = {}
    for item in view.items if view.kind in ("run", "training") else ():
        section = found.setdefault(item.name.partition(separator)[0], {"tensors": 0, "bytes": 0})
        section["tensors"] += 1
        section["bytes"] += item.nbytes
    return found


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return (
            ", ".join(f"{key} {_words(inner)}" for key, inner in value.items() if inner not in (None, {}))
            or "-"
        )
    if isinstance(value, Tensor):
        return f"tensor of shape {tuple(value.shape)}" if value.ndim else str(value.item())
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(inner) for inner in value]
    if isinstance(value, Tensor):
        return value.tolist()
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _short(files: Sequence[str]) -> str:
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
