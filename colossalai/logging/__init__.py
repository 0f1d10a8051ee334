"""Logging for jobs of many ranks: ``get_dist_logger().info("ready", ranks=[0])`` prints once, not once per
rank.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from colossalai.logging.logger import DistributedLogger
from colossalai.logging.metric_writers import JSONLinesWriter, MetricWriter, TensorboardWriter, WandbWriter
from colossalai.logging.rank import set_rank_resolver

__all__ = [
    "DistributedLogger",
    "JSONLinesWriter",
    "MetricWriter",
    "TensorboardWriter",
    "WandbWriter",
    "disable_existing_loggers",
    "get_dist_logger",
    "set_rank_resolver",
]


def get_dist_logger(name: str = "colossalai") -> DistributedLogger:
    """The distributed logger called ``name``, made at its first use."""
    return DistributedLogger.get_instance(name)


def disable_existing_loggers(
    include: Collection[str] | None = None, exclude: Collection[str] = ("colossalai",)
) -> None:
    """Let the loggers of other libraries show only warnings and errors.

    ``include`` limits this to the loggers named there, ``exclude`` protects some; either name covers its
    children (``"transformers"`` covers ``"transformers.modeling_utils"``).  A logger that is already quieter
    stays so.
    """
    for argument, names in (("include", include), ("exclude", exclude)):
        if isinstance(names, str):
            raise TypeError(
                f"{argument} is a list of logger names, got {names!r}; write {argument}=[{names!r}]"
            )
    for name, logger in list(logging.Logger.manager.loggerDict.items()):
        chosen = include is None or _covers(include, name)
        if not isinstance(logger, logging.Logger) or not chosen or _covers(exclude, name):
            continue
        if logger.getEffectiveLevel() < logging.WARNING:
            logger.setLevel(logging.WARNING)


def _covers(names: Collection[str], logger_name: str) -> bool:
    return any(logger_name == name or logger_name.startswith(f"{name}.") for name in names)
