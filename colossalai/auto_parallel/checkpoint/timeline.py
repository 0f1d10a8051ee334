"""Plays a training step on the meta device and notes, piece by piece, the bytes and the time that it needs.

The pieces lie between the moments at which blocks begin and end: a block's forward pass, what follows it,
its backward pass with whatever is computed again in it.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from colossalai.auto_parallel.checkpoint.meta_model import left_alone, on_meta
from colossalai.auto_parallel.checkpoint.states import builder_of, step_of
from colossalai.device.presets import DEVICES, DevicePreset
from colossalai.interface.batch import call_with, loss_of, split_batch
from colossalai.utils.held_tensors import map_held, tensors_of
from colossalai.utils.memory.live_bytes import nbytes_of
from colossalai.utils.meta import MetaBytes, gpu_kernels
from colossalai.utils.throughput import OperationCounter

if TYPE_CHECKING:
    from colossalai.auto_parallel.checkpoint.share import ModelShare


_MANY_READS = 20_000
"""More than models with many experts make in a step."""


class Span(NamedTuple):
    """A part of a step: the bytes alive when it began, at its worst moment, and its seconds."""

    start: int = 0
    peak: int = 0
    seconds: float = 0.0


NOTHING = Span()


@dataclass
class StepTimeline:
    """The pieces of a step.  ``calls`` names the block of each call; ``forward`` and ``between`` (what
    follows it until the next one begins; behind the last, the head and the loss) have a piece for each,
    ``backward`` for those that are differentiated.
    """

    before: Span = NOTHING
    calls: list[str] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    """The arguments of each call: a pair of positional ones and keywords."""
    forward: list[Span] = field(default_factory=list)
    between: list[Span] = field(default_factory=list)
    backward: dict[int, Span] = field(default_factory=dict)
    step: Span = NOTHING
    weights: int = 0
    gradients: int = 0
    states: int = 0
    reads: Counter[str] = field(default_factory=Counter)
    """Lines that read values, which are not there, and how often."""

    @property
    def pieces(self) -> list[Span]:
        return [self.before, *self.forward, *self.between, *self.backward.values(), self.step]

    @property
    def peak(self) -> int:
        return max(piece.peak for piece in self.pieces)

    @property
    def seconds(self) -> float:
        return sum(piece.seconds for piece in self.pieces)


class Arguments(NamedTuple):
    """A batch of which a model takes a part by place and a part by name, as stages of a pipeline do."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class TrainingStep:
    """A training step: what it computes, and with what it is judged."""

    model: nn.Module
    batch: Any
    criterion: Callable[..., Any] | None
    optimizer: Optimizer | None
    autocast: torch.dtype | None
    reserved: int
    device: DevicePreset
    share: ModelShare | None = None
    """What a plan keeps of the model instead of all of it."""
    accumulates: bool = False
    """Whether gradients of batches before are there."""
    compiled: bool = False
    """Whether runs of it are compiled by ``torch.compile``."""
    is_played: bool = True
    """Whether it is played on the meta device; one whose way depends on values runs where the model is."""
    read_as: int = 0
    """What values are taken for in a play, which has none."""
    most_reads: int = _MANY_READS
    """How often a play reads values before it is taken for one that does not end."""
    reads: Counter[str] = field(default_factory=Counter)
    """The lines that read values when it was played last, also if there was an error then."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch; of a model that makes none, a number that depends on all that it returns."""
        if self.criterion is not None:
            if isinstance(batch, (tuple, list)) and len(batch) != 2:
                raise ValueError(
                    f"with a criterion a batch is (data, label), or a dict with 'labels', got"
                    f" {len(batch)} items"
                )
            data, label = split_batch(batch, None, True, "auto_checkpoint")
            output = call_with(model, data)
            if self.dtype is not None:  # as models of such a plan do
                output = tree_map_only(Tensor, lambda t: t.float() if t.is_floating_point() else t, output)
            return loss_of(self.criterion, output, label)
        if isinstance(batch, Arguments):
            output = model(*batch.args, **batch.kwargs)
        else:
            output = call_with(model, batch)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return loss
        floats = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        if not floats:
            raise ValueError("it returns no tensor that depends on a trained parameter")
        return torch.stack([t.sum().float() for t in floats]).sum()

    def autocasts(self, device: str) -> Any:
        return nullcontext() if self.autocast is None else torch.autocast(device, self.autocast)

    def play(self, blocks: Mapping[str, nn.Module]) -> StepTimeline:
        """The timeline of this step, with ``blocks`` as they are."""
        with torch.inference_mode(False), torch.enable_grad():  # also of a plan that is made without
            return self._play(blocks) if self.is_played else self._run(blocks)

    def _play(self, blocks: Mapping[str, nn.Module]) -> StepTimeline:
        """The same on the meta device."""
        kernels = gpu_kernels(is_cpu=self.device is DEVICES["cpu"])
        batch = tree_map_only(Tensor, self._like_on_meta, self.batch)
        build = None if self.optimizer is None else builder_of(self.optimizer, self.model)
        with on_meta(self.model, self.dtype), kernels, TimelineRecorder(self.device) as recorder:
            recorder.most_reads = self.most_reads
            recorder.read_as, self.reads = self.read_as, recorder.timeline.reads
            weights = [t for t in (*self.model.parameters(), *self.model.buffers()) if t.is_meta]
            recorder.hold(weights)
            optimizer = None
            if self.share is not None:
                recorder.now = self.share.fixed
            elif build is not None:
                held = recorder.now
                optimizer = build()
                recorder.timeline.states = recorder.now - held
            recorder.timeline.weights = recorder.now - recorder.timeline.states
            recorder.hold(t for t in tree_leaves(batch) if isinstance(t, Tensor))
            recorder.now += self.reserved
            self.reset_gradients()
            recorder.begin("before")
            self._passes(recorder, blocks, batch, "meta")
            recorder.begin("step")
            if optimizer is not None:
                step_of(optimizer)
            recorder.begin("done")
            return recorder.timeline

    def _run(self, blocks: Mapping[str, nn.Module]) -> StepTimeline:
        """The same on the model's own device, with values; the optimizer's step is on the meta device."""
        place = next(p.device for p in self.model.parameters())
        batch = tree_map_only(Tensor, lambda t: t.to(place), self.batch)
        states, step = self._stepped()
        with left_alone(self.model), TimelineRecorder(self.device, meta=False) as recorder:
            recorder.hold((*self.model.parameters(), *self.model.buffers()))
            recorder.timeline.weights = recorder.now
            recorder.timeline.states = states
            if self.share is not None:
                recorder.timeline.weights = recorder.now = self.share.fixed
            recorder.hold(t for t in tree_leaves(batch) if isinstance(t, Tensor))
            recorder.now += self.reserved
            beside = recorder.now - recorder.timeline.weights
            recorder.now += states
            self.reset_gradients()
            recorder.begin("before")
            self._passes(recorder, blocks, batch, place.type)
            recorder.begin("done")
            recorder.timeline.step = Span(step.start + beside, step.peak + beside, step.seconds)
            return recorder.timeline

    def _passes(
        self, recorder: TimelineRecorder, blocks: Mapping[str, nn.Module], batch: Any, place: str
    ) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad and self._divides]
        passing = [p.register_post_accumulate_grad_hook(_drop_gradient) for p in trained]
        with recorder.watching(blocks):
            with self.autocasts(place):
                loss = self.loss(self.model, batch)
            loss.backward()
        del loss
        for hook in passing:
            hook.remove()
        gradients = (p.grad for p in self.model.parameters())
        recorder.timeline.gradients = sum(
            nbytes_of(gradient) for gradient in gradients if gradient is not None
        )

    @property
    def _divides(self) -> bool:
        """Whether gradients lie in what the plan keeps."""
        return self.share is not None and not self.share.gradients

    def reset_gradients(self) -> None:
        """The gradients with which a forward pass begins."""
        stay = self.accumulates and not self._divides
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p) if stay and p.requires_grad else None

    @property
    def dtype(self) -> torch.dtype | None:
        return None if self.share is None else self.share.dtype

    def _like_on_meta(self, tensor: Tensor) -> Tensor:
        dtype = self.dtype if tensor.is_floating_point() else None
        return tensor.detach().to("meta", dtype).requires_grad_(tensor.requires_grad)

    def _stepped(self) -> tuple[int, Span]:
        """The bytes of the optimizer's states, and its step, on the meta device."""
        if self.optimizer is None or self.share is not None:
            return 0, NOTHING
        build = builder_of(self.optimizer, self.model)
        with on_meta(self.model), TimelineRecorder(self.device) as recorder:
            recorder.hold((*self.model.parameters(), *self.model.buffers()))
            held = recorder.now
            optimizer = build()
            states = recorder.now - held
            for p in self.model.parameters():
                p.grad = torch.empty_like(p) if p.requires_grad else None
            recorder.begin("step")
            step_of(optimizer)
            recorder.begin("done")
            return states, recorder.timeline.step


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class TimelineRecorder(MetaBytes):
    """Cuts a step into pieces, and adds up the seconds of its operations by a roofline."""

    def __init__(self, device: DevicePreset, *, meta: bool = True) -> None:
        super().__init__(host=device is DEVICES["cpu"])
        self._meta = meta
        self.timeline = StepTimeline()
        self._device, self._operations = device, OperationCounter().flop_registry
        self._name, self._call, self._start = "", 0, 0
        self.seconds = 0.0
        """Of the piece in progress, so far."""
        self.most_reads = _MANY_READS

    def begin(self, name: str, call: int = 0) -> None:
        """The piece in progress ends, and another begins."""
        piece, line = Span(self._start, max(self.peak, self.now), self.seconds), self.timeline
        if self._name in ("before", "step"):
            setattr(line, self._name, piece)
        elif self._name in ("forward", "between"):
            getattr(line, self._name).append(piece)
        elif self._name == "backward":
            line.backward[self._call] = piece
        self._name, self._call, self._start, self.seconds = name, call, self.now, 0.0
        self.restart()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            self._note_read()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.seconds += self._time(func, args, kwargs or {}, result)
        return result

    def _time(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        if func.is_view or not (tensors := [t for t in tree_leaves((args, result)) if isinstance(t, Tensor)]):
            return 0.0
        count: Any = self._operations.get(func._overloadpacket)
        operations = 0 if count is None else int(count(*args, **kwargs, out_val=result))
        return self._device.seconds(operations, sum(map(nbytes_of, tensors)), tensors[0].dtype)

    def _note_read(self) -> None:
        if self.timeline.reads.total() >= self.most_reads:
            raise NotImplementedError("values are read again and again, as if a loop waited for them")
        self.timeline.reads[line_of(traceback.extract_stack())] += 1

    @contextmanager
    def watching(self, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
        """Inside, calls of ``blocks`` are pieces."""
        hooks = []
        for name, block in blocks.items():
            hooks.append(block.register_forward_pre_hook(self._enter(name), with_kwargs=True))
            hooks.append(block.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self.begin("forward", len(self.timeline.calls))
            self.timeline.calls.append(name)
            self.timeline.inputs.append(map_held(Like.of, (args, kwargs)))

        return enter

    def _leave(self, _: nn.Module, args: Any, output: Any) -> None:
        call = len(self.timeline.calls) - 1
        self.begin("between", call)
        seen = False

        def differentiate(_: Tensor) -> None:
            nonlocal seen
            if not seen:
                seen = True
                self.begin("backward", call)

        for tensor in tensors_of(output):
            tensor.register_hook(differentiate)


def line_of(stack: traceback.StackSummary) -> str:
    """The innermost line of ``stack`` that is neither torch's nor ours."""
    for frame in reversed(stack):
        if "/torch/" not in frame.filename and "/colossalai/" not in frame.filename:
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "an unknown line"


class Like(NamedTuple):
    """The look of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def make(self, device: torch.device) -> Tensor:
        """Another tensor of this look; integers and truth values are those that any model can take."""
        if self.dtype.is_floating_point:
            made = torch.randn(self.shape, dtype=self.dtype, device=device)
            return made.requires_grad_(self.requires_grad)
        return torch.full(self.shape, self.dtype == torch.bool, dtype=self.dtype, device=device)
