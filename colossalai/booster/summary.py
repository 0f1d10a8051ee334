"""``summary``: a table of the modules of a model, with the parameters, the memory and the plan of each.

A rank tells what it holds itself and what it knows of the whole, so no communication is needed: one rank may
ask alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from colossalai.checkpoint_io.held_tensors import serial_shape
from colossalai.checkpoint_io.model_state import mesh_of
from colossalai.interface import ModelWrapper, below_compile, user_module
from colossalai.interface.holding import RestingPlace
from colossalai.mesh import Mesh, placement
from colossalai.utils.text import size_text, table

_HEAD = ("module", "type", "parameters", "here", "memory", "dtype", "tier", "plan")
_NUMBERS = (2, 3, 4)


@dataclass(frozen=True, kw_only=True)
class TensorSummary:
    """One parameter or buffer: its shape in the serial model, and what this rank keeps of it."""

    name: str
    shape: tuple[int, ...]
    is_parameter: bool
    trained: bool
    here: int
    nbytes: int
    dtype: str
    tier: str
    plan: str

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(kw_only=True)
class ModuleSummary:
    """One line of a summary: a module, with those below it where the table ends at a depth."""

    path: str
    kind: str
    tensors: list[TensorSummary] = field(default_factory=list)
    tied: list[str] = field(default_factory=list)
    is_sum: bool = False

    @property
    def parameters(self) -> int:
        """The parameters of the serial module."""
        return sum(t.numel for t in self.tensors if t.is_parameter)

    @property
    def trained(self) -> int:
        """Those of them that are trained."""
        return sum(t.numel for t in self.tensors if t.trained)

    @property
    def here(self) -> int:
        """The elements of parameters that this rank keeps."""
        return sum(t.here for t in self.tensors if t.is_parameter)

    @property
    def nbytes(self) -> int:
        """The bytes of parameters and buffers that this rank keeps, between steps, in any tier."""
        return sum(t.nbytes for t in self.tensors)

    def cells(self) -> tuple[str, ...]:
        return (
            self.path or "(model)",
            self.kind,
            f"{self.parameters:,}",
            f"{self.here:,}",
            size_text(self.nbytes),
            _joined(t.dtype for t in self.tensors),
            _joined(t.tier for t in self.tensors),
            self.plan(),
        )

    def plan(self) -> str:
        """How the tensors lie; tensors that lie alike are named together."""
        if self.is_sum:
            return _joined(t.plan for t in self.tensors)
        alike: dict[str, list[str]] = {}
        for t in self.tensors:
            alike.setdefault(t.plan, []).append(f"{t.name} {_shape(t.shape)}")
        return "; ".join([*(f"{', '.join(names)}: {plan}" for plan, names in alike.items()), *self.tied])


@dataclass(frozen=True)
class ModelSummary:
    """What ``summary`` returns; its text is the table."""

    title: str
    modules: Sequence[ModuleSummary]

    @property
    def total(self) -> ModuleSummary:
        """All modules together."""
        every = [t for module in self.modules for t in module.tensors]
        return ModuleSummary(path="total", kind="", tensors=every, is_sum=True)

    def __str__(self) -> str:
        total = self.total
        lines = table([_HEAD, *(module.cells() for module in (*self.modules, total))], right=_NUMBERS)
        rule = "-" * min(max(map(len, lines)), 110)
        frozen = total.parameters - total.trained
        end = f"{total.trained:,} parameters are trained, {frozen:,} are frozen"
        return "\n".join([self.title, rule, lines[0], rule, *lines[1:-1], rule, lines[-1], end])

    __repr__ = __str__


def summary(model: nn.Module, depth: int | None = None) -> ModelSummary:
    """Describe the modules of ``model``: parameters, memory and plan; ``print(summary(model))`` is a table.

    ``parameters`` are those of the serial model, ``here`` and ``memory`` what this rank keeps of them between
    steps (gradients, states of an optimizer and what is gathered for a moment do not count).  In a pipeline
    the model is this rank's stage.  A weight that several modules share is counted with the first.  No
    communication takes place, so one rank may ask alone.

    Args:
        model: any model, before or after ``parallelize``, ``initialize`` or ``boost``.
        depth: add up what lies deeper than so many names (1: ``transformer``, 2: ``transformer.h``); None for
            every module with parameters or buffers of its own.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"summary describes a torch.nn.Module, got {type(model).__name__}: {model!r}")
    if depth is not None and (not isinstance(depth, int) or isinstance(depth, bool) or depth < 1):
        raise ValueError(f"summary needs a depth of at least 1, or None for every module, got {depth!r}")
    module = user_module(model)
    wrapper = below_compile(model)
    places = wrapper.resting_places() if isinstance(wrapper, ModelWrapper) else {}
    rows = list(_rows(module, places))
    mesh = mesh_of(module)
    return ModelSummary(_title(module, mesh), rows if depth is None else _to_depth(module, rows, depth))


