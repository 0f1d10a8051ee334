"""``Booster.execute_pipeline``: a step of a model whose stages lie on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from torch import nn

from colossalai.booster.plugin import Plugin
from colossalai.booster.plugin.ddp import TorchDDPModel
from colossalai.booster.support import Plan, Wanted, check_supported
from colossalai.core import global_context as gpc
from colossalai.interface import OptimizerWrapper, below_compile
from colossalai.interface.attached import attach, attached
from colossalai.interface.batch import next_batch, split_batch
from colossalai.interface.nest import to_device
from colossalai.pipeline.options import PipelineOptions
from colossalai.pipeline.pipeline import Pipeline
from colossalai.pipeline.tied import synchronized_gradients
from colossalai.utils import is_using_pp


class Pipelines:
    """The pipelines of a booster, one for each model, which keeps it."""

    def execute(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[..., Any] | None,
        optimizer: OptimizerWrapper | None,
        *,
        plugin: Plugin | None,
        return_loss: bool,
        return_outputs: bool,
    ) -> dict[str, Any]:
        pipeline = self._pipeline(model, plugin)
        device = next((p.device for p in model.parameters()), None)
        batch = next_batch(data_iter, "execute_pipeline")
        data, label = split_batch(
            batch if device is None else to_device(batch, device), None, criterion is not None, "Booster"
        )
        replica = below_compile(model)
        averages = optimizer is not None and not optimizer.averages_gradients
        rows = gpc.mesh if averages else None
        with (
            nullcontext() if optimizer is None else synchronized_gradients(model.parameters(), rows),
            replica.in_pipeline() if isinstance(replica, TorchDDPModel) else nullcontext(),
        ):
            outputs, loss = pipeline.step(
                data,
                label,
                criterion,
                optimizer,
                return_loss=return_loss or optimizer is not None,
                return_outputs=return_outputs,
            )
        if averages and isinstance(replica, TorchDDPModel):
            replica.gradients_were_averaged()
        return {"loss": loss if return_loss else None, "outputs": outputs}

    def _pipeline(self, model: nn.Module, plugin: Plugin | None) -> Pipeline:
        pipeline: Pipeline | None = attached(model, "pipeline")
        if pipeline is None:
            if not is_using_pp():
                raise RuntimeError(
                    "execute_pipeline needs a job with a pipeline; launch with parallel=dict(pipeline=...)"
                    " and NUM_MICRO_BATCHES in the config, or call the model and booster.backward"
                )
            options = PipelineOptions.from_config(gpc.config, gpc.plan)
            plan = None if plugin is None else Plan.of(plugin)
            check_supported(Wanted(model=model, plan=plan, pipeline=options))
            pipeline = Pipeline(
                model,
                gpc.mesh,
                schedule=options.schedule,
                microbatches=options.microbatches,
                tensor_shape=options.told_shape,
            )
            attach(model, "pipeline", pipeline)
        return pipeline
