"""``ParallelConfig``: the ``parallel`` dict of a config as a typed object, and the ranks that follow from it.

Everything here is arithmetic: no process group is needed, so a plan can be checked before a job exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from colossalai.constants import ALLOWED_MODES, INITIALIZER_MAPPING
from colossalai.context.config import ConfigException
from colossalai.context.config_schema import is_positive_int
from colossalai.context.parallel_mode import ParallelMode
from colossalai.context.spelling import near, suggestion
from colossalai.context.tensor_modes import (
    TENSOR_MODES,
    mode_axes,
    tensor_mode,
)
from colossalai.mesh import DATA_AXIS, PIPELINE_AXIS, mesh_groups

# Every job has these groups, so these initializers always run, in this order.
ALWAYS = ("data", "model", "pipeline", "tensor")

# Pipeline schedules that lay the stages out as a V: the way of a batch ends on the rank where it began.
V_SCHEDULES = ("zbv",)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the three kinds of parallelism, with the tensor mode and its options.

    ``data`` is None until ``fit`` derives it from the world size, unless the config names it.  ``schedule``
    is the name of a pipeline schedule; None leaves the choice to ``initialize``.
    """

    data: int | None = None
    pipeline: int = 1
    schedule: str | None = None
    tensor: int = 1
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_vee(self) -> bool:
        """Whether the first rank of a pipeline also holds its last layers."""
        return self.schedule in V_SCHEDULES

    @classmethod
    def parse(cls, parallel: Mapping[str, Any] | None) -> ParallelConfig:
        """Read the ``parallel`` section of a config, in any of the documented forms."""
        section = {} if parallel is None else parallel
        if not isinstance(section, Mapping):
            raise ConfigException(f"parallel must be a dict, got {type(section).__name__} {section!r}")
        _refuse_unknown("parallel", section, ("data", "pipeline", "tensor"))
        tensor, pipeline = section.get("tensor", 1), section.get("pipeline", 1)
        options = dict(tensor) if isinstance(tensor, Mapping) else {"size": tensor}
        return cls(
            data=_size("data", section["data"]) if "data" in section else None,
            pipeline=_size("pipeline", pipeline, ("schedule",)),
            schedule=pipeline.get("schedule") if isinstance(pipeline, Mapping) else None,
            tensor=options.pop("size", 1),
            mode=options.pop("mode", None),
            options=MappingProxyType(options),
        )

    def __post_init__(self) -> None:
        for name, size in {"data": self.data, "pipeline": self.pipeline, "tensor": self.tensor}.items():
            if not (name == "data" and size is None):
                _check_size(f"the size of parallel.{name}", size)
        _check_mode(self.mode, self.tensor, self.options)
        if self.mode not in TENSOR_MODES:
            return  # a mode of the user's own: its initializer knows which options and sizes fit
        _check_options(self.mode, self.options)
        try:
            self._tensor_sizes()
        except ValueError as error:
            raise ConfigException(f"parallel.tensor: mode {self.mode!r} does not fit: {error}") from None

    def fit(self, world_size: int) -> ParallelConfig:
        """The same plan with the data-parallel size that fills ``world_size`` ranks."""
        model = self.pipeline * self.tensor
        arithmetic = f"pipeline {self.pipeline} x tensor {self.tensor} = {model}"
        if self.data is None:
            if world_size % model:
                raise ConfigException(
                    f"the world size {world_size} is not a multiple of {arithmetic}; start a multiple of"
                    f" {model} processes or change parallel.pipeline or parallel.tensor"
                )
            return replace(self, data=world_size // model)
        if self.data * model != world_size:
            raise ConfigException(
                f"data {self.data} x {arithmetic.rpartition(' = ')[0]} = {self.data * model}, but the world"
                f" size is {world_size}; start {self.data * model} processes, or leave parallel.data out to"
                " have it derived"
            )
        return self

    @property
    def axes(self) -> dict[str, int]:
        """The mesh axes with their sizes, major first."""
        assert self.data is not None, "call fit(world_size) first"
        return {DATA_AXIS: self.data, PIPELINE_AXIS: self.pipeline, **self._tensor_sizes()}

    @property
    def initializers(self) -> list[str]:
        """The rows of ``INITIALIZER_MAPPING`` that make the groups of this plan, in order."""
        return [*ALWAYS, *([self.mode] if self.mode is not None else [])]

    @property
    def group_options(self) -> dict[str, Any]:
        """What the mode's initializer is given: all options but the flags, which say how layers use the
        groups.
        """
        flags = tensor_mode(self.mode).flags
        return {name: value for name, value in self.options.items() if name not in flags}

    @property
    def env_fields(self) -> dict[str, Any]:
        """What ``tensor_parallel_env`` holds under this plan."""
        return {"mode": self.mode, **tensor_mode(self.mode).env_fields(self._tensor_sizes())}

    def _tensor_sizes(self) -> dict[str, int]:
        row = tensor_mode(self.mode)
        return row.sizes(self.tensor, **{name: self.options[name] for name in row.options})


def rank_table(
    parallel: ParallelConfig | Mapping[str, Any] | None, world_size: int
) -> dict[ParallelMode, list[list[int]]]:
    """The groups of every parallel mode that our own initializers make, as lists of ranks.

    ``parallel`` is the ``parallel`` section of a config.  Groups of a mode that a user added are not known
    here.
    """
    plan = parallel if isinstance(parallel, ParallelConfig) else ParallelConfig.parse(parallel)
    axes = plan.fit(world_size).axes
    return {mode: mesh_groups(axes, joined) for mode, joined in mode_axes(plan.mode).items()}


def format_rank_table(table: Mapping[ParallelMode, list[list[int]]]) -> str:
    """``rank_table`` as aligned lines, one mode each, for people to read."""
    width = max(len(mode.name) for mode in table)
    return "\n".join(
        f"{mode.name:<{width}}  {' '.join('(' + ','.join(map(str, group)) + ')' for group in groups)}"
        for mode, groups in table.items()
    )


def _size(name: str, value: Any, others: tuple[str, ...] = ()) -> Any:
    """The size in ``name=2`` or ``name=dict(size=2)``."""
    if not isinstance(value, Mapping):
        return value
    _refuse_unknown(f"parallel.{name}", value, ("size", *others))
    return value.get("size", 1)


def _check_size(name: str, value: Any) -> None:
    if not is_positive_int(value):
        raise ConfigException(f"{name} must be a positive integer, got {type(value).__name__} {value!r}")


def _known_modes() -> list[str]:
    ours = [mode for mode in ALLOWED_MODES if mode is not None]
    return [*ours, *(mode for mode in INITIALIZER_MAPPING if mode not in (*ALWAYS, *ours))]


def _check_mode(mode: Any, size: int, options: Mapping[str, Any]) -> None:
    known = _known_modes()
    if mode is None and size > 1:
        if meant := [key for key in options if near("mode", [str(key).lower()])]:
            _refuse_unknown("parallel.tensor", {meant[0]: None}, ("mode", "size"))
        raise ConfigException(
            f"parallel.tensor has size {size} but no mode; write tensor=dict(size={size}, mode='1d') "
            f"with one of the modes {', '.join(map(repr, known))}"
        )
    if mode is not None and mode not in known:
        raise ConfigException(
            f"parallel.tensor.mode {mode!r} is unknown: {suggestion(mode, known)}; a mode of your own needs a"
            " row in colossalai.constants.INITIALIZER_MAPPING before launch"
        )


def _check_options(mode: str | None, options: Mapping[str, Any]) -> None:
    wanted, flags = TENSOR_MODES[mode].options, TENSOR_MODES[mode].flags
    _refuse_unknown("parallel.tensor", options, ("size", "mode", *wanted, *flags))
    for name in flags:
        if not isinstance(options.get(name, False), bool):
            raise ConfigException(f"parallel.tensor.{name} must be True or False, got {options[name]!r}")
    for name in wanted:
        if name not in options:
            raise ConfigException(
                f"parallel.tensor: mode {mode!r} needs {name!r}, as in tensor=dict(size=8, mode={mode!r},"
                f" {name}=2)"
            )
        _check_size(f"parallel.tensor.{name}", options[name])


def _refuse_unknown(where: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            raise ConfigException(f"{where} has an unknown key {key!r}: {suggestion(key, known)}")
