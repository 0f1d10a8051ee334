"""Recordings of a pipeline, measured or planned, as a picture, as a trace and as a table."""

from colossalai.pipeline.recording.recorder import record_run
from colossalai.pipeline.recording.recording import RecordedStep, Recording, planned_run

__all__ = ["RecordedStep", "Recording", "planned_run", "record_run"]
