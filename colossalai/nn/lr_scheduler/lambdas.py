"""torch's schedulers of user functions, with our ``total_steps``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR as TorchLambdaLR
from torch.optim.lr_scheduler import MultiplicativeLR as TorchMultiplicativeLR

from colossalai.nn.lr_scheduler.schedule import Ending
from colossalai.registry import LR_SCHEDULERS

Factor = Callable[[int], float]


class _Lambda(Ending):
    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        lr_lambda: Factor | Sequence[Factor] | None = None,
        last_epoch: int = -1,
    ) -> None:
        if lr_lambda is None:
            raise ValueError(
                f"{type(self).__name__} needs lr_lambda, a function of the step (or one per parameter group)"
            )
        super().__init__(optimizer, total_steps, last_epoch, lr_lambda=lr_lambda)


@LR_SCHEDULERS.register_module
class LambdaLR(_Lambda, TorchLambdaLR):
    """The optimizer's learning rate times ``lr_lambda(step)``."""


@LR_SCHEDULERS.register_module
class MultiplicativeLR(_Lambda, TorchMultiplicativeLR):
    """The rate of the step before times ``lr_lambda(step)``."""
