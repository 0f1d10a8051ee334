"""Documented home of ``bucket_allreduce``."""

from colossalai.utils.bucket import bucket_allreduce

__all__ = ["bucket_allreduce"]
