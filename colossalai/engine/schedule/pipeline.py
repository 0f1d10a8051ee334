"""Pipeline schedules for an engine: the documented names over ``colossalai.pipeline``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.engine.schedule.base import BaseSchedule, StepResult
from colossalai.interface.batch import DataProcess, split_batch
from colossalai.pipeline.chunks import count_chunks
from colossalai.pipeline.options import PipelineOptions
from colossalai.pipeline.pipeline import Pipeline
from colossalai.registry import SCHEDULE
from colossalai.utils.parallel import launched_mesh

if TYPE_CHECKING:
    from colossalai.engine.engine import Engine


def get_tensor_shape() -> tuple[int, ...] | None:
    """Return the shape of what pipeline stages exchange, if the config of the launched job says it."""
    return None if gpc.plan.pipeline == 1 else PipelineOptions.from_config(gpc.config, gpc.plan).tensor_shape


@SCHEDULE.register_module
class PipelineSchedule(BaseSchedule):
    """A batch goes through the stages of a pipeline in micro-batches; one chunk of layers on each rank.

    Every rank loads the same batch.  ``forward_backward_step`` returns outputs, label and loss on the rank
    with the last layers, and None on the others.

    Args:
        num_microbatches: how many parts of equal size a batch is cut into.
        data_process_func: turns a batch into ``(data, label)``, before it is cut.
        tensor_shape: the shape of what stages exchange, as a rank holds it; saves sending it.
        scatter_gather_tensors: in mode 1D, where all tensor-parallel ranks hold the same activations, each
            sends a piece, and the receivers gather them; for stages on machines whose connection is slow.
        schedule: ``'1f1b'``, or another name of ``colossalai.pipeline.schedule.SCHEDULES``.
    """

    uses_pipeline = True

    def __init__(
        self,
        num_microbatches: int,
        data_process_func: DataProcess | None = None,
        tensor_shape: Sequence[int] | None = None,
        scatter_gather_tensors: bool = False,
        *,
        schedule: str = "1f1b",
    ) -> None:
        super().__init__(data_process_func)
        self.num_microbatches = num_microbatches
        self.tensor_shape = tensor_shape
        self.scatter_gather_tensors = scatter_gather_tensors
        self.schedule = schedule
        self.num_model_chunks = 1
        self._pipeline: Pipeline | None = None

    @property
    def pipeline(self) -> Pipeline:
        """What runs the stages; there once an engine has taken this schedule."""
        if self._pipeline is None:
            raise RuntimeError(f"this {type(self).__name__} belongs to no engine yet")
        return self._pipeline

    @property
    def has_loss(self) -> bool:
        return self.pipeline.has_loss

    def pre_processing(self, engine: Engine) -> None:
        super().pre_processing(engine)
        mesh = launched_mesh()
        if mesh is None:
            raise RuntimeError(f"{type(self).__name__} needs a launched job; call colossalai.launch first")
        if (found := count_chunks(engine.model)) != self.num_model_chunks:
            raise ValueError(
                f"{type(self).__name__} expects {self.num_model_chunks} chunk(s) of the model on each rank,"
                f" got {found}; build the stages with the same num_chunks that the schedule has"
            )
        if self.num_model_chunks > 1:
            gpc.set_virtual_pipeline_parallel_size(self.num_model_chunks)
        self._pipeline = Pipeline(
            engine.model,
            mesh,
            schedule=self.schedule,
            microbatches=self.num_microbatches,
            tensor_shape=self.tensor_shape,
            scatter=self._scatter_axis(),
        )

    def _scatter_axis(self) -> str | None:
        if not self.scatter_gather_tensors:
            return None
        axes = gpc.plan.mode_axes.get(ParallelMode.PARALLEL_1D)
        if axes is None:
            raise ValueError(
                "scatter_gather_tensors needs the same activations on all tensor-parallel ranks, which"
                f" tensor mode '1d' has; the mode is {gpc.plan.mode!r}"
            )
        return axes[0]

    def predict(self, data: Any) -> Any:
        """The outputs for ``data`` on the rank with the last layers, None on the others."""
        with torch.no_grad():
            return self.pipeline.predict(data)

    def forward_backward_step(
        self,
        engine: Engine,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> StepResult:
        batch = self.load_batch(data_iter)
        name = type(self).__name__
        data, label = split_batch(batch, self.data_process_func, engine.criterion is not None, name)
        output, loss = self.pipeline.step(
            data,
            label,
            engine.criterion,
            None if forward_only else engine,
            return_loss=return_loss,
            return_outputs=return_output_label,
        )
        wanted = return_output_label and self.has_loss
        return output, label if wanted else None, loss


@SCHEDULE.register_module
class PipelineScheduleV2(PipelineSchedule):
    """``PipelineSchedule`` by the name it had where stages could exchange any objects: here, all can."""


@SCHEDULE.register_module
class InterleavedPipelineSchedule(PipelineSchedule):
    """``PipelineSchedule`` with several chunks of layers on each rank, which shortens the times of waiting.

    Args:
        num_model_chunks: how many chunks every rank holds.
    """

    def __init__(
        self,
        num_microbatches: int,
        num_model_chunks: int,
        data_process_func: DataProcess | None = None,
        tensor_shape: Sequence[int] | None = None,
        scatter_gather_tensors: bool = False,
        *,
        schedule: str = "interleaved",
    ) -> None:
        super().__init__(
            num_microbatches, data_process_func, tensor_shape, scatter_gather_tensors, schedule=schedule
        )
        self.num_model_chunks = num_model_chunks
