"""Runs blocks and whole steps on the GPU: their times, and the bytes that a play does not show."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from colossalai.auto_parallel.checkpoint.blocks import block_modes
from colossalai.auto_parallel.checkpoint.meta_model import left_alone
from colossalai.auto_parallel.checkpoint.profile import CallCost, Measured, peak_of_step
from colossalai.auto_parallel.checkpoint.timeline import NOTHING, Like, Span, StepTimeline, TrainingStep
from colossalai.utils.held_tensors import map_held, tensors_of

_WARM, _ROWS, _ENOUGH = 2, 5, 1.0
_CALL_ROW, _STEP_ROW = 0.03, 0.1
"""Seconds that a row of runs takes, at least two: there are many calls, and their times are only shares."""


def measure_calls(
    step: TrainingStep, blocks: Mapping[str, nn.Module], played: Mapping[str, StepTimeline]
) -> dict[tuple[int, str], CallCost]:
    """The costs of every call in every mode; calls of the same kind are run once."""
    first = played["keep"]
    kinds: dict[str, dict[str, CallCost]] = {}
    found: dict[tuple[int, str], CallCost] = {}
    for call, name in enumerate(first.calls):
        kind = f"{blocks[name]!r} {first.inputs[call]!r}"
        if kind not in kinds:
            kinds[kind] = {}
            for mode, line in played.items():
                spans = (line.forward[call], line.backward.get(call, NOTHING))
                kinds[kind][mode] = _measure_call(step, name, first.inputs[call], mode, spans)
        found |= {(call, mode): cost for mode, cost in kinds[kind].items()}
    return found


def _measure_call(
    step: TrainingStep, name: str, inputs: Any, mode: str, spans: tuple[Span, Span]
) -> CallCost:
    """One block alone: its seconds, and the bytes that it needs beyond those that were played."""
    block = step.model.get_submodule(name)
    device = next(block.parameters()).device
    peaks = (0, 0)

    def make() -> None:
        _made(inputs, device)

    def ahead() -> list[Tensor]:
        nonlocal peaks
        args, kwargs = _made(inputs, device)
        with _PeakAbove(device) as forward, step.autocasts("cuda"):
            output = block(*args, **kwargs)
        peaks = forward.nbytes, 0
        return list(tensors_of(output))

    def once() -> None:
        nonlocal peaks
        learnt = ahead()
        gradients = [torch.ones_like(t) for t in learnt]
        with _PeakAbove(device) as backward:
            if learnt:
                torch.autograd.backward(learnt, gradients)
        peaks = peaks[0], backward.nbytes

    with left_alone(block), block_modes(step.model, {name: mode}):
        making = _seconds(make, block, device, _CALL_ROW)
        passing = _seconds(ahead, block, device, _CALL_ROW) - making if mode == "keep" else 0.0
        seconds = max(0.0, _seconds(once, block, device, _CALL_ROW) - making)
    more = [max(0, most - (span.peak - span.start)) for most, span in zip(peaks, spans, strict=True)]
    return CallCost(seconds, more[0], more[1], max(0.0, passing))


class Whole(NamedTuple):
    """A step of the whole model: its seconds, its peak on the GPU, and how much of that is neither weights
    nor made by the step: the batch, workspaces of libraries, states of the optimizer, and whatever else the
    script holds.
    """

    seconds: float
    peak: int
    beside: int


def measure_step(step: TrainingStep) -> Whole | None:
    """Run the step with the blocks as they are; None if the GPU has not enough memory for it."""
    device = next(p.device for p in step.model.parameters())
    batch = tree_map_only(Tensor, lambda t: t.to(device), step.batch)
    model: Any = step.model
    if step.compiled:
        torch.compiler.reset()  # else what was compiled before counts against the limit of recompilations
        model = torch.compile(step.model)
    before = above = 0

    def once() -> None:
        nonlocal before, above
        before = torch.cuda.memory_allocated(device)
        with _PeakAbove(device) as peak:
            step.reset_gradients()
            with step.autocasts("cuda"):
                loss = step.loss(model, batch)
            loss.backward()
        above = peak.nbytes

    gc.collect()  # what is only waiting for it is not there in training
    try:
        with left_alone(step.model) as copies:
            seconds = _seconds(once, step.model, device, _STEP_ROW)
            before -= copies
            return Whole(seconds, with_gaps(before + above), before - _weights_on(device, step.model))
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()


@dataclass
class StepRuns:
    """Steps of the whole model on the GPU, and what they needed beyond the same steps as they were played.

    ``beside``: bytes that are reserved for whatever else is on the device.  ``modes``: those that all blocks
    get in turn.
    """

    step: TrainingStep
    played: Mapping[str, StepTimeline]
    measured: Measured
    beside: int
    modes: tuple[str, ...]
    _known: dict[Any, Whole | None] = field(default_factory=dict)

    def run(self, modes: Mapping[str, str], regions: Sequence[Sequence[str]] = ()) -> Whole | None:
        """The step with blocks in these modes and regions; None if the GPU has not enough memory for it.  One
        that was run before is not run again.
        """
        key = (tuple(modes.items()), tuple(map(tuple, regions)))
        if key not in self._known:
            with block_modes(self.step.model, modes, regions):
                self._known[key] = measure_step(self.step)
        return self._known[key]

    @cached_property
    def wholes(self) -> dict[str, Whole]:
        """The steps with all blocks in one mode, where they fit."""
        blocks = dict.fromkeys(self.played["keep"].calls)
        found = {mode: self.run(dict.fromkeys(blocks, mode)) for mode in self.modes}
        return {mode: whole for mode, whole in found.items() if whole is not None}

    def peak_of(self, whole: Whole) -> int:
        """The bytes of a forward and a backward pass that was run, with states that will be there and what is
        reserved for others that are not there yet.
        """
        present = states_on(self.step)
        coming = max(0, self.played["keep"].states - present)
        return whole.peak + coming + max(0, self.beside - (whole.beside - present))

    @cached_property
    def _more(self) -> dict[str, int]:
        """The bytes that each of them needed beyond the forward and the backward pass that were played."""
        return {mode: self.peak_of(whole) - self._played_peak(mode) for mode, whole in self.wholes.items()}

    def _played_peak(self, mode: str) -> int:
        line = replace(self.played[mode], step=NOTHING)
        return peak_of_step(line, [mode] * len(line.calls), self.measured)

    @property
    def unseen(self) -> int:
        """The most of these; of compiled steps, those of the one that keeps least: how much less than in play
        the others keep is told by their peaks.
        """
        if self.step.compiled and "full" in self._more:
            return self._more["full"]
        return max(self._more.values(), default=0)

    @property
    def least_unseen(self) -> int:
        """The fewest: what a kernel takes at one moment, such as in the backward pass of a stem, lies above
        the peak of one choice and not of another.
        """
        return self.unseen if self.step.compiled else min(self._more.values(), default=0)


def with_gaps(peak: int) -> int:
    """What the same step may need another time: CUDA's allocator gives blocks of up to 1 MiB more than was
    asked for, as they happen to lie free.  Seen on an H200: 2 MiB of 650 MiB.
    """
    return peak + min(peak // 128, 64 << 20)


def _weights_on(device: torch.device, model: nn.Module) -> int:
    return _bytes_on(device, [*model.parameters(), *model.buffers()])


def states_on(step: TrainingStep) -> int:
    """The bytes of the states that the optimizer has on the GPU already."""
    states = {} if step.optimizer is None else step.optimizer.state
    held = [value for state in states.values() for value in state.values() if isinstance(value, Tensor)]
    return _bytes_on(next(p.device for p in step.model.parameters()), held)


def _bytes_on(device: torch.device, tensors: Iterable[Tensor]) -> int:
    found = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.device == device}
    return sum(storage.nbytes() for storage in found.values())


class _PeakAbove:
    """The most bytes above those alive when the block began; nothing waits for the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.nbytes = device, 0

    def __enter__(self) -> _PeakAbove:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *error: object) -> None:
        self.nbytes = torch.cuda.max_memory_allocated(self._device) - self._before