def _rows(module: nn.Module, places: dict[int, RestingPlace]) -> Iterator[ModuleSummary]:
    rename = getattr(module, "serial_name", str)
    seen: dict[int, str] = {}
    for path, part in module.named_modules():
        row: ModuleSummary | None = None
        own = [*part._parameters.items(), *part._buffers.items()]
        for name, tensor in own:
            if tensor is None:
                continue
            full = rename(f"{path}.{name}" if path else name)
            row = row or ModuleSummary(path=full.rpartition(".")[0], kind=type(part).__name__)
            if id(tensor) in seen:
                row.tied.append(f"{name}: tied to {seen[id(tensor)]}")
                continue
            seen[id(tensor)] = full
            row.tensors.append(_describe(name, tensor, places.get(id(tensor))))
        if row is not None:
            yield row


def _describe(name: str, tensor: Tensor, place: RestingPlace | None) -> TensorSummary:
    layout = placement(tensor)
    words = [f"cut {layout}"] if layout.sharded else []
    if place is None:
        local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor of the user
        if local is not tensor:
            words.append(f"DTensor {tuple(tensor.placements)}")  # type: ignore[attr-defined]
        place = RestingPlace(numel=local.numel(), dtype=local.dtype, tier=str(local.device), words="")
    elif place.words:
        words.append(place.words)
    on_meta = place.tier == "meta"
    is_parameter = isinstance(tensor, nn.Parameter)
    return TensorSummary(
        name=name,
        shape=serial_shape(tensor),
        is_parameter=is_parameter,
        trained=is_parameter and tensor.requires_grad,
        here=0 if on_meta else place.numel,
        nbytes=0 if on_meta else place.numel * place.dtype.itemsize,
        dtype=str(place.dtype).removeprefix("torch."),
        tier=place.tier,
        plan=", ".join(words) or "whole",
    )


def _to_depth(module: nn.Module, rows: Iterable[ModuleSummary], depth: int) -> list[ModuleSummary]:
    kinds = {path: type(part).__name__ for path, part in module.named_modules()}
    found: dict[str, ModuleSummary] = {}
    for row in rows:
        path = ".".join(row.path.split(".")[:depth])
        if path not in found:
            found[path] = ModuleSummary(path=path, kind=kinds.get(path, row.kind), is_sum=path != row.path)
        found[path].is_sum |= path != row.path
        found[path].tensors += row.tensors
        found[path].tied += row.tied
    return list(found.values())


def _title(module: nn.Module, mesh: Mesh | None) -> str:
    text = type(module).__name__
    if mesh is None:
        return text
    axes = [f"{axis} {mesh.coord[axis]} of {size}" for axis, size in mesh.size.items() if size > 1]
    return f"{text} on rank {mesh.rank}" + (f" ({', '.join(axes)})" if axes else "")


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _joined(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words)) or "-"


__all__ = ["ModelSummary", "ModuleSummary", "TensorSummary", "summary"]
