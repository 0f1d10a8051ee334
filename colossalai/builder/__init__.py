"""Builds the object that a dict with a ``type`` describes."""

from colossalai.builder.builder import build_from_config, build_from_registry
from colossalai.builder.pipeline import build_pipeline_model, build_pipeline_model_from_cfg
from colossalai.engine.gradient_handler import build_gradient_handler

__all__ = [
    "build_from_config",
    "build_from_registry",
    "build_gradient_handler",
    "build_pipeline_model",
    "build_pipeline_model_from_cfg",
]
