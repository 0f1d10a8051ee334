"""The hook that saves checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from colossalai.checkpoint_io.training import STEP_IN_EPOCH
from colossalai.engine.gradient_accumulation import GradAccumOptimizer
from colossalai.registry import HOOKS
from colossalai.trainer.hooks.base import BaseHook
from colossalai.utils import save_checkpoint

if TYPE_CHECKING:
    from colossalai.trainer.trainer import Trainer


@HOOKS.register_module
class SaveCheckpointHook(BaseHook):
    """Saves model, optimizer, scheduler and epoch every ``interval`` epochs, or iterations.

    ``trainer.resume`` goes on from what this writes, ``colossalai.utils.load_checkpoint`` reads it.

    Args:
        checkpoint_dir: a folder, in which each checkpoint has a file of its own (``epoch_3.pt``,
            ``epoch_3_step_1200.pt``), or the name of one file (``xxx.pt``), which is replaced each time.
        model: the model to save; that of the engine if left out.
        save_by_iter: count iterations instead of epochs.  Iterations whose gradients still wait for the rest of their
            group (gradient accumulation) are not in the weights; a resumed run repeats them.
    """

    def __init__(
        self,
        interval: int = 1,
        checkpoint_dir: str | Path | None = None,
        model: nn.Module | None = None,
        save_by_iter: bool = False,
        priority: int = 10,
    ) -> None:
        super().__init__(priority)
        if interval < 1:
            raise ValueError(f"SaveCheckpointHook needs an interval of at least 1, got {interval!r}")
        if checkpoint_dir is None:
            raise ValueError("SaveCheckpointHook needs checkpoint_dir, the folder or the file to save to")
        self.interval = interval
        self.checkpoint_dir = Path(checkpoint_dir)
        self.model = model
        self.save_by_iter = save_by_iter

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        if self.save_by_iter and trainer.cur_step % self.interval == 0:
            name = f"epoch_{trainer.cur_epoch}_step_{trainer.cur_step}.pt"
            waiting = _waiting(trainer.engine.optimizer)
            self._save(
                trainer, name, trainer.cur_step - waiting, **{STEP_IN_EPOCH: trainer.step_in_epoch - waiting}
            )

    def after_train_epoch(self, trainer: Trainer) -> None:
        if not self.save_by_iter and (trainer.cur_epoch + 1) % self.interval == 0:
            self._save(trainer, f"epoch_{trainer.cur_epoch}.pt", trainer.cur_step)

    def _save(self, trainer: Trainer, name: str, step: int, **where: int) -> None:
        one_file = bool(self.checkpoint_dir.suffix) and not self.checkpoint_dir.is_dir()
        save_checkpoint(
            self.checkpoint_dir if one_file else self.checkpoint_dir / name,
            trainer.cur_epoch,
            self.model or trainer.engine.model,
            trainer.engine.optimizer,
            trainer.states.get("lr_scheduler"),
            step=step,
            **where,
        )


def _waiting(optimizer: Optimizer) -> int:
    """Iterations whose gradients have come together, but not yet changed the weights."""
    return optimizer.progress.done if isinstance(optimizer, GradAccumOptimizer) else 0
