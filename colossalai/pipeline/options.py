"""The pipeline options of a config, checked and with types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from colossalai.context.config import ConfigException
from colossalai.context.config_schema import is_positive_int
from colossalai.context.parallel_config import ParallelConfig
from colossalai.pipeline.schedule import make_timetable

_SIZES = ("SEQ_LENGTH", "GLOBAL_BATCH_SIZE", "HIDDEN_SIZE")


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Options of a batch's way through a pipeline; see ``Pipeline`` for their meaning."""

    schedule: str
    microbatches: int
    chunks: int = 1
    tensor_shape: tuple[int, ...] | None = None
    is_shape_told: bool = False
    """Whether ``tensor_shape`` is ``TENSOR_SHAPE``, and not what follows from sizes of a batch, which models
    may send in another order (batch first)."""

    @property
    def told_shape(self) -> tuple[int, ...] | None:
        """``TENSOR_SHAPE``: what stages need not tell each other."""
        return self.tensor_shape if self.is_shape_told else None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], plan: ParallelConfig) -> PipelineOptions:
        """Read ``NUM_MICRO_BATCHES``, ``NUM_CHUNKS`` or ``model.num_chunks``, and ``TENSOR_SHAPE``; ``plan``
        is fitted.
        """
        microbatches = config.get("NUM_MICRO_BATCHES")
        if microbatches is None:
            raise ConfigException(
                f"config has a pipeline of {plan.pipeline} stages, but no NUM_MICRO_BATCHES; set it to the"
                " number of parts that every batch is cut into"
            )
        chunks = _chunks(config, plan)
        schedule = plan.schedule or ("interleaved" if chunks > 1 else "1f1b")
        try:
            make_timetable(schedule, plan.pipeline, microbatches, chunks)
        except ValueError as error:
            raise ConfigException(f"the config asks for a pipeline that does not work: {error}") from None
        shape = _tensor_shape(config, plan)
        return cls(
            schedule=schedule,
            microbatches=microbatches,
            chunks=chunks,
            tensor_shape=shape,
            is_shape_told=config.get("TENSOR_SHAPE") is not None,
        )


def _chunks(config: Mapping[str, Any], plan: ParallelConfig) -> int:
    model = config.get("model")
    own = model.get("num_chunks") if isinstance(model, Mapping) else None
    if own is not None:
        _check_count(
            "model.num_chunks", own, "it says how many chunks of the model every rank of the pipeline holds"
        )
    return own or config.get("NUM_CHUNKS") or (2 if plan.is_vee else 1)


def _tensor_shape(config: Mapping[str, Any], plan: ParallelConfig) -> tuple[int, ...] | None:
    """``TENSOR_SHAPE``, or what follows from the sizes of a batch of sequences, if all are set."""
    if config.get("TENSOR_SHAPE") is not None:
        return tuple(config["TENSOR_SHAPE"])
    if any(config.get(name) is None for name in _SIZES):
        return None
    for name in _SIZES:
        _check_count(
            name, config[name], f"{', '.join(_SIZES)} together say what pipeline stages send to each other"
        )
    length, batch, hidden = (config[name] for name in _SIZES)
    length //= math.prod(plan.sequence_axes.values())
    size = batch // (plan.data or 1) // config["NUM_MICRO_BATCHES"]
    return (length, size, hidden) if length and size else None


def _check_count(key: str, value: object, why: str) -> None:
    if not is_positive_int(value):
        raise ConfigException(
            f"config key {key!r} must be a positive integer, got {type(value).__name__} {value!r}; {why}"
        )
