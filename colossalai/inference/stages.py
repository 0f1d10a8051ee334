"""The way of a step through the stages of a pipeline, and of its results back to all ranks.

All ranks that share a model know what a step computes, so they know when the form of what a stage sends is
new: only then is it described.  What is chosen at the end goes to all of them as one tensor of whole numbers.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.mesh import DATA_AXIS, PIPELINE_AXIS, Mesh, mesh_groups
from colossalai.pipeline.p2p import is_nccl
from colossalai.pipeline.stage import pipeline_rank, pipeline_size
from colossalai.pipeline.wire import Description, as_bytes

_groups: WeakKeyDictionary[Mesh, dist.ProcessGroup] = WeakKeyDictionary()


class Team:
    """The ranks that share one model: all that differ on other axes than that of the data.

    The first one takes requests; the last stage makes scores.  Every rank of the mesh makes its team at the
    same time.
    """

    def __init__(self, mesh: Mesh | None, device: torch.device) -> None:
        self.mesh, self.device = mesh, device
        axes = () if mesh is None else tuple(axis for axis in mesh.axes if axis != DATA_AXIS)
        self.ranks = [0] if mesh is None else mesh.ranks(*axes)
        self.size = len(self.ranks)
        self.is_first = mesh is None or mesh.rank == self.ranks[0]
        self.stage = 0 if mesh is None else pipeline_rank(mesh)
        self.stages = 1 if mesh is None else pipeline_size(mesh)
        self.replica = 0 if mesh is None else mesh.coord.get(DATA_AXIS, 0)
        self._group = None if mesh is None or self.size == 1 else _host_group(mesh, axes)
        self._sent: dict[int, Description] = {}
        self._received: dict[int, Description] = {}
        self._source = self.ranks[0]
        if mesh is not None and self.stages > 1:  # the first rank of the last stage
            lines = mesh_groups(mesh.size, (PIPELINE_AXIS,))
            self._source = next(line[-1] for line in lines if self.ranks[0] in line)

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.stages - 1

    # ---- between stages ----

    def send(self, nest: Any, form: int) -> None:
        """Give the next stage what this one made of a step; steps with the same ``form`` look alike."""
        description, tensors = Description.of(nest)
        group, target, wire = self._line(self.stage + 1)
        if self._sent.get(form) != description:
            assert form not in self._sent, "steps of one form look alike"
            self._sent[form] = description
            text = torch.frombuffer(bytearray(description.to_bytes()), dtype=torch.uint8).to(wire)
            dist.send(torch.tensor([len(text)], device=wire), target, group)
            dist.send(text, target, group)
        for tensor in tensors:
            dist.send(as_bytes(tensor.detach().to(wire).contiguous()), target, group)

    def receive(self, form: int) -> Any:
        """What the stage before made of a step."""
        group, source, wire = self._line(self.stage - 1)
        if form not in self._received:
            length = torch.zeros(1, dtype=torch.int64, device=wire)
            dist.recv(length, source, group)
            text = torch.empty(int(length), dtype=torch.uint8, device=wire)
            dist.recv(text, source, group)
            self._received[form] = Description.from_bytes(bytes(text.cpu().tolist()))
        tensors = []
        for leaf in self._received[form].leaves:
            tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device=wire)
            dist.recv(as_bytes(tensor), source, group)
            tensors.append(tensor.to(self.device))
        return self._received[form].rebuild(tensors)

    def _line(self, stage: int) -> tuple[dist.ProcessGroup, int, torch.device]:
        assert self.mesh is not None
        group = self.mesh.group(PIPELINE_AXIS)
        wire = self.device if is_nccl(group, self.device) else torch.device("cpu")
        return group, self.mesh.ranks(PIPELINE_AXIS)[stage], wire

    # ---- among all ----

    def sum(self, numbers: Tensor) -> Tensor:
        """The sums of the ``numbers`` of all ranks; int64 on the CPU."""
        if self._group is not None:
            dist.all_reduce(numbers, group=self._group)
        return numbers

    def from_first(self, numbers: Tensor) -> Tensor:
        """``numbers`` of the first rank, on all; int64 on the CPU, of the same length everywhere."""
        if self._group is not None:
            dist.broadcast(numbers, self.ranks[0], self._group)
        return numbers

    def from_last(self, numbers: Tensor) -> Tensor:
        """``numbers`` of the first rank of the last stage, on all; int64 on the CPU."""
        if self._group is not None:
            dist.broadcast(numbers, self._source, self._group)
        return numbers

    def least(self, number: int) -> int:
        """The smallest of the numbers of all ranks."""
        found = torch.tensor([number])
        if self._group is not None:
            dist.all_reduce(found, dist.ReduceOp.MIN, self._group)
        return int(found)


def _host_group(mesh: Mesh, axes: tuple[str, ...]) -> dist.ProcessGroup:
    """A group of this rank's team for messages in the memory of the host."""
    if mesh not in _groups:
        for ranks in mesh_groups(mesh.size, axes):
            group = dist.new_group(ranks, backend="gloo")
            if mesh.rank in ranks:
                _groups[mesh] = group
    return _groups[mesh]
