"""Learning-rate schedulers; all of them take the number of steps of the whole training as ``total_steps``."""

from colossalai.nn.lr_scheduler.cosine import CosineAnnealingLR

__all__ = ["CosineAnnealingLR"]
