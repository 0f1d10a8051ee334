"""The training interface: a ``Booster`` puts a plugin's parallelism and a mixed precision into plain torch
objects.
"""

from colossalai.booster.accelerator import Accelerator
from colossalai.booster.booster import Boosted, Booster

__all__ = ["Accelerator", "Boosted", "Booster"]
