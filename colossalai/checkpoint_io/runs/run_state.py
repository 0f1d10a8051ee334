"""Collect and load all that a run needs: models, optimizers, schedulers, random states, data position."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.checkpoint_io.held_tensors import HeldBox, HeldTensor, whole_piece
from colossalai.checkpoint_io.json_values import decode, encode
from colossalai.checkpoint_io.model_state import ModelState
from colossalai.checkpoint_io.optimizer_state import OptimizerState
from colossalai.checkpoint_io.ranks import JobRanks
from colossalai.checkpoint_io.runs.manifest import latest, read_manifest
from colossalai.checkpoint_io.runs.reading import RunReader, Want
from colossalai.checkpoint_io.runs.writing import Contents
from colossalai.checkpoint_io.stored_optimizer import StoredOptimizer
from colossalai.context import ParallelMode
from colossalai.context.random import get_current_mode, get_seeds, get_states, set_mode, set_seed_states
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.utils.parallel import launched_mesh

RANDOM = "random"


@dataclass
class BoostedRun:
    """One model with what trains it.  Anything but the model may be absent."""

    model: nn.Module
    optimizer: Optimizer | None = None
    lr_scheduler: Any = None
    dataloader: Any = None


@dataclass
class RunState:
    """Several runs (a generator and a discriminator), usually one.

    ``plan`` is for people who look at the checkpoint.
    """

    runs: Sequence[BoostedRun]
    plan: dict[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    # Saving

    def collect(self) -> Contents:
        """What this rank has to save."""
        entries: list[HeldTensor] = []
        values: dict[str, Any] = {"extra": encode(dict(self.extra), "extra")}
        merged: dict[str, Any] = {}
        for i, run in enumerate(self.runs):
            model = ModelState(run.model, _section("model", i))
            entries += model.entries()
            merged[model.section] = {"extra": encode(model.extra, model.section)}
            if run.optimizer is not None:
                names = model.parameter_names
                optimizer = OptimizerState(run.optimizer, names, _section("optimizer", i))
                entries += optimizer.entries()
                merged[optimizer.section] = optimizer.stored().as_values(optimizer.section)
            for kind, part in (("lr_scheduler", run.lr_scheduler), ("dataloader", run.dataloader)):
                if part is not None and (state := _state_of(kind, part)) is not None:
                    values[_section(kind, i)] = encode(state, kind)
        entries.append(self._random(values))
        return Contents(entries, values, merged, self._plan())

    def _random(self, values: dict[str, Any]) -> HeldTensor:
        raw, ranks = capture_random_state(), _rank_and_size()
        values[RANDOM] = {
            "world": ranks[1],
            "mesh": _axes(),
            "device": random_device(),
            "seed": zlib.crc32(raw.numpy().tobytes()) & 0x7FFFFFFF,
        }
        return HeldTensor(f"{RANDOM}/{ranks[0]}", tuple(raw.shape), raw.dtype, whole_piece(raw))

    def _plan(self) -> dict[str, Any]:
        return {"mesh": _axes(), **self.plan, "world": _rank_and_size()[1]}

    def merge(self, values: dict[str, Any], parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Rank 0's values with what all ranks tell of their parts of the models."""
        for i, run in enumerate(self.runs):
            section = _section("model", i)
            values[section] = {"extra": {}}
            for part in reversed(parts):
                values[section]["extra"] |= part[section]["extra"]
            if run.optimizer is not None:
                section = _section("optimizer", i)
                told = [StoredOptimizer.from_values(part[section], section) for part in parts]
                values[section] = StoredOptimizer.merge(told).as_values(section)
        return values

    # Loading

    def load(self, path: str | Path, *, strict: bool = True, verify: bool = True) -> dict[str, Any]:
        """Load the checkpoint at ``path``, or the latest one in that folder; returns its ``extra``.

        Every rank calls this.  Nothing is changed before all ranks have found that everything fits and is
        undamaged.
        """
        ranks = JobRanks()
        folder = self._agreed(ranks, lambda: _find(path) if ranks.rank == 0 else None)[0]
        assert folder is not None
        manifest = self._agreed(ranks, lambda: read_manifest(folder))[ranks.rank]
        loading = _Loading(self.runs, RunReader(folder, manifest), ranks, strict)
        known = self._agreed(ranks, loading.prepare)
        self._agreed(ranks, lambda: loading.check_names(known))
        if verify:
            self._agreed(ranks, lambda: loading.reader.verify(ranks.rank, ranks.size))
        self._agreed(ranks, loading.commit)
        return decode(manifest.values.get("extra", {}), "extra")

    @staticmethod
    def _agreed(ranks: JobRanks, do: Callable[[], Any]) -> list[Any]:
        failure, value = None, None
        try:
            value = do()
        except Exception as error:
            failure = error
        return ranks.agree(failure, value, "load")


