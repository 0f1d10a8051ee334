"""Metrics of a batch."""

from colossalai.nn.metric.accuracy import Accuracy, calc_acc

__all__ = ["Accuracy", "calc_acc"]
