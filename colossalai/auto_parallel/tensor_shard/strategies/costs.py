"""What an operation costs under each of its placements: seconds of both passes, and bytes of a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from colossalai.auto_parallel.tensor_shard.sharding_strategy import MemoryCost, TrainCycleItem
from colossalai.auto_parallel.tensor_shard.strategies.graph import PlanNode
from colossalai.auto_parallel.tensor_shard.strategies.moves import MoveCosts
from colossalai.auto_parallel.tensor_shard.strategies.placements import CutOperation
from colossalai.device.presets import DevicePreset
from colossalai.fx import OpWork
from colossalai.mesh import Layout
from colossalai.mesh.collectives import Transfer

Passes = tuple[list[Transfer], list[Transfer]]


@dataclass(frozen=True)
class StrategyCost:
    """Of one placement.

    Args:
        compute: seconds of its kernels.
        communication: seconds of its own collectives: sums at its end or inside, and of gradients of
            parameters.
        forward, backward: these collectives.
        memory: bytes; parameters are counted with their gradients and the states of the optimizer.
        ending: how many of the forward collectives are sums at its end.
        kept: the bytes of each activation among it that the operation is charged for.
    """

    compute: TrainCycleItem[float]
    communication: TrainCycleItem[float]
    forward: tuple[Transfer, ...]
    backward: tuple[Transfer, ...]
    memory: MemoryCost
    kept: tuple[int, ...] = ()
    ending: int = 0

    @property
    def seconds(self) -> float:
        return self.compute.total + self.communication.total


@dataclass(frozen=True)
class CostModel:
    """What costs are made of: links, a device, and how many states of its size an optimizer keeps of each
    parameter.
    """

    moves: MoveCosts
    device: DevicePreset
    optimizer_states: int = 2

    @property
    def axes(self) -> dict[str, int]:
        return {axis: link.ranks for axis, link in self.moves.links.items()}

    def parts(self, layout: Layout) -> int:
        """Into how many pieces a tensor is cut."""
        return prod(self.axes[axis] for axis in layout.sharded)

    def of(
        self, node: PlanNode, placement: CutOperation, charged: Sequence[str], placed: frozenset[str]
    ) -> StrategyCost:
        """The cost of a placement.

        Args:
            charged: the memory that this operation is charged for: what it is the first to keep.
            placed: parameters that are counted where they choose how they rest.
        """
        forward, backward, ending = self._collectives(node, placement, placed)
        kept = self._kept(node, placement, charged)
        return StrategyCost(
            compute=self._compute(node, placement),
            communication=_item(self.moves.time(forward), self.moves.time(backward)),
            forward=tuple(forward),
            backward=tuple(backward),
            memory=self._memory(node, placement, sum(kept), placed),
            kept=kept,
            ending=ending,
        )

    def parameter_bytes(self, nbytes: int, learns: bool, layout: Layout) -> int:
        """Of a parameter at rest, with its gradient and states."""
        copies = 2 + self.optimizer_states if learns and not self.moves.forward_only else 1
        return copies * nbytes // self.parts(layout)

    def _compute(self, node: PlanNode, placement: CutOperation) -> TrainCycleItem[float]:
        divided = prod(self.axes[axis] for axis in placement.working)
        sizes = [
            (prod(x.shape), layout) for x, layout in zip(node.call.operands, placement.inputs, strict=True)
        ]
        sizes += [(prod(s), layout) for s, layout in zip(node.call.outputs, placement.computed, strict=True)]
        whole = sum(n for n, _ in sizes)
        local = sum(n / self.parts(layout) for n, layout in sizes)
        share = local / whole if whole else 1.0
        forward = self._kernel(node, node.op.forward, divided, share)
        backward = 0.0 if self.moves.forward_only else self._kernel(node, node.op.backward, divided, share)
        return _item(forward, backward)

    def _kernel(self, node: PlanNode, work: OpWork, divided: int, share: float) -> float:
        nbytes = work.read + work.written
        if not nbytes and not work.operations:
            return 0.0  # a view
        dtypes = [info.dtype for info in node.op.outputs] or [torch.float32]
        return self.device.seconds(work.operations // divided, int(nbytes * share), dtypes[0])

    def _collectives(
        self, node: PlanNode, placement: CutOperation, placed: frozenset[str]
    ) -> tuple[list[Transfer], list[Transfer], int]:
        forward, backward = own_collectives(node, placement, self.axes)
        for source, use, rest in zip(node.operands, placement.inputs, placement.resting, strict=True):
            if source.kind == "parameter" and source.name not in placed and use != rest:
                assert source.info is not None
                shape, item = source.info.shape, source.info.dtype.itemsize
                back = self.moves.transfers(shape, item, rest, use, source.learns and node.reached, True)
                forward += back[0]
                backward += back[1]
        begun = len(forward)
        for info, computed, handed in zip(
            node.op.outputs, placement.computed, placement.outputs, strict=True
        ):
            if computed != handed:
                learns = info.requires_grad and node.reached
                both = self.moves.transfers(info.shape, info.dtype.itemsize, computed, handed, learns)
                forward += both[0]
                backward += both[1]
        return forward, [] if self.moves.forward_only else backward, len(forward) - begun

    def _memory(
        self, node: PlanNode, placement: CutOperation, activation: int, placed: frozenset[str]
    ) -> MemoryCost:
        parameters = buffers = 0
        for source, rest in dict(zip(node.operands, placement.resting, strict=True)).items():
            if source.kind == "parameter" and source.name not in placed and source.info is not None:
                taken = self.parameter_bytes(source.info.nbytes, source.learns, rest)
                parameters, buffers = (
                    parameters + taken * source.learns,
                    buffers + taken * (not source.learns),
                )
        temporary = sum(
            info.nbytes // self.parts(layout)
            for info, layout in zip(node.op.outputs, placement.computed, strict=True)
        )
        return MemoryCost(activation, parameters, temporary, buffers)

    def _kept(self, node: PlanNode, placement: CutOperation, charged: Sequence[str]) -> tuple[int, ...]:
        """What the backward pass needs, as it lies here."""
        layouts: dict[str, Layout] = {}
        for info, layout in zip(node.op.outputs, placement.outputs, strict=True):
            layouts[info.memory] = layout
        for source, layout in zip(node.operands, placement.inputs, strict=True):
            if source.info is not None:
                layouts[source.info.memory] = layout
        # what only autograd holds falls with the work
        whole = Layout(tuple((axis,) for axis in placement.working))
        if self.moves.forward_only:
            return (0,) * len(charged)
        return tuple(node.op.saved[name] // self.parts(layouts.get(name, whole)) for name in charged)


def _item(forward: float, backward: float) -> TrainCycleItem[float]:
    return TrainCycleItem(forward, backward, forward + backward)


OwnCollectives = Callable[[PlanNode, CutOperation, Mapping[str, int]], Passes]
_OWN: dict[str, OwnCollectives] = {}


def own_collectives(node: PlanNode, placement: CutOperation, axes: Mapping[str, int]) -> Passes:
    """The collectives that an operation issues itself, besides moves of its operands and results."""
    count = _OWN.get(node.call.name)
    return ([], []) if count is None else count(node, placement, axes)


def counts_collectives(*names: str) -> Callable[[OwnCollectives], OwnCollectives]:
    """Register what operations of these names send."""

    def register(count: OwnCollectives) -> OwnCollectives:
        _OWN.update(dict.fromkeys(names, count))
        return count

    return register


@counts_collectives("cross_entropy_loss", "nll_loss", "nll_loss_nd")
def _cross_entropy(node: PlanNode, placement: CutOperation, axes: Mapping[str, int]) -> Passes:
    """The mean is over the rows that count, whose number is summed."""
    if node.call["reduction"] != 1:
        return [], []
    size = node.op.outputs[0].dtype.itemsize
    return [Transfer("all_reduce", axis, axes[axis], size) for axis in placement.working], []


@counts_collectives("batch_norm")
def _batch_norm(node: PlanNode, placement: CutOperation, axes: Mapping[str, int]) -> Passes:
    """Means and variances are gathered; of the gradient and its product with the input, sums are summed."""
    over = placement.inputs[0].dims[0]
    if not over or node.letters is None or not node.letters.sums_inside:
        return [], []
    channels = node.call.operands[0].shape[1] // prod(axes[a] for a in placement.inputs[0].dims[1])
    item = torch.promote_types(node.op.outputs[0].dtype, torch.float32).itemsize
    forward = [Transfer("all_gather", a, axes[a], axes[a] * 2 * channels * item) for a in over]
    backward = [Transfer("all_reduce", a, axes[a], 2 * channels * item) for a in over]
    return forward, backward if node.reached and any(node.learns) else []
