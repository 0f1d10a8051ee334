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
from colossalai.mesh import (
    DATA_AXIS,
    PIPELINE_AXIS,
    SEQUENCE_AXES,
    Axes,
    expert_axis_sizes,
    mesh_groups,
)

# Every job has these groups, so these initializers always run, in this order.
ALWAYS = ("data", "model", "pipeline", "tensor")
# Rows of INITIALIZER_MAPPING that belong to no tensor mode.
BESIDE_TENSOR = (*ALWAYS, "moe", "embedding")

# Pipeline schedules that lay the stages out as a V: the way of a batch ends on the rank where it began.
V_SCHEDULES = ("zbv",)

# How attention looks at the parts of the sequence that lie on other ranks.
ATTENTIONS = ("ring", "ulysses", "both")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of all kinds of parallelism, with the tensor mode and its options.

    ``data`` is None until ``fit`` derives it from the world size, unless the config names it.  ``schedule``
    is the name of a pipeline schedule; None leaves the choice to ``initialize``.  ``sequence`` is the size of
    ``parallel.sequence``, and 1 in the tensor mode 'sequence', whose size is ``tensor``; ``sequence_axes``,
    ``ring_axis`` and ``heads_axis`` know both forms.
    """

    data: int | None = None
    moe: int = 1
    """How many of the data-parallel ranks share the experts out."""
    pipeline: int = 1
    schedule: str | None = None
    sequence: int = 1
    attention: str = "ring"
    ulysses: int | None = None
    """How many of the sequence's ranks exchange heads where attention is 'both'; the others form rings."""
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
        _refuse_unknown("parallel", section, ("data", "moe", "pipeline", "sequence", "tensor"))
        tensor, pipeline = section.get("tensor", 1), section.get("pipeline", 1)
        sequence = section.get("sequence", 1)
        kind = dict(sequence) if isinstance(sequence, Mapping) else {}
        if kind and "size" not in kind:
            _refuse_unknown("parallel.sequence", kind, ("size", "attention", "ulysses"))
            raise ConfigException(
                f"parallel.sequence {kind} has no size, so nothing would be cut; write"
                " sequence=dict(size=2, ...) with the number of ranks of a sequence"
            )
        options = dict(tensor) if isinstance(tensor, Mapping) else {"size": tensor}
        return cls(
            data=_size("data", section["data"]) if "data" in section else None,
            moe=_size("moe", section.get("moe", 1)),
            pipeline=_size("pipeline", pipeline, ("schedule",)),
            schedule=pipeline.get("schedule") if isinstance(pipeline, Mapping) else None,
            sequence=_size("sequence", sequence, ("attention", "ulysses")),
            attention=kind.get("attention", "ring"),
            ulysses=kind.get("ulysses"),
            tensor=options.pop("size", 1),
            mode=options.pop("mode", None),
            options=MappingProxyType(options),
        )

    def __post_init__(self) -> None:
        for name in ("data", "moe", "pipeline", "sequence", "tensor"):
            if not (name == "data" and self.data is None):
                _check_size(f"the size of parallel.{name}", getattr(self, name))
        _check_mode(self.mode, self.tensor, self.options)
        _check_sequence(self)
        if self.mode not in TENSOR_MODES:
            return  # a mode of the user's own: its initializer knows which options and sizes fit
        _check_options(self.mode, self.options)
        try:
            self._tensor_sizes()
        except ValueError as error:
            raise ConfigException(f"parallel.tensor: mode {self.mode!r} does not fit: {error}") from None

    def fit(self, world_size: int) -> ParallelConfig:
        """The same plan with the data-parallel size that fills ``world_size`` ranks."""
        model = self.pipeline * self.sequence * self.tensor
        cut = f" x sequence {self.sequence}" if self.sequence > 1 else ""
        arithmetic = f"pipeline {self.pipeline}{cut} x tensor {self.tensor} = {model}"
        if self.data is None:
            if world_size % model:
                raise ConfigException(
                    f"the world size {world_size} is not a multiple of {arithmetic}; start a multiple of"
                    f" {model} processes or change parallel.pipeline{', parallel.sequence' if cut else ''} or"
                    " parallel.tensor"
                )
            return replace(self, data=world_size // model)._check_experts()
        if self.data * model != world_size:
            raise ConfigException(
                f"data {self.data} x {arithmetic.rpartition(' = ')[0]} = {self.data * model}, but the world"
                f" size is {world_size}; start {self.data * model} processes, or leave parallel.data out to"
                " have it derived"
            )
        return self._check_experts()

    def _check_experts(self) -> ParallelConfig:
        assert self.data is not None
        if self.data % self.moe:
            raise ConfigException(
                f"parallel.moe has size {self.moe}, which does not divide the {self.data} data-parallel ranks"
                " that share the experts out; use a factor of"
                f" {self.data}, or start more processes"
            )
        return self

    @property
    def axes(self) -> dict[str, int]:
        """The mesh axes with their sizes, major first."""
        assert self.data is not None, "call fit(world_size) first"
        data = {DATA_AXIS: self.data // self.moe} | expert_axis_sizes(self.moe)
        return data | {PIPELINE_AXIS: self.pipeline} | self.sequence_axes | self._tensor_sizes()

    @property
    def mode_axes(self) -> dict[ParallelMode, Axes]:
        """The axes that each parallel mode of this plan joins."""
        return mode_axes(self.mode, tuple(self.axes))

    @property
    def sequence_axes(self) -> dict[str, int]:
        """The axes that cut the sequence, with their sizes: the ring's first, Ulysses' last."""
        if self.mode == "sequence":
            return self._tensor_sizes()
        if self.sequence == 1:
            return {}
        ring, heads = SEQUENCE_AXES
        if self.attention != "both":
            return {ring: self.sequence}
        return {ring: self.sequence // self._heads, heads: self._heads}

    @property
    def ring_axis(self) -> str | None:
        """The axis around which attention passes keys; None where there is no ring."""
        return None if self.attention == "ulysses" else next(iter(self.sequence_axes), None)

    @property
    def heads_axis(self) -> str | None:
        """The axis over which Ulysses exchanges the sequence for heads; None where there is none."""
        return None if self.attention == "ring" else next(reversed(self.sequence_axes), None)

    @property
    def initializers(self) -> list[str]:
        """The rows of ``INITIALIZER_MAPPING`` that make the groups of this plan, in order."""
        own = [] if self.mode is None else [self.mode]
        return [
            *ALWAYS,
            *own,
            *(["sequence"] if self.sequence > 1 else []),
            *(["moe"] if self.moe > 1 else []),
        ]

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

    @property
    def _heads(self) -> int:
        return 2 if self.ulysses is None else self.ulysses

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
    plan = plan.fit(world_size)
    return {mode: mesh_groups(plan.axes, joined) for mode, joined in plan.mode_axes.items()}


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
    return [*ours, *(mode for mode in INITIALIZER_MAPPING if mode not in (*BESIDE_TENSOR, *ours))]


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


def _check_sequence(plan: ParallelConfig) -> None:
    where = "parallel.sequence"
    if plan.attention not in ATTENTIONS:
        raise ConfigException(
            f"{where}.attention {plan.attention!r} is unknown: {suggestion(plan.attention, ATTENTIONS)}"
        )
    if plan.ulysses is not None:
        _check_size(f"{where}.ulysses", plan.ulysses)
        if plan.attention != "both":
            raise ConfigException(
                f"{where}.ulysses says how many ranks of attention='both' exchange heads, but attention is"
                f" {plan.attention!r}; leave ulysses out, or write attention='both'"
            )
    if plan.attention == "both" and plan.sequence % plan._heads:
        raise ConfigException(
            f"{where}: size {plan.sequence} cannot be divided by ulysses={plan._heads}; the others of its"
            " ranks would form the ring"
        )
    if plan.mode == "sequence" and plan.attention != "ring":
        raise ConfigException(
            f"{where}.attention is {plan.attention!r} beside tensor mode 'sequence', which is a ring; write"
            f" sequence=dict(size={plan.tensor}, attention={plan.attention!r}) and no tensor section"
        )
    if plan.sequence == 1:
        return
    if plan.mode not in (None, "1d"):
        why = "it cuts the sequence already" if plan.mode == "sequence" else "it cuts rows by its own axes"
        raise ConfigException(
            f"{where} has size {plan.sequence} beside tensor mode {plan.mode!r}: {why}; cut sequences go with"
            " tensor=dict(mode='1d') or no tensor section"
        )
    if plan.options.get("sequence_parallel"):
        raise ConfigException(
            f"{where} has size {plan.sequence} beside parallel.tensor.sequence_parallel=True, which cuts the"
            " same sequence over the tensor ranks between their products; leave one of the two out"
        )


def _refuse_unknown(where: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            raise ConfigException(f"{where} has an unknown key {key!r}: {suggestion(key, known)}")
