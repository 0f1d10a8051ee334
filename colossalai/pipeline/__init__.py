"""Pipeline parallelism: a model cut into stages, and schedules that keep the stages busy."""

from colossalai.pipeline.layer_spec import LayerSpec
from colossalai.pipeline.pipelinable import PipelinableContext, PipelinableModel

__all__ = ["LayerSpec", "PipelinableContext", "PipelinableModel"]
