"""Documented home of ``bucket_allreduce``."""

from colossalai.engine.gradient_handler.bucket import bucket_allreduce

__all__ = ["bucket_allreduce"]