class _Loading:
    """One load on one rank, between its checks and its changes."""

    def __init__(self, runs: Sequence[BoostedRun], reader: RunReader, ranks: JobRanks, strict: bool) -> None:
        self.runs, self.reader, self.ranks, self.strict = runs, reader, ranks, strict
        self.manifest = reader.manifest
        self.wants: list[Want] = []
        self.missing: list[str] = []
        self.afterwards: list[Callable[[], Any]] = []

    def prepare(self) -> list[str]:
        """Find all that is wanted; returns the stored names that this rank has a use for."""
        self._check_count()
        for i, run in enumerate(self.runs):
            model = ModelState(run.model, _section("model", i))
            wants, missing = self._named(model.wants, self.manifest, _section("optimizer", i))
            self.wants += wants
            self.missing += missing
            extra = decode(self._saved(model.section).get("extra", {}), f"{model.section} extra state")
            self.afterwards.append(partial(model.loaded, extra))
            if run.optimizer is not None:
                self._prepare_optimizer(run.optimizer, model, _section("optimizer", i))
            for kind, part in (("lr_scheduler", run.lr_scheduler), ("dataloader", run.dataloader)):
                self._prepare_part(kind, part, _section(kind, i))
        self._prepare_random()
        self.reader.check_wants(self.wants)
        return [want.source.name for want in self.wants]

    def _check_count(self) -> None:
        stored = sum(key.startswith("model") for key in self.manifest.values)
        if stored != len(self.runs):
            raise RuntimeError(
                f"{self.reader.folder} was saved by a booster that had boosted {stored} models, and this one"
                " has boosted"
                f" {len(self.runs)}; use a booster for the models that belong together"
            )

    def _prepare_optimizer(self, optimizer: Optimizer, model: ModelState, section: str) -> None:
        if section not in self.manifest.values and self.strict:
            raise RuntimeError(
                f"{self.reader.folder} holds no {section}: it was saved by a booster that had boosted none."
                " Pass strict=False to"
                " start with an optimizer without states"
            )
        state = OptimizerState(optimizer, model.parameter_names, section)
        values = self.manifest.values.get(section)
        saved = self._named(StoredOptimizer.from_values, values, section) if values else state.fresh()
        wants, commit = self._named(state.wants, self.manifest, saved, self.strict)
        self.wants += wants
        self.afterwards.append(commit)

    def _prepare_part(self, kind: str, part: Any, section: str) -> None:
        if part is None or not hasattr(part, "load_state_dict"):
            return
        if section not in self.manifest.values:
            get_dist_logger().warning(
                f"{self.reader.folder} holds no {section}; that of this run stays as it is", ranks=[0]
            )
            return
        state = decode(self.manifest.values[section], section)
        self.afterwards.append(lambda: part.load_state_dict(state))

    def _prepare_random(self) -> None:
        saved = self._saved(RANDOM)
        own = self.manifest.find(f"{RANDOM}/{self.ranks.rank}")
        now = {"world": self.ranks.size, "mesh": _axes(), "device": random_device()}
        if own is not None and all(saved.get(key) == value for key, value in now.items()):
            room = torch.empty(own.shape, dtype=own.dtype)
            self.wants.append(Want(own, [HeldBox(stored.box, room) for stored in own.boxes]))
            self.afterwards.append(lambda: restore_random_state(room))
        elif "seed" in saved:
            self.afterwards.append(lambda: restart_random_state(saved["seed"]))

    def check_names(self, known: Sequence[Sequence[str]]) -> None:
        """Refuse names that only one side has."""
        used = {name for names in known for name in names}
        sections = tuple(f"{_section('model', i)}/" for i in range(len(self.runs)))
        unknown = [n for n in self.manifest.tensors if n.startswith(sections) and n not in used]
        unknown = [n for n in unknown if not self._is_replaced(n, used)]
        faults = [("it lacks", self.missing), ("the model does not know", unknown)]
        stored = [n for n in self.manifest.tensors if n.startswith(sections)]
        if not self.strict and self.missing and stored and len(unknown) == len(stored):
            raise RuntimeError(
                f"nothing of {self.reader.folder} fits the model: it has {_some(stored)}; the model"
                f" {_some(self.missing)}. Nothing"
                " was changed"
            )
        if self.strict and (self.missing or unknown):
            details = "; ".join(f"{what} {_some(names)}" for what, names in faults if names)
            raise RuntimeError(
                f"{self.reader.folder} does not fit the model: {details}. Pass strict=False to pass over this"
            )

    def _is_replaced(self, name: str, used: set[str]) -> bool:
        """Whether a weight was read from its fp32 master."""
        section, _, rest = name.partition("/")
        return f"{section.replace('model', 'optimizer')}/{rest}/master" in used

    def commit(self) -> None:
        self.reader.fill(self.wants)
        for step in self.afterwards:
            step()

    def _saved(self, section: str) -> dict[str, Any]:
        found = self.manifest.values.get(section, {})
        return found if isinstance(found, dict) else {}

    def _named(self, call: Callable[..., Any], *args: Any) -> Any:
        """``call``, whose errors then name the checkpoint."""
        try:
            return call(*args)
        except (KeyError, RuntimeError) as error:
            raise RuntimeError(f"{self.reader.folder} does not fit: {error}") from error


