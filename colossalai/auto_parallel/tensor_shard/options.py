"""What a search for strategies may be told: which strategies count, and how data come in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

_Option = TypeVar("_Option", bound=Enum)


class SolverPerference(Enum):
    """The strategies that are looked at (spelled as documented): all, or only one kind of parallelism."""

    STANDARD = "standard"
    DP = "dp"
    TP = "tp"


class ShardOption(Enum):
    """How much of the mesh the strategies of an operation must use."""

    STANDARD = "standard"
    """Any strategy, also a replicated one."""
    SHARD = "shard"
    """Strategies that cut something."""
    SHARD_LAST_AXIS = "shard_last_axis"
    """Strategies that cut over the last axis of the mesh alone."""
    FULL_SHARD = "full_shard"
    """Strategies that use every axis of the mesh."""


class DataloaderOption(Enum):
    """Whether every rank loads the whole batch, or its part."""

    REPLICATED = "replicated"
    DISTRIBUTED = "distributed"


@dataclass
class SolverOptions:
    """The options of a search, by members of the enums or by their names in lower case."""

    solver_perference: SolverPerference = SolverPerference.STANDARD
    dataloader_option: DataloaderOption = DataloaderOption.REPLICATED
    shard_option: ShardOption = ShardOption.STANDARD

    def __post_init__(self) -> None:
        self.solver_perference = _member(SolverPerference, self.solver_perference, "solver_preference")
        self.dataloader_option = _member(DataloaderOption, self.dataloader_option, "dataloader_option")
        self.shard_option = _member(ShardOption, self.shard_option, "shard_option")


def _member(options: type[_Option], value: object, name: str) -> _Option:
    for option in options:
        if value is option or value == option.value:
            return option
    known = ", ".join(repr(option.value) for option in options)
    raise ValueError(f"{name}={value!r}; expected one of {known}, or a member of {options.__name__}")
