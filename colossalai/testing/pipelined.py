"""A run under a pipeline for the parity check: each rank keeps its stages of the serial model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.mesh import grad_norm, serial_tensor
from colossalai.pipeline.stage import Placement, Shape
from colossalai.testing.boosted import _part as part_of
from colossalai.testing.parity import Problem

Convert = Callable[[nn.Module], nn.Module]


class PipelineRun:
    """A problem whose model is a ``nn.Sequential``, under the launched config.

    The layers are dealt out as evenly as they can be.  Batches are ``(data, label)``; every data-parallel
    rank takes its part.

    Args:
        convert: makes a tensor-parallel layer of a serial one; parameters keep their names.
    """

    def __init__(
        self,
        problem: Problem,
        criterion: Callable[..., Tensor],
        *,
        chunks: int = 1,
        shape: Shape = Shape.LOOP,
        convert: Convert | None = None,
    ) -> None:
        serial = problem.build()
        assert isinstance(serial, nn.Sequential), "a PipelineRun cuts a nn.Sequential"
        place = Placement(gpc.pipeline_parallel_size, chunks, shape)
        stages = cut(serial, place, gpc.get_local_rank(ParallelMode.PIPELINE))
        if convert is not None:
            stages = [
                nn.Sequential(OrderedDict((n, convert(m)) for n, m in s.named_children())) for s in stages
            ]
        self.names = {p: name for stage in stages for name, p in stage.named_parameters()}
        model = stages[0] if chunks == 1 else nn.ModuleList(stages)
        self.engine, *_ = colossalai.initialize(
            model, problem.optimizer(model.parameters()), criterion, verbose=False
        )
        self.engine.train()

    def weights(self) -> dict[str, Tensor]:
        return self._everywhere((name, self._whole(p, p)) for p, name in self.names.items())

    def forward_backward(self, batch: Any) -> Tensor:
        size = gpc.data_parallel_size
        own = part_of(batch, gpc.get_local_rank(ParallelMode.DATA), size)
        _, _, loss = self.engine.execute_schedule(iter([own]), return_output_label=False)
        self.engine.handle_gradients()
        held = torch.zeros(()) if loss is None else loss.detach().cpu().float().reshape(())
        total = torch.stack([held, torch.tensor(float(loss is not None))])
        dist.all_reduce(total, group=gpc.get_cpu_group(ParallelMode.GLOBAL))
        return total[0] / total[1]

    def gradients(self) -> dict[str, Tensor]:
        return self._everywhere(
            (n, self._whole(p.grad, p)) for p, n in self.names.items() if p.grad is not None
        )

    def gradient_norm(self) -> Tensor:
        return grad_norm(self.names, gpc.mesh)

    def update(self) -> None:
        self.engine.optimizer.step()
        self.engine.optimizer.zero_grad()

    def _whole(self, piece: Tensor, param: Tensor) -> Tensor:
        return serial_tensor(piece, param, gpc.mesh).clone()

    def _everywhere(self, items: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors of all stages, on every rank."""
        own = {name: tensor.cpu() for name, tensor in items}
        parts: list[Any] = [None] * gpc.pipeline_parallel_size
        dist.all_gather_object(parts, own, group=gpc.get_cpu_group(ParallelMode.PIPELINE))
        return {name: tensor for part in parts for name, tensor in part.items()}


def cut(model: nn.Sequential, place: Placement, rank: int) -> list[nn.Sequential]:
    """The chunks of ``rank``, whose layers keep the names they have in ``model``."""
    layers = list(model.named_children())
    stages = [place.stage(rank, chunk) for chunk in range(place.chunks)]
    bounds = [len(layers) * i // place.stages for i in range(place.stages + 1)]
    return [nn.Sequential(OrderedDict(layers[bounds[s] : bounds[s + 1]])) for s in stages]
