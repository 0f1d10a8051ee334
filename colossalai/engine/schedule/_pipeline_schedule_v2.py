"""The documented place of ``PipelineScheduleV2``."""

from colossalai.engine.schedule.pipeline import PipelineScheduleV2

__all__ = ["PipelineScheduleV2"]