def _find(path: str | Path) -> Path:
    found = latest(path)
    if found is None:
        raise FileNotFoundError(
            f"there is no checkpoint at {path}, and none in the folders below it (a save that was interrupted"
            " leaves none)"
        )
    return found


def _section(kind: str, index: int) -> str:
    return kind if index == 0 else f"{kind}{index + 1}"


def _state_of(kind: str, part: Any) -> Any:
    if hasattr(part, "state_dict"):
        return part.state_dict()
    get_dist_logger().warning_once(
        f"the position in the data is not saved: {type(part).__name__} cannot tell it. Use"
        " plugin.prepare_dataloader,"
        " colossalai.utils.get_dataloader or another loader with state_dict and load_state_dict",
        ranks=[0],
    )
    return None


def _rank_and_size() -> tuple[int, int]:
    ranks = JobRanks()
    return ranks.rank, ranks.size


def _axes() -> dict[str, int]:
    mesh = launched_mesh()
    return {} if mesh is None else dict(mesh.size)


def _some(names: Sequence[str], most: int = 6) -> str:
    listed = ", ".join(names[:most])
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed


def capture_random_state() -> Tensor:
    """All states of this rank, as bytes."""
    mode = get_current_mode()
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if _uses_cuda() else None,
        "streams": {m.name: state for m, state in get_states(copy=True).items()} if get_seeds() else {},
        "mode": None if mode is None else mode.name,
    }
    text = json.dumps(encode(states, "random state"))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def restore_random_state(raw: Tensor) -> None:
    """Go on where ``capture_random_state`` was called."""
    states = decode(json.loads(raw.numpy().tobytes()), "random state")
    known = {mode.name: mode for mode in get_seeds()}
    for name, state in states["streams"].items():
        if name in known:
            set_seed_states(known[name], state)
    if states["mode"] in known:
        set_mode(known[states["mode"]])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and _uses_cuda():
        torch.cuda.set_rng_state(states["cuda"])


def restart_random_state(seed: int) -> None:
    """Start all streams from ``seed``, as a launch does."""
    if gpc.is_initialized(ParallelMode.GLOBAL):
        gpc.set_seed(seed)
        return
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_device() -> str:
    """Return the kind of device whose generators make the streams; their states differ in form."""
    return "cuda" if _uses_cuda() else "cpu"


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
