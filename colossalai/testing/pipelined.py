"""A run under a pipeline for the parity check: each rank keeps its stages of the serial model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.engine import Engine
from colossalai.interface import OptimizerWrapper
from colossalai.mesh import grad_norm
from colossalai.pipeline.stage import Placement, Shape
from colossalai.testing.boosted import _part as part_of
from colossalai.testing.boosted import _whole as whole_of
from colossalai.testing.parity import Problem

Convert = Callable[[nn.Module], nn.Module]


class PipelineRun:
    """A problem whose model is a ``nn.Sequential``, under the launched config.

    The layers are dealt out as evenly as they can be.  Batches are ``(data, label)``; every data-parallel
    rank takes its part.

    Args:
        convert: makes a tensor-parallel layer of a serial one; parameters keep their names.
        booster: trains by ``Booster.execute_pipeline``; without one, an ``Engine`` does.
    """

    def __init__(
        self,
        problem: Problem,
        criterion: Callable[..., Tensor],
        *,
        chunks: int = 1,
        shape: Shape = Shape.LOOP,
        convert: Convert | None = None,
        booster: Booster | None = None,
    ) -> None:
        serial = problem.build()
        assert isinstance(serial, nn.Sequential), "a PipelineRun cuts a nn.Sequential"
        place = Placement(gpc.pipeline_parallel_size, chunks, shape)
        stages = cut(serial, place, gpc.get_local_rank(ParallelMode.PIPELINE))
        if convert is not None:
            stages = [
                nn.Sequential(OrderedDict((n, convert(m)) for n, m in s.named_children())) for s in stages
            ]
        model = stages[0] if chunks == 1 else nn.ModuleList(stages)
        optimizer = problem.optimizer(model.parameters())
        if booster is None:
            self.engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)
            self.engine.train()
        else:
            boosted, self.boosted_optimizer, *_ = booster.boost(model, optimizer)
            self.execute = partial(
                booster.execute_pipeline,
                model=boosted,
                criterion=criterion,
                optimizer=self.boosted_optimizer,
            )
        self.names = {p: name for stage in stages for name, p in stage.named_parameters()}

    engine: Engine
    execute: Callable[..., dict[str, Any]] | None = None
    """``Booster.execute_pipeline`` for a batch, where a booster trains."""
    boosted_optimizer: OptimizerWrapper

    @property
    def optimizer(self) -> Any:
        return self.engine.optimizer if self.execute is None else self.boosted_optimizer

    def _step(self, batch: Any) -> Tensor | None:
        if self.execute is not None:
            found: Tensor | None = self.execute(iter([batch]))["loss"]
            return found
        loss = self.engine.execute_schedule(iter([batch]), return_output_label=False)[2]
        self.engine.handle_gradients()
        return loss

    def _whole(self, piece: Tensor, param: Tensor) -> Tensor:
        return whole_of(piece, param)

    def weights(self) -> dict[str, Tensor]:
        return self._everywhere((name, whole_of(p, p)) for p, name in self.names.items())

    def forward_backward(self, batch: Any) -> Tensor:
        size = gpc.data_parallel_size
        own = part_of(batch, gpc.get_local_rank(ParallelMode.DATA), size)
        loss = self._step(own)
        held = torch.zeros(()) if loss is None else loss.detach().cpu().float().reshape(())
        total = torch.stack([held, torch.tensor(float(loss is not None))])
        dist.all_reduce(total, group=gpc.get_cpu_group(ParallelMode.GLOBAL))
        return total[0] / total[1]

    def gradients(self) -> dict[str, Tensor]:
        return self._everywhere((n, whole_of(p.grad, p)) for p, n in self.names.items() if p.grad is not None)

    def gradient_norm(self) -> Tensor:
        return grad_norm(self.names, gpc.mesh)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

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