def _seconds(once: Callable[[], Any], module: nn.Module, device: torch.device, row_seconds: float) -> float:
    """The seconds of a run, of several one after the other, as in training."""

    def row(runs: int) -> float:
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(runs):
            for p in module.parameters():
                p.grad = None
            once()
        torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / runs

    with nothing_collected():
        runs = min(8, max(2, round(row_seconds / row(_WARM))))  # the first row loads kernels
        return fastest_row(lambda: row(runs))


def fastest_row(row: Callable[[], float]) -> float:
    """The fastest of a few rows of runs, which give their seconds: whatever else the machine does only makes
    them slower.  Long runs, which that hardly touches, get two.
    """
    start, least = time.perf_counter(), float("inf")
    for number in range(_ROWS):
        least = min(least, row())
        if number and time.perf_counter() - start > _ENOUGH:
            break
    return least


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Inside the block, Python collects no garbage: it may take longer than a step, and comes by chance."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _made(inputs: Any, device: torch.device) -> Any:
    """Arguments that look like those of a call, and may be written to; a key-value cache is left out."""

    def make(like: Like) -> Tensor:
        made = like.make(device)
        return made.clone() if like.requires_grad else made

    inputs = tree_map(
        lambda leaf: None if hasattr(leaf, "get_seq_length") else leaf,
        inputs,
        is_leaf=lambda leaf: isinstance(leaf, Like),
    )
    return map_held(make, inputs, Like)
