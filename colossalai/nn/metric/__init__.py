"""Metrics of a batch."""

from colossalai.nn.metric.accuracy import Accuracy, Accuracy2D, Accuracy2p5D, Accuracy3D, calc_acc

__all__ = ["Accuracy", "Accuracy2D", "Accuracy2p5D", "Accuracy3D", "calc_acc"]
