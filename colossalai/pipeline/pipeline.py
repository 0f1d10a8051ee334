"""``Pipeline``: one training or evaluation step of a model whose stages lie on several ranks.

The two doors, ``Engine.execute_schedule`` and ``Booster.execute_pipeline``, call the same ``step``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map, tree_unflatten

from colossalai.amp.casting import CastModel, cast_floats
from colossalai.context.config_schema import READ_BY_FEATURES
from colossalai.context.moe_context import MOE_CONTEXT, RouterLosses
from colossalai.interface.batch import Criterion, loss_of
from colossalai.interface.first_step import shared_axes
from colossalai.interface.nest import batch_size, lengths
from colossalai.mesh import Mesh
from colossalai.mesh.agreement import check_same_batch
from colossalai.pipeline.chunks import StageCaller, count_chunks
from colossalai.pipeline.executor import Executor, detached
from colossalai.pipeline.p2p import Link
from colossalai.pipeline.recording.recorder import step_recorder
from colossalai.pipeline.schedule import Timetable, make_timetable
from colossalai.pipeline.stage import pipeline_rank, pipeline_size
from colossalai.pipeline.wire import Description, Leaf

# ---- A batch as micro-batches, and the outputs of micro-batches as that of the batch ----


def split_microbatches(data: Any, label: Any, number: int) -> list[tuple[Any, Any]]:
    """``(data, label)`` of each of ``number`` micro-batches.

    What has an item for each sample is cut: tensors and arrays whose first dim is as long as the batch, and
    lists that are as long and hold no tensors (names, say).  All else goes to every micro-batch whole.
    """
    size = count_samples(data, label)
    if size == 0 or size % number:
        raise ValueError(
            f"a batch of {size} samples cannot be cut into {number} equal micro-batches; choose a batch size"
            " that is a multiple of NUM_MICRO_BATCHES (and drop_last=True for the data loader)"
        )
    step = size // number

    def part(nest: Any, start: int) -> Any:
        def cut(leaf: Any) -> Any:
            if isinstance(leaf, Mapping):  # of a class that torch does not know, such as a tokenizer's
                return {key: part(value, start) for key, value in leaf.items()}
            return leaf[start : start + step] if _has_rows(leaf, size) else leaf

        return tree_map(cut, nest, is_leaf=lambda leaf: _has_rows(leaf, size))

    return [(part(data, start), part(label, start)) for start in range(0, size, step)]


def count_samples(data: Any, label: Any = None) -> int:
    """How many samples a batch has; refuses one whose tensors do not tell."""
    data, label = _outside_lists(data), _outside_lists(label)
    of_data, of_label = lengths(data), lengths(label)
    if len(of_label) == 1 and (own := next(iter(of_label))) in of_data:
        return own
    size = batch_size((data, label))
    votes = of_data + of_label
    rivals = [length for length in votes if length > 1 and votes[length] == votes[size]]
    if len(rivals) > 1:
        raise ValueError(
            "the number of samples is not clear, because the tensors of the batch have different numbers of"
            f" rows: {_rows(data, label)}. A tensor for all samples must have one row, or no dims"
        )
    return size


def _has_rows(leaf: Any, size: int) -> bool:
    """Whether ``leaf`` has one row for each of ``size`` samples."""
    if _is_listing(leaf):
        return len(leaf) == size
    shape = getattr(leaf, "shape", None)  # of a tensor, or an array of numpy
    return isinstance(shape, tuple) and shape[:1] == (size,)


def _is_listing(leaf: Any) -> bool:
    """Whether ``leaf`` may have an item for each sample, as a list of names or of objects in an image has."""
    return isinstance(leaf, list) and not any(isinstance(item, Tensor) for item in leaf)


def _outside_lists(nest: Any) -> Any:
    """``nest`` without the items of such lists: the tensors of one sample do not tell how many samples there
    are.
    """
    mapped = tree_map(lambda leaf: None if _is_listing(leaf) else leaf, nest, is_leaf=_is_listing)
    return mapped if lengths(mapped) else nest


def _rows(data: Any, label: Any) -> str:
    named = [
        f"{name}{keystr(path)} {len(leaf)}"
        for name, nest in (("data", data), ("label", label))
        for path, leaf in tree_flatten_with_path(nest)[0]
        if isinstance(leaf, Tensor) and leaf.ndim
    ]
    return ", ".join(named[:8])


def join_outputs(outputs: list[Any]) -> Any:
    """The output of the batch; a list of the outputs if their shapes do not fit each other."""
    columns, spec = [], None
    for output in outputs:
        leaves, own = tree_flatten(output)
        if spec is not None and own != spec:
            return outputs
        spec = own
        columns.append(leaves)
    assert spec is not None, "there is at least one micro-batch"
    joined = []
    for parts in zip(*columns, strict=True):
        if not all(isinstance(part, Tensor) for part in parts):
            joined.append(parts[0])
        elif parts[0].ndim == 0:
            joined.append(torch.stack(parts))
        elif len({part.shape[1:] for part in parts}) > 1:
            return outputs
        else:
            joined.append(torch.cat(parts))
    return tree_unflatten(joined, spec)


class _WithLosses(NamedTuple):
    """The output of a stage, with the losses of all routers so far: they travel to the last stage, whose
    criterion adds them to the loss, and their gradients come back.
    """

    output: Any
    losses: RouterLosses


class LossOwner(Protocol):
    """The object that starts the backward pass of a loss: an engine, or an optimizer of a booster."""

    def expect_gradients(self) -> None: ...

    def backward(self, loss: Tensor) -> None: ...

    def scale_loss(self, loss: Tensor) -> Tensor: ...


class Pipeline:
    """The stages of this rank, connected with those of the others.

    Every rank of the mesh makes one at the same time.

    Args:
        model: the stage of this rank, or its chunks (see ``with_chunks``), boosted or not.
        schedule: a name of ``colossalai.pipeline.schedule.SCHEDULES``.
        tensor_shape: the shape of all activations between stages, as this rank holds them; None if it is to
            be found out.
        scatter: an axis whose ranks hold the same activations, to send a piece from each.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        *,
        schedule: str = "1f1b",
        microbatches: int = 1,
        tensor_shape: Sequence[int] | None = None,
        scatter: str | None = None,
    ) -> None:
        chunks = count_chunks(model)
        self.timetable = make_timetable(schedule, pipeline_size(mesh), microbatches, chunks)
        if getattr(model, "releases_weights", False):
            problem = split_problem(self.timetable, type(model).__name__)
            if problem is not None:
                raise ValueError(problem)
        self._evaluations: dict[int, Timetable] = {}
        self._batch_axes: tuple[str, ...] = shared_axes(model, mesh)
        self._mesh, self.rank = mesh, pipeline_rank(mesh)
        self._caller = StageCaller(model)
        self._casts_output = any(isinstance(m, CastModel) and m.casts_inputs for m in model.modules())
        first = next((p for p in model.parameters() if p.is_floating_point()), None)
        device = torch.device(mesh.device_type) if first is None else first.device
        known = None
        if tensor_shape is not None:
            _check_shape(tensor_shape)
            dtype = torch.get_default_dtype() if first is None else first.dtype
            known = Description(Leaf(tuple(tensor_shape), dtype, requires_grad=True))
        self._link = Link(mesh, device, known, scatter)
        self.executor = Executor(self._link, self)

    @property
    def microbatches(self) -> int:
        return self.timetable.microbatches

    @property
    def has_loss(self) -> bool:
        """Whether this rank holds the last layers, and so the loss and the outputs."""
        return self.rank == self.timetable.placement.loss_rank

    def step(
        self,
        data: Any,
        label: Any,
        criterion: Criterion | None,
        trains: LossOwner | None,
        *,
        return_loss: bool = True,
        return_outputs: bool = True,
    ) -> tuple[Any, Tensor | None]:
        """Take a batch through all stages, and back if there is a ``LossOwner``; return its outputs and its
        loss.

        Both are None where not asked for, and on the ranks that do not hold the last layers.  The loss is the
        mean of those of the micro-batches, so it should be a mean over the samples, or tokens.  Without a way
        back, a batch of any size will do, such as the last one of a data loader.
        """
        if trains is not None and not return_loss:
            raise ValueError("a backward pass needs the loss: pass return_loss=True or forward_only=True")
        if trains is not None:
            trains.expect_gradients()
            if self._batch_axes:  # once: in the first step
                self._link.check_usable()
                axes, self._batch_axes = self._batch_axes, ()
                check_same_batch(
                    {"data": data, "label": label}, axes, self._mesh, "the first step of the pipeline"
                )
        timetable = self._evaluation(count_samples(data, label)) if trains is None else self.timetable
        self._parts = split_microbatches(data, label, timetable.microbatches)
        self._criterion, self._trains = criterion, trains
        self._wants_loss, self._wants_outputs = return_loss, return_outputs
        self._outputs: dict[int, Any] = {}
        self._loss: Tensor | None = None
        try:
            with torch.no_grad() if trains is None else nullcontext():
                recorder = step_recorder(timetable, self._mesh, self._link.device)
                self.executor.run(timetable, training=trains is not None, recorder=recorder)
            outputs = [self._outputs[i] for i in sorted(self._outputs)]
            return join_outputs(outputs) if outputs else None, self._loss
        finally:
            self._parts, self._outputs, self._loss = [], {}, None

    def predict(self, data: Any) -> Any:
        """The outputs for a batch of any size; None on the ranks that do not hold the last layers."""
        return self.step(data, None, None, None, return_loss=False)[0]

    def _evaluation(self, samples: int) -> Timetable:
        """Forward passes of as many micro-batches as divide ``samples``, at most as many as in training."""
        number = math.gcd(samples, self.microbatches)
        if number not in self._evaluations:
            self._evaluations[number] = self.timetable.forward_only(number)
        return self._evaluations[number]

    # What the executor calls

    def forward(self, stage: int, chunk: int, microbatch: int, received: Any) -> Any:
        data, _ = self._parts[microbatch]
        earlier = received.losses if isinstance(received, _WithLosses) else None
        MOE_CONTEXT.begin(earlier)
        if isinstance(received, _WithLosses):
            received = received.output
        output = self._caller(chunk, data, received, is_first=stage == 0)
        if stage == self.timetable.placement.last:
            return output  # the criterion takes the losses
        if MOE_CONTEXT.are_hidden:
            raise RuntimeError(
                f"stage {stage} of the pipeline has experts in a checkpoint with use_reentrant=True, which"
                " hides the losses of their routers: their gradients would be lost; use use_reentrant=False"
            )
        losses = MOE_CONTEXT.take()
        return output if losses is None else _WithLosses(output, losses)

    def finish(self, output: Any, microbatch: int) -> Tensor | None:
        if self._casts_output:
            output = cast_floats(output, torch.float32)
        if self._wants_outputs:
            self._outputs[microbatch] = detached(output)
        if not self._wants_loss:
            return None
        loss = loss_of(self._criterion, output, self._parts[microbatch][1]) / len(self._parts)
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        return loss

    def backward(self, loss: Tensor) -> None:
        assert self._trains is not None
        self._trains.backward(loss)

    def scale_loss(self, loss: Tensor) -> Tensor:
        assert self._trains is not None
        return self._trains.scale_loss(loss)


def split_problem(timetable: Timetable, who: str) -> str | None:
    """Why ``who``, which lets weights go after the backward pass, cannot do what ``timetable`` says; None if
    it can.
    """
    if not timetable.splits_backward:
        return None
    return (
        f"the schedule {timetable.name!r} computes the gradients of weights after the backward pass of a"
        f" stage, when {who} may have let the weights go; use gpipe, 1f1b or interleaved"
    )


def _check_shape(shape: Any) -> None:
    rule = READ_BY_FEATURES["TENSOR_SHAPE"]
    if not rule.holds(shape):
        raise ValueError(
            f"tensor_shape must be {rule.words}, that of a micro-batch as stages send it to each other, got"
            f" {shape!r}"
        )
