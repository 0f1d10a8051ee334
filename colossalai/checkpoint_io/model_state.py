"""The tensors of a model by their names in the serial model, and what of a checkpoint goes into them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from colossalai._numeric import HALF_DTYPES
from colossalai.checkpoint_io.held_tensors import (
    HeldBox,
    HeldTensor,
    pieces_of_holding,
    serial_shape,
    shared_mark,
)
from colossalai.checkpoint_io.ranks import JobRanks
from colossalai.checkpoint_io.runs.manifest import Manifest, StoredTensor
from colossalai.checkpoint_io.runs.reading import Want
from colossalai.interface import Holding, ModelWrapper, below_compile, user_module
from colossalai.mesh import PIPELINE_AXIS, Mesh
from colossalai.nn.layer import ParallelLayer
from colossalai.utils.lazy_tensor import fetch_later, is_lazy
from colossalai.utils.parallel import mesh_of_model

EXTRA = "_extra_state"  # the name that torch gives to what ``get_extra_state`` of a module returns


def mesh_of(model: nn.Module) -> Mesh | None:
    """The mesh that ``model`` is cut over: that of its layers, one of its own, or that of the launched
    job.
    """
    meshes = (m._mesh for m in model.modules() if isinstance(m, ParallelLayer))
    return next((mesh for mesh in meshes if mesh is not None), None) or mesh_of_model(model)


class ParameterNames:
    """The names of a model's parameters in the serial model, and the pipeline stages that they are on.

    Where the model of an optimizer is not known, the names are the numbers in its groups, as torch has them.
    """

    def __init__(
        self,
        params: Iterable[tuple[str, Tensor]],
        mesh: Mesh | None,
        section: str = "model",
        *,
        are_numbers: bool = False,
    ) -> None:
        self.mesh, self.section, self.are_numbers = mesh, section, are_numbers
        self._names: dict[int, str] = {}
        self._marks: dict[tuple[int, int], str] = {}
        self.stages: dict[str, int] = {}
        for name, param in params:
            self._names.setdefault(id(param), name)
            if (mark := shared_mark(param)) is not None:
                self._marks.setdefault(mark, name)

    @classmethod
    def of(cls, model: nn.Module, section: str = "model") -> ParameterNames:
        """The names in ``model``, which may be a pipeline stage, or several."""
        module = user_module(model)
        rename = getattr(module, "serial_name", str)
        named = list(module.named_parameters(remove_duplicate=False))
        found = cls([(rename(name), p) for name, p in named], mesh_of(module), section)
        if (stage := found.stage) is not None:
            stage_of = getattr(module, "virtual_stage", lambda name: stage)
            for name, _ in reversed(named):
                found.stages[rename(name)] = stage_of(name)
        return found

    @property
    def stage(self) -> int | None:
        """This rank's pipeline stage, if there are several."""
        return stage_of_mesh(self.mesh)

    def name(self, param: Tensor) -> str | None:
        """The first name of a parameter."""
        return self._names.get(id(param))

    def agree(self, ranks: JobRanks) -> ParameterNames:
        """Give a parameter that stages share its name on the first of them; every rank calls this."""
        if self.stage is None:
            return self
        firsts: dict[tuple[int, int], tuple[int, str]] = {}
        for theirs in ranks.gather({mark: (self.stages[name], name) for mark, name in self._marks.items()}):
            for mark, place in theirs.items():
                firsts[mark] = min(place, firsts.get(mark, place))
        renamed = {name: firsts[mark] for mark, name in self._marks.items()}
        for key, name in self._names.items():
            if name in renamed:
                stage, self._names[key] = renamed[name]
                self.stages[self._names[key]] = stage
        return self


def stage_of_mesh(mesh: Mesh | None) -> int | None:
    """This rank's pipeline stage on ``mesh``, if there are several."""
    if mesh is None or mesh.size.get(PIPELINE_AXIS, 1) == 1:
        return None
    return mesh.coord[PIPELINE_AXIS]


