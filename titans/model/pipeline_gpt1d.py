"""Documented home of the GPTs for a pipeline with 1D tensor parallelism."""

from titans.model.pipeline_gpt import GPT2_exlarge_pipeline_1D, GPT2_small_pipeline_1D, GPT3_pipeline_1D

__all__ = ["GPT2_exlarge_pipeline_1D", "GPT2_small_pipeline_1D", "GPT3_pipeline_1D"]
