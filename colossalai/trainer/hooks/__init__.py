"""Hooks of the trainer, and the metrics they keep."""

from colossalai.trainer.hooks.base import BaseHook
from colossalai.trainer.hooks.expert_hook import ExpertLoadHook, ExpertMetric
from colossalai.trainer.hooks.log_hooks import (
    JSONLinesHook,
    LogByEpochHook,
    LogMemoryByEpochHook,
    LogMetricByEpochHook,
    LogMetricByStepHook,
    LogTimingByEpochHook,
    TensorboardHook,
    WandbHook,
    WriteMetricsHook,
)
from colossalai.trainer.hooks.metric_hooks import AccuracyHook, LossHook, MetricHook, ThroughputHook
from colossalai.trainer.hooks.metrics import (
    AccuracyMetric,
    LearningRateMetric,
    LossMetric,
    Metric,
    ThroughputMetric,
)
from colossalai.trainer.hooks.profile_hook import ProfileHook
from colossalai.trainer.hooks.training_hooks import (
    EarlyStoppingHook,
    LRSchedulerHook,
    RecordPipelineHook,
    SaveCheckpointHook,
)

__all__ = [
    "AccuracyHook",
    "AccuracyMetric",
    "BaseHook",
    "EarlyStoppingHook",
    "ExpertLoadHook",
    "ExpertMetric",
    "JSONLinesHook",
    "LRSchedulerHook",
    "LearningRateMetric",
    "LogByEpochHook",
    "LogMemoryByEpochHook",
    "LogMetricByEpochHook",
    "LogMetricByStepHook",
    "LogTimingByEpochHook",
    "LossHook",
    "LossMetric",
    "Metric",
    "MetricHook",
    "ProfileHook",
    "RecordPipelineHook",
    "SaveCheckpointHook",
    "TensorboardHook",
    "ThroughputHook",
    "ThroughputMetric",
    "WandbHook",
    "WriteMetricsHook",
]