class ModelState:
    """A model for a checkpoint.

    ``section`` is the first word of the names under which its tensors are stored.
    """

    def __init__(self, model: nn.Module, section: str = "model") -> None:
        self.section = section
        self.module = user_module(model)
        self.mesh = mesh_of(self.module)
        below = below_compile(model)
        self._wrapper = below if isinstance(below, ModelWrapper) else None
        held = [] if self._wrapper is None else self._wrapper.holdings()
        self._holdings = {id(holding.param): holding for holding in held}
        self._named: dict[str, Holding] = {}
        self._elsewhere: list[tuple[Tensor, Tensor]] = []  # parameters, and what was loaded for them
        self._rename = getattr(self.module, "serial_name", lambda name: name)
        state = self.module.state_dict(keep_vars=True)  # here, FSDP frees what it had gathered
        self.extra = {self._rename(name): v for name, v in state.items() if _is_extra(name)}
        self.tensors = self._live({name: v for name, v in state.items() if not _is_extra(name)})
        self.names: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            self.names.setdefault(id(tensor), []).append(self._rename(name))

    def _live(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        own = {id(t) for t in (*self.module.parameters(), *self.module.buffers())}
        if lost := [name for name, tensor in state.items() if id(tensor) not in own]:
            raise ValueError(
                f"the state_dict of {type(self.module).__name__} computes {lost[0]} instead of giving the"
                " tensor that the model"
                " uses (a state_dict hook does so), so nothing could be loaded into it"
            )
        return state

    @property
    def stage(self) -> int | None:
        """This rank's pipeline stage, if there are several."""
        return stage_of_mesh(self.mesh)

    @property
    def parameter_names(self) -> ParameterNames:
        """The names of the parameters, for the state of an optimizer."""
        named = [(self._rename(name), tensor) for name, tensor in self.tensors.items()]
        return ParameterNames(named, self.mesh, self.section)

    def entries(self) -> list[HeldTensor]:
        """All tensors, tied ones once."""
        first = {id(tensor): tensor for tensor in self.tensors.values()}
        return [self._entry(tensor, self.names[key]) for key, tensor in first.items()]

    def _entry(self, tensor: Tensor, names: list[str]) -> HeldTensor:
        name, *aliases = (f"{self.section}/{name}" for name in names)
        is_param = isinstance(tensor, nn.Parameter)
        holding = self._named[name] = self._holdings.get(id(tensor), Holding(tensor, tensor))
        return HeldTensor(
            name,
            serial_shape(tensor),
            holding.value.dtype,
            pieces_of_holding(holding, fetch_later(holding.value), self.mesh, name),
            shared_mark(tensor),
            self.stage if is_param else None,
            aliases,
            by_first=not is_param,
        )

    def wants(self, manifest: Manifest, optimizer_section: str) -> tuple[list[Want], list[str]]:
        """What is to be loaded, and the names that the checkpoint lacks.  Shapes that differ are refused."""
        wants, missing, faults = [], [], []
        for entry in self.entries():
            names = [entry.name, *entry.aliases]
            source = next((found for found in map(manifest.find, names) if found is not None), None)
            if source is None:
                missing.append(entry.name)
                continue
            if source.shape != entry.shape:
                faults.append(f"{entry.name} is {source.shape} there and {entry.shape} in the model")
            else:
                stored = self._finest(source, entry, manifest, optimizer_section)
                wants.append(Want(stored, self._targets(entry, stored.name)))
        if faults:
            raise RuntimeError(f"sizes differ: {'; '.join(faults[:6])}")
        return wants, missing

    def _targets(self, entry: HeldTensor, name: str) -> list[HeldBox]:
        """Return the memory that ``entry`` is read to; ``loaded`` moves what belongs on a disk there."""
        holding = self._named[entry.name]
        if not is_lazy(holding.value):
            return entry.pieces
        room = torch.empty(holding.value.shape, dtype=holding.value.dtype)
        self._elsewhere.append((holding.param, room))
        return pieces_of_holding(replace(holding, value=room), room, self.mesh, name)

    def _finest(
        self, source: StoredTensor, entry: HeldTensor, manifest: Manifest, section: str
    ) -> StoredTensor:
        """Choose the fp32 master of a half-precision weight, if the model has another dtype."""
        if source.dtype not in HALF_DTYPES or entry.dtype == source.dtype:
            return source
        name = source.name.removeprefix(f"{self.section}/")
        master = manifest.find(f"{section}/{name}/master")
        return master if master is not None and master.shape == source.shape else source

    def loaded(self, values: dict[str, Any]) -> None:
        """The tensors are loaded: tell the plan, and give modules with an extra state theirs back."""
        if self._wrapper is not None:
            self._wrapper.weights_loaded(self._elsewhere)
            self._elsewhere = []
        for name in self.module.state_dict(keep_vars=True):
            own = self._rename(name)
            if own in self.extra and own in values:
                path = name.removesuffix(EXTRA).rstrip(".")
                self.module.get_submodule(path).set_extra_state(values[own])


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == EXTRA


__all__ = ["ModelState", "ParameterNames", "mesh_of"]
