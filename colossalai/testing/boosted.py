"""A run under a ``Booster`` for the parity check: each rank takes its part of every global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from colossalai.booster import Booster
from colossalai.interface import OptimizerWrapper
from colossalai.mesh import serial_tensor
from colossalai.mesh.parameter import model_mesh, own_mesh
from colossalai.testing.parity import Problem
from colossalai.utils.dataloader import data_parallel_place
from colossalai.utils.parallel import launched_mesh


class BoosterRun:
    """A problem under the plugin of ``booster``, on the mesh of the launched job, if there is one.

    Tensors of a batch are cut along their first dim, among the data-parallel ranks and then into
    ``accumulate`` backward passes of which only the last synchronizes gradients; the problem's loss must be a
    mean over that dim.  Ranks that share one model or one sequence take the same part, and each has its loss.
    ``clip`` is called with the optimizer before each step; ``convert`` makes a tensor-parallel model of the
    serial one, whose parameters keep their names.
    """

    def __init__(
        self,
        problem: Problem,
        booster: Booster,
        *,
        accumulate: int = 1,
        clip: Callable[[OptimizerWrapper], Any] | None = None,
        convert: Callable[[nn.Module], nn.Module] = lambda model: model,
    ) -> None:
        self.problem, self.booster, self.accumulate, self.clip = problem, booster, accumulate, clip
        self.rank, self.replicas = data_parallel_place()
        model = convert(self.build())
        if model_mesh(model) is not None:  # all ranks share it
            self.rank, self.replicas = 0, 1
        self.model, self.optimizer, *_ = booster.boost(model, problem.optimizer(model.parameters()))

    def build(self) -> nn.Module:
        return self.problem.build()

    def weights(self) -> dict[str, Tensor]:
        return {name: _whole(p, p) for name, p in self.model.named_parameters()}

    def forward_backward(self, batch: Any) -> Tensor:
        own = _part(batch, self.rank, self.replicas)
        losses = []
        for i in range(self.accumulate - 1):
            with self.booster.no_sync(self.model):
                losses.append(self._backward(_part(own, i, self.accumulate)))
        losses.append(self._backward(_part(own, self.accumulate - 1, self.accumulate)))
        total = torch.stack(losses).sum()
        dist.all_reduce(total)  # every replica is counted by all of its ranks
        return total / dist.get_world_size()

    def _backward(self, part: Any) -> Tensor:
        loss = self.problem.loss(self.model, part) / self.accumulate
        self.booster.backward(loss, self.optimizer)
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        return {name: _whole(p.grad, p) for name, p in self.model.named_parameters() if p.grad is not None}

    def gradient_norm(self) -> Tensor:
        return self.optimizer.clip_grad_by_norm(float("inf"))

    def update(self) -> None:
        if self.clip:
            self.clip(self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()


def whole_tensor(value: Any) -> Tensor:
    """All of a tensor that is cut over ranks, on every rank, on a device where its backend can gather."""
    if not hasattr(value, "device_mesh"):
        return value.full_tensor()
    mesh = value.device_mesh
    # Under gloo the parts travel from host memory: torch 2.11 crashes when it gathers CUDA tensors there.
    # NCCL knows the devices of the mesh only, while the parts of an offloaded tensor wait on the CPU.
    by_gloo = dist.get_backend(mesh.get_group(0)) == "gloo"
    return value.detach().to("cpu" if by_gloo else mesh.device_type).full_tensor()


def _whole(tensor: Any, param: Tensor) -> Tensor:
    """A copy of all of ``tensor``, which lies as ``param`` does: a ``DTensor``, a piece, or both."""
    tensor = tensor.detach()
    tensor = whole_tensor(tensor) if hasattr(tensor, "full_tensor") else tensor
    mesh = own_mesh(param) or launched_mesh()
    return (tensor if mesh is None else serial_tensor(tensor, param, mesh)).clone()


def _part(batch: Any, index: int, parts: int) -> Any:
    def cut(tensor: Tensor) -> Tensor:
        if len(tensor) % parts:
            raise ValueError(f"a batch of {len(tensor)} samples cannot be cut into {parts} equal parts")
        return tensor.chunk(parts)[index]

    return tree_map_only(Tensor, cut, batch)
