"""The trainer: training and evaluation loops around an engine, with hooks."""

from colossalai.trainer import hooks
from colossalai.trainer.trainer import Trainer

__all__ = ["Trainer", "hooks"]
