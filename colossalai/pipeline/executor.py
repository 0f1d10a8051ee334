"""Runs the list of actions of one rank: receives, computes, sends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from colossalai.pipeline.p2p import Link
from colossalai.pipeline.schedule.base import Action, PassKind, Timetable
from colossalai.pipeline.split_backward import split_backward
from colossalai.pipeline.wire import check_nest


class Recorder(Protocol):
    """Records when the actions of a rank start and end."""

    def mark(self) -> Any:
        """This moment, as only the recorder needs to understand it."""
        ...

    def record(self, action: Action, start: Any, end: Any) -> None: ...


class StageWork(Protocol):
    """The computations of the stages on a rank."""

    def forward(self, stage: int, chunk: int, microbatch: int, received: Any) -> Any:
        """The output of a stage; ``received`` is that of the stage before, None for the first stage."""
        ...

    def finish(self, output: Any, microbatch: int) -> Tensor | None:
        """Called with the output of the last stage: the loss, where one is wanted."""
        ...

    def backward(self, loss: Tensor) -> None:
        """The whole backward pass of the last stage."""
        ...

    def scale_loss(self, loss: Tensor) -> Tensor:
        """``loss`` as it enters a backward pass that is done in two halves."""
        ...


@dataclass
class _Received:
    """A tensor from another stage, and its gradient once there is one."""

    tensor: Tensor
    edge: Any = None  # where it enters the graph
    grad: Tensor | None = None


class _Enter(torch.autograd.Function):
    """A received tensor enters the graph of its stage.

    As the output of an operation, not as a leaf: a stage may begin with an operation in place, such as a
    ReLU.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, box: _Received) -> Tensor:
        ctx.box = box
        return box.tensor

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.box.grad = grads[0]
        return None, None


@dataclass
class _Pass:
    """The values that one forward pass leaves for its backward pass."""

    received: Any
    boxes: list[_Received | None]
    outputs: list[Tensor] = field(default_factory=list)
    loss: Tensor | None = None
    rest: Callable[[], None] | None = None


class Executor:
    """Runs timetables on one rank of a pipeline.

    ``peak_stored`` is the most forward passes that waited for their backward passes at one time, in all runs.
    """

    def __init__(self, link: Link, work: StageWork) -> None:
        self.link = link
        self.work = work
        self.peak_stored = 0
        self._stored: dict[tuple[int, int], _Pass] = {}
        self._training = False

    def run(self, timetable: Timetable, *, training: bool, recorder: Recorder | None = None) -> None:
        """Do what ``timetable`` says for this rank; if that fails, the other ranks fail too."""
        self._timetable, self._training = timetable, training
        self.link.begin(timetable)
        try:
            for action in timetable.ranks[self.link.rank]:
                self._do(action, recorder)
            self.link.finish()
        except BaseException as error:
            self.link.fail(error)
            raise
        finally:
            self._stored.clear()

    def _do(self, action: Action, recorder: Recorder | None) -> None:
        """Receive, compute, send; of these, only computing counts as work."""
        needed = self._timetable.needs(self.link.rank, action)
        received = None if needed is None else self.link.receive(needed)
        start = recorder.mark() if recorder is not None else None
        result = self._compute(action, received)
        if recorder is not None:
            recorder.record(action, start, recorder.mark())
        made = self._timetable.makes(self.link.rank, action)
        if made is not None:
            self.link.send(made, result)

    def _compute(self, action: Action, received: Any) -> Any:
        """What ``action`` makes for another stage, if it makes anything."""
        place = action.chunk, action.microbatch
        if action.kind is PassKind.FORWARD:
            return self._forward(action, received)
        if action.kind is PassKind.BACKWARD:
            return self._backward(action, self._stored.pop(place), received)
        if action.kind is PassKind.INPUT_GRAD:
            return self._input_grad(action, self._stored[place], received)
        rest = self._stored.pop(place).rest
        assert rest is not None, "the input gradients come before those of the weights"
        rest()
        return None

    def _forward(self, action: Action, received: Any) -> Any:
        stage = self._stage(action)
        nest, boxes = _enter(received) if self._training else (received, [])
        output = self.work.forward(stage, action.chunk, action.microbatch, nest)
        kept = _Pass(received, boxes)
        if self._has_loss(action):
            kept.loss = self.work.finish(output, action.microbatch)
        else:
            check_nest(output, f"pipeline stage {stage}")
            kept.outputs = tree_flatten(output)[0]
        if self._training:
            self._stored[action.chunk, action.microbatch] = kept
            self.peak_stored = max(self.peak_stored, len(self._stored))
        return output

    def _backward(self, action: Action, kept: _Pass, received: Any) -> Any:
        if self._has_loss(action):
            assert kept.loss is not None, "a pass in training has a loss"
            self.work.backward(kept.loss)
        else:
            outputs, grads = self._roots(action, kept, received)
            if outputs:
                torch.autograd.backward(outputs, grads)
        return _input_grads(kept)

    def _input_grad(self, action: Action, kept: _Pass, received: Any) -> Any:
        outputs, grads = self._roots(action, kept, received)
        boxes = [box for box in kept.boxes if box is not None]
        found, kept.rest = split_backward(outputs, grads, [box.edge for box in boxes])
        for box, grad in zip(boxes, found, strict=True):
            box.grad = grad
        return _input_grads(kept)

    def _has_loss(self, action: Action) -> bool:
        return self._stage(action) == self._timetable.placement.last

    def _stage(self, action: Action) -> int:
        """The virtual stage whose layers ``action`` runs."""
        return self._timetable.placement.stage(self.link.rank, action.chunk)

    def _roots(self, action: Action, kept: _Pass, received: Any) -> tuple[list[Tensor], list[Tensor | None]]:
        """Where a backward pass begins, and with which gradients."""
        if self._has_loss(action):
            assert kept.loss is not None, "a pass in training has a loss"
            return [self.work.scale_loss(kept.loss)], [None]
        pairs = zip(kept.outputs, tree_flatten(received)[0], strict=True)
        wanted = [(t, g) for t, g in pairs if g is not None]
        return [t for t, _ in wanted], [g for _, g in wanted]


def _enter(received: Any) -> tuple[Any, list[_Received | None]]:
    """``received`` inside the graph of the stage, and a box for the gradient of each tensor that needs
    one.
    """
    leaves, spec = tree_flatten(received)
    boxes: list[_Received | None] = []
    entered = []
    for leaf in leaves:
        wants = isinstance(leaf, Tensor) and leaf.requires_grad
        box = _Received(leaf.detach()) if wants else None
        boxes.append(box)
        if box is not None:
            leaf = _Enter.apply(torch.empty(0, requires_grad=True), box)
            box.edge = get_gradient_edge(leaf)
        entered.append(leaf)
    return tree_unflatten(entered, spec), boxes


def _input_grads(kept: _Pass) -> Any:
    _, spec = tree_flatten(kept.received)
    return tree_unflatten([None if box is None else box.grad for box in kept.boxes], spec)


def detached(nest: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.detach(), nest)
