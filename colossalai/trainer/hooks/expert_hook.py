"""A hook for models with experts: how evenly their tokens are shared out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.interface import user_module
from colossalai.logging import get_dist_logger
from colossalai.nn.expert_loads import LoadHistory
from colossalai.nn.layer.moe.loads import LayerLoads, draw_loads, load_table, steps_to_keep
from colossalai.registry import HOOKS
from colossalai.trainer.hooks.base import BaseHook
from colossalai.trainer.hooks.metrics import Metric
from colossalai.utils import is_using_pp
from colossalai.utils.parallel import is_first_of_stage

if TYPE_CHECKING:
    from colossalai.trainer.trainer import Trainer


class ExpertMetric(Metric):
    """One number of the loads of a layer: the last one, and its mean over an epoch."""

    def __init__(self, loads: LayerLoads, number: str) -> None:
        super().__init__(epoch_only=False)
        self._loads, self._number, self._sum, self._steps = loads, number, 0.0, 0

    def reset(self) -> None:
        self._sum, self._steps = 0.0, 0

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take the last step of the history, which the hook fills."""
        self._sum, self._steps = self._sum + self.get_last_step_value(), self._steps + 1

    def get_last_step_value(self) -> float:
        return self._loads.numbers()[self._number] if self._loads.tokens else float("nan")

    def get_accumulated_value(self) -> float:
        return self._sum / self._steps if self._steps else float("nan")

    @staticmethod
    def is_better(a: float, b: float) -> bool:
        return a < b


@HOOKS.register_module
class ExpertLoadHook(BaseHook):
    """Records how the tokens of each step were shared out among experts, and logs a table after each epoch.

    For each layer there are the metrics ``load`` (the largest load over the mean), ``dropped`` (the share of
    choices without a place) and ``entropy`` (of a token's scores), which other hooks log and write.

    Args:
        picture: a file for a picture of all layers, experts over steps, at the end of the training.
        keep: how many steps the picture shows at most, the last ones.
    """

    def __init__(self, picture: str | Path | None = None, priority: int = 5, keep: int = 1000) -> None:
        super().__init__(priority)
        self.keep = steps_to_keep(keep)
        self.picture = None if picture is None else Path(picture)
        self._history: LoadHistory | None = None
        self._metrics: list[ExpertMetric] = []

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        self.init_runner_states(trainer, "metrics", {mode: {} for mode in ("train", "test")})
        try:
            self._history = LoadHistory(user_module(trainer.engine.model), self.keep)
        except ValueError:
            if not is_using_pp():  # else other stages may have experts
                raise

    def before_train_epoch(self, trainer: Trainer) -> None:
        for metric in self._metrics:
            metric.reset()

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        if self._history is None:
            return
        self._history.step()
        known, metrics = self._history.layers, trainer.states["metrics"]["train"]
        for name, loads in known.items():
            for number in ("load", "dropped", "entropy"):
                if f"{name} {number}" not in metrics:
                    metrics[f"{name} {number}"] = metric = ExpertMetric(loads, number)
                    self._metrics.append(metric)
        for metric in self._metrics:
            metric.update()

    def after_train_epoch(self, trainer: Trainer) -> None:
        layers = self._of_all_stages()
        get_dist_logger().info(f"[Epoch {trainer.cur_epoch}] experts:\n{load_table(layers)}", ranks=[0])

    def after_train(self, trainer: Trainer) -> None:
        layers = self._of_all_stages()
        if self._history is not None:
            self._history.close()
        first = not gpc.is_initialized(ParallelMode.PIPELINE) or gpc.is_first_rank(ParallelMode.PIPELINE)
        if self.picture is not None and layers and is_first_of_stage() and first:
            self.picture.parent.mkdir(parents=True, exist_ok=True)
            draw_loads(self.picture, layers)

    def _of_all_stages(self) -> dict[str, LayerLoads]:
        own = {} if self._history is None else self._history.layers
        if not is_using_pp():
            return own
        every: list[Any] = [None] * gpc.pipeline_parallel_size
        dist.all_gather_object(every, own, group=gpc.get_group(ParallelMode.PIPELINE))
        return {
            f"stage {stage}: {name}": loads
            for stage, found in enumerate(every)
            for name, loads in found.items()
        }
