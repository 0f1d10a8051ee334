"""From a config to the schedule of its engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colossalai.context.config import ConfigException
from colossalai.context.parallel_config import ParallelConfig
from colossalai.engine.schedule.base import BaseSchedule
from colossalai.engine.schedule.pipeline import InterleavedPipelineSchedule, PipelineSchedule
from colossalai.pipeline.schedule import make_timetable

_SIZES = ("SEQ_LENGTH", "GLOBAL_BATCH_SIZE", "HIDDEN_SIZE")


def schedule_from_config(
    config: Mapping[str, Any], plan: ParallelConfig, data_size: int
) -> BaseSchedule | None:
    """The pipeline schedule that ``config`` asks for; None without a pipeline."""
    if plan.pipeline == 1:
        return None
    microbatches, chunks = config["NUM_MICRO_BATCHES"], num_chunks(config)
    name = plan.schedule or ("interleaved" if chunks > 1 else "1f1b")
    try:
        make_timetable(name, plan.pipeline, microbatches, chunks)
    except ValueError as error:
        raise ConfigException(f"the config asks for a pipeline that does not work: {error}") from None
    shape = tensor_shape(config, data_size, plan.tensor if plan.mode == "sequence" else 1)
    if chunks > 1:
        return InterleavedPipelineSchedule(microbatches, chunks, tensor_shape=shape, schedule=name)
    return PipelineSchedule(microbatches, tensor_shape=shape, schedule=name)


def num_chunks(config: Mapping[str, Any]) -> int:
    """``model.num_chunks``, or ``NUM_CHUNKS``; 1 if there is neither."""
    model = config.get("model")
    own = model.get("num_chunks") if isinstance(model, Mapping) else None
    return own or config.get("NUM_CHUNKS") or 1


def tensor_shape(config: Mapping[str, Any], data_size: int, sequence_size: int = 1) -> tuple[int, ...] | None:
    """``TENSOR_SHAPE``, or what follows from ``SEQ_LENGTH``, ``GLOBAL_BATCH_SIZE`` and ``HIDDEN_SIZE``, if all are set."""
    if config.get("TENSOR_SHAPE") is not None:
        return tuple(config["TENSOR_SHAPE"])
    if any(config.get(name) is None for name in _SIZES):
        return None
    length, batch, hidden = (config[name] for name in _SIZES)
    return (length // sequence_size, batch // data_size // config["NUM_MICRO_BATCHES"], hidden)
