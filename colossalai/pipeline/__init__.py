"""Pipeline parallelism: a model cut into stages, and schedules that keep the stages busy."""

from colossalai.checkpoint_io import save_pretrained
from colossalai.pipeline.pipelinable import LayerSpec, PipelinableContext, PipelinableModel
from colossalai.pipeline.recording import Recording, planned_run, record_run
from colossalai.pipeline.split import split_model

__all__ = [
    "LayerSpec",
    "PipelinableContext",
    "PipelinableModel",
    "Recording",
    "planned_run",
    "record_run",
    "save_pretrained",
    "split_model",
]
