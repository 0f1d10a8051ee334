"""``auto_checkpoint``: any model trained within a number of bytes, as fast as recomputation allows.

The step is played on the meta device with all blocks in each mode, the fastest choice of modes within the
budget is found, and the whole step is played once more with it: only what stays below the budget there is
accepted.  What the play shows otherwise than predicted corrects the costs, and the choice is made again.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from colossalai.auto_parallel.checkpoint.blocks import block_modes, find_blocks, set_modes
from colossalai.auto_parallel.checkpoint.measure import Whole, bytes_beside, measure_calls, measure_step
from colossalai.auto_parallel.checkpoint.mode_solver import (
    MODES,
    Choice,
    ModeProblem,
    least_budget,
    peak_of,
    seconds_of,
    solve_modes,
)
from colossalai.auto_parallel.checkpoint.operation import Chain
from colossalai.auto_parallel.checkpoint.plan import CheckpointPlan, CurvePoint
from colossalai.auto_parallel.checkpoint.profile import (
    Measured,
    corrected,
    make_problem,
    peak_of_step,
    shared_out,
)
from colossalai.auto_parallel.checkpoint.timeline import NOTHING, Like, StepTimeline, TrainingStep, line_of
from colossalai.device.presets import DEVICES, DevicePreset, device_preset
from colossalai.utils.text import bytes_of, size_text

_ROUNDS = 8


def auto_checkpoint(
    model: nn.Module,
    batch: Any,
    memory: int | str,
    *,
    criterion: Callable[..., Any] | None = None,
    optimizer: Optimizer | None = None,
    autocast: torch.dtype | None = None,
    reserved: int | str = 0,
    device: str | DevicePreset | None = None,
    measure: bool | None = None,
    blocks: Sequence[str] | None = None,
    stored: int = 1,
    time_limit: float = 10.0,
) -> CheckpointPlan:
    """Let each block of ``model`` keep, recompute or offload its activations, so that a training step needs
    at most ``memory`` and the least time.

    Call it before ``boost``, as ``checkpoint_blocks``.  The model is changed in place, or not at all if
    there is an error; ``print`` the result to see what was chosen, and where the memory goes.

    Args:
        model: any model, in training; it may lie on the CPU or the meta device, and is not run there.
        batch: one batch, of which the shapes matter: a tensor, a tuple of arguments, a dict of keywords or
            ``Arguments(args, kwargs)`` for ``model``; with a ``criterion``, ``(data, label)`` or a dict with
            ``labels``.
        memory: bytes of the whole step at its worst moment, such as ``"20 GiB"``: weights, gradients, states
            of the optimizer, activations.
        criterion: the loss, called with the output and the label; without it, the ``loss`` that the model
            returns.
        optimizer: counts its states and its step; without it, there is none.
        autocast: the dtype of ``torch.autocast`` around the forward pass.
        reserved: bytes for whatever else is on the device.
        device: ``"a100"``, ``"h100"``, ``"h200"``, ``"cpu"`` ..., whose speed the times are computed for; by
            default, the device of the model.
        measure: run each kind of block on the GPU, for its true times and workspaces; by default where the
            model lies on one.
        blocks: names of the modules to choose for, by default found.
        stored: how many micro-batches are stored at one time; more than 1 for a stage of a pipeline, of which
            ``batch`` is one micro-batch.
        time_limit: seconds for each solution; after that, the best that was found, with its gap.
    """
    planner = CheckpointPlanner(
        model,
        batch,
        criterion=criterion,
        optimizer=optimizer,
        autocast=autocast,
        reserved=reserved,
        device=device,
        measure=measure,
        blocks=blocks,
        stored=stored,
    )
    plan = planner.plan(memory, time_limit)
    planner.apply(plan)
    return plan


class CheckpointPlanner:
    """Makes plans for one model and batch under many budgets; the arguments are those of
    ``auto_checkpoint``.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        *,
        criterion: Callable[..., Any] | None = None,
        optimizer: Optimizer | None = None,
        autocast: torch.dtype | None = None,
        reserved: int | str = 0,
        device: str | DevicePreset | None = None,
        measure: bool | None = None,
        blocks: Sequence[str] | None = None,
        stored: int = 1,
    ) -> None:
        if stored < 1:
            raise ValueError(f"auto_checkpoint: at least 1 micro-batch is stored, got {stored=}")
        self._copies = stored - 1
        self.blocks = find_blocks(model, blocks)
        place = next((p.device for p in model.parameters() if p.requires_grad), None)
        if place is None:
            raise ValueError(
                f"auto_checkpoint: no parameter of {type(model).__name__} is trained (requires_grad), so its"
                " step has no backward pass"
            )
        preset = _device(device, place)
        self.step = TrainingStep(
            model, batch, criterion, optimizer, autocast, bytes_of(reserved) + preset.workspace, preset
        )
        self.place = place
        self._measures = place.type == "cuda" if measure is None else measure
        if self._measures and place.type != "cuda":
            raise ValueError(f"auto_checkpoint: measure=True needs the model on a GPU, it lies on {place}")
        self.notes: list[str] = []
        self.played = self._play_all()

    def _play_all(self) -> dict[str, StepTimeline]:
        """A step with all blocks in each mode."""
        played: dict[str, StepTimeline] = {}
        for mode in MODES:
            if mode == "offload" and self.step.device is DEVICES["cpu"]:
                continue  # the device is the host
            try:
                line = self._play_or_run(dict.fromkeys(self.blocks, mode))
            except Exception as error:
                if mode == "keep":
                    raise self._does_not_fit(error) from error
                self.notes.append(f"mode {mode!r} is not used: {error}")
                continue
            if played and line.calls != played["keep"].calls:
                self.notes.append(f"mode {mode!r} is not used: the blocks are called in another order")
                continue
            played[mode] = line
        for read in played["keep"].reads:
            self.notes.append(f"a value is read, and was taken for 0 in the plan, at {read}")
        self.blocks = {name: b for name, b in self.blocks.items() if name in played["keep"].calls}
        return played

    def _does_not_fit(self, error: Exception) -> ValueError:
        return ValueError(
            f"auto_checkpoint: {type(self.step.model).__name__} cannot compute a loss of this batch: {error}"
        )

    def _play_or_run(self, modes: dict[str, str]) -> StepTimeline:
        """A step on the meta device, or where the model is if it needs values."""
        try:
            return self._play(modes)
        except (NotImplementedError, RuntimeError) as error:
            if not self.step.is_played or self.place.type == "meta":
                raise
            self.step.is_played = False
            try:
                found = self._play(modes)
            except Exception:
                self.step.is_played = True
                raise error from None
            self.notes.append(
                f"values decide at {line_of(traceback.extract_tb(error.__traceback__))}; so steps were run on"
                f" {self.place} instead of the meta device, and bytes counted there"
            )
            return found

    def _play(self, modes: dict[str, str]) -> StepTimeline:
        with block_modes(self.step.model, modes):
            return self.step.play(self.blocks)

    @cached_property
    def measured(self) -> Measured:
        """What runs on the GPU have shown of each call in each mode."""
        return measure_calls(self.step, self.blocks, self.played) if self._measures else {}

    @cached_property
    def _costs(self) -> tuple[ModeProblem, int]:
        problem = replace(make_problem(self.played, self.step.device, self.measured), copies=self._copies)
        return self._with_whole_steps(problem) if self._measures else (problem, 0)

    @property
    def problem(self) -> ModeProblem:
        """Costs of all modes of all blocks."""
        return self._costs[0]

    @property
    def unseen(self) -> int:
        """Bytes that runs on the GPU needed beyond those that were played."""
        return self._costs[1]

    def _with_whole_steps(self, problem: ModeProblem) -> tuple[ModeProblem, int]:
        """``problem`` with the times of steps that have all blocks in one mode, and the bytes that no play
        shows.

        Blocks that run alone take longer than in a step, where the host prepares the next one meanwhile: so
        their times only say how the time of a step is shared out.  A mode whose step does not fit is taken
        for as much slower or faster as its blocks alone are.
        """
        whole: dict[str, Whole] = {}
        for mode in self.played:
            with block_modes(self.step.model, dict.fromkeys(self.blocks, mode)):
                if (found := measure_step(self.step)) is not None:
                    whole[mode] = found
        if not whole:
            self.notes.append("no step fitted on the GPU: times and bytes of the whole are predicted")
            return problem, 0
        known = self._smallest if self._smallest in whole else next(iter(whole))
        stages = shared_out(problem.stages, {m: found.seconds for m, found in whole.items()}, known)
        seconds = self.played[known].step.seconds + (0.0 if stages else whole[known].seconds)
        above = max(found.above - self._played_above(mode) for mode, found in whole.items())
        beside = bytes_beside(self.step) - self.step.reserved
        return replace(problem, stages=stages, seconds=seconds), max(0, above) + max(0, beside)

    def _played_above(self, mode: str) -> int:
        """The bytes of a forward and a backward pass above those that were there before."""
        line = replace(self.played[mode], step=NOTHING)
        return peak_of_step(line, [mode] * len(line.calls), self.measured) - line.before.start

    @property
    def _smallest(self) -> str:
        return "full" if "full" in self.played else "keep"

    @property
    def whole(self) -> int:
        """The bytes of a step that computes nothing again."""
        line = self.played["keep"]
        modes = ["keep"] * len(line.calls)
        return peak_of_step(line, modes, self.measured, self._copies) + self.unseen

    @cached_property
    def least(self) -> tuple[list[str], StepTimeline, int]:
        """The modes that need the least memory, their step, and its peak with all that is needed."""
        choice = solve_modes(self.problem, least_budget(self.problem))
        assert choice is not None
        judged, peak = self._judge(choice.modes)
        return choice.modes, judged, peak + self.unseen

    def plan(self, memory: int | str, time_limit: float = 10.0) -> CheckpointPlan:
        """The fastest modes with which the step stays within ``memory``; every rank of a job calls it."""
        budget = bytes_of(memory)
        try:
            choice, judged, peak = self._find(budget, time_limit)
        except ValueError as error:
            self._agree(None, str(error))
            raise
        return CheckpointPlan(
            model=self.step.model,
            budget=budget,
            peak=peak + self.unseen,
            seconds=choice.seconds,
            gap=choice.gap,
            modes=self._agree(self._by_block(choice.modes), ""),
            timeline=judged,
            reserved=self.step.reserved + self.unseen,
            notes=tuple(self.notes),
            planner=self,
        )

    def _find(self, budget: int, time_limit: float) -> tuple[Choice, StepTimeline, int]:
        """The best choice whose step stays within ``budget`` when it is played, its play and its peak."""
        problem, seen = self.problem, set()
        budget -= self.unseen
        best = self._best_alike(budget)
        if best is not None and best[0].modes[:1] in ([], ["keep"]):
            return best
        for _ in range(_ROUNDS):
            choice = solve_modes(problem, budget, time_limit)
            if choice is None or tuple(choice.modes) in seen:
                break
            seen.add(tuple(choice.modes))
            judged, peak = self._judge(choice.modes)
            if peak <= budget and (best is None or choice.seconds < best[0].seconds):
                best = choice, judged, peak
            problem = corrected(problem, choice.modes, judged, self.measured)
        return self._least_within(budget) if best is None else best

    def _best_alike(self, budget: int) -> tuple[Choice, StepTimeline, int] | None:
        """The fastest of the steps with one mode for all blocks, which were played already."""
        found = []
        for mode, line in self.played.items():
            modes = [mode] * len(line.calls)
            peak = peak_of_step(line, modes, self.measured, self._copies)
            if peak <= budget:
                found.append((Choice(modes, seconds_of(self.problem, modes), peak), line, peak))
        return min(found, key=lambda one: one[0].seconds, default=None)

    def _least_within(self, budget: int) -> tuple[Choice, StepTimeline, int]:
        modes, judged, peak = self.least
        if peak > (budget := budget + self.unseen):
            static = judged.weights + judged.states + self.step.reserved
            raise ValueError(
                f"auto_checkpoint: memory={budget} ({size_text(budget)}) is below the least that recomputing"
                f" and offloading blocks reach, {peak} ({size_text(peak)}), of which {size_text(static)} are"
                " weights, states and what is reserved; give more, take a smaller batch, or shard the model"
            )
        return Choice(modes, seconds_of(self.problem, modes), peak), judged, peak - self.unseen

    def _judge(self, modes: list[str]) -> tuple[StepTimeline, int]:
        judged = self._play(self._by_block(modes))
        return judged, peak_of_step(judged, modes, self.measured, self._copies)

    def _by_block(self, modes: list[str]) -> dict[str, str]:
        return dict(zip(self.played["keep"].calls, modes, strict=True))

    def _agree(self, modes: dict[str, str] | None, error: str) -> dict[str, str]:
        """The modes that ranks with the same blocks share, who communicate when they recompute; raises where
        another rank has an ``error``.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
            return modes or {}
        every: list[Any] = [None] * dist.get_world_size()
        blocks = self.blocks.items()
        look = [(name, [tuple(p.shape) for p in block.parameters()]) for name, block in blocks]
        dist.all_gather_object(every, (look, modes, error))
        for rank, (_, _, theirs) in enumerate(every):
            if theirs and not error:
                raise ValueError(f"auto_checkpoint found no plan on rank {rank}: {theirs}")
        return next((chosen for whose, chosen, _ in every if whose == look and chosen is not None), {})

    def apply(self, plan: CheckpointPlan) -> None:
        """Give the blocks of the model the modes of ``plan``."""
        set_modes(self.step.model, plan.modes)

    def predicted(self, modes: Sequence[str]) -> CurvePoint:
        """The peak and the seconds of a step whose calls have these modes, without playing it."""
        peak = peak_of(self.problem, modes) + self.unseen
        return CurvePoint(peak, peak, seconds_of(self.problem, modes))

    def chain(self) -> Chain:
        """The calls of the blocks as a ``Chain``, for ``CheckpointSolverRotor`` and ``CheckpointSolverChen``;
        what no mode changes is left out.
        """
        stages, line = self.problem.stages, self.played["keep"]
        forward, backward = line.forward, [line.backward.get(i, NOTHING) for i in range(len(stages))]
        again = [s.costs[self._smallest].seconds - s.costs["keep"].seconds for s in stages]
        inputs = [_largest(given) for given in line.inputs]
        kept = [stage.costs["keep"].kept for stage in stages]
        return Chain(
            again if self._smallest == "full" else [span.seconds for span in forward],
            [s.costs["keep"].seconds - max(0.0, f) for s, f in zip(stages, again, strict=True)],
            [*inputs, inputs[-1]] if inputs else [0],
            kept,
            [max(0, f.peak - f.start - k) for f, k in zip(forward, kept, strict=True)],
            [max(0, b.peak - b.start) for b in backward],
        )

    def curve(self, points: int = 15) -> list[CurvePoint]:
        """Budgets from the least to what the model needs without recomputing, with the predicted peak and
        seconds of each.
        """
        low, high = self.least[2], self.whole
        found = []
        for number in range(points):
            budget = low + (high - low) * number // max(1, points - 1)
            choice = solve_modes(self.problem, budget - self.unseen)
            if choice is not None:
                found.append(CurvePoint(budget, choice.peak + self.unseen, choice.seconds))
        return found


def _device(device: str | DevicePreset | None, place: torch.device) -> DevicePreset:
    if isinstance(device, DevicePreset):
        return device
    if device is not None:
        return device_preset(device)
    if place.type != "cuda":
        return DEVICES["cpu"]
    try:
        return device_preset(torch.cuda.get_device_name(place))
    except ValueError:
        return DEVICES["a100"]  # its times are measured


def _largest(inputs: Any) -> int:
    """The bytes of the largest tensor among the arguments of a call: what comes from the block before."""
    likes = tree_leaves(inputs, is_leaf=lambda leaf: isinstance(leaf, Like))
    return max((like.nbytes for like in likes if isinstance(like, Like)), default=0)
