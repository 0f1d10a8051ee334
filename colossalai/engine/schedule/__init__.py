"""Schedules: how an engine executes the forward and backward passes of an iteration."""

from colossalai.engine.schedule.base import BaseSchedule, NonPipelineSchedule
from colossalai.engine.schedule.pipeline import (
    InterleavedPipelineSchedule,
    PipelineSchedule,
    PipelineScheduleV2,
    get_tensor_shape,
)

__all__ = [
    "BaseSchedule",
    "InterleavedPipelineSchedule",
    "NonPipelineSchedule",
    "PipelineSchedule",
    "PipelineScheduleV2",
    "get_tensor_shape",
]
