"""Makes plans for activation checkpointing: a mode for each block, and regions of several.

The step is played on the meta device with all blocks in each mode, the fastest choice within the budget is
found, and the whole step is played once more with it: only what stays below the budget there is accepted.
Where the model lies on a GPU, the step is run there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.auto_parallel.checkpoint.blocks import block_modes, find_blocks, set_modes
from colossalai.auto_parallel.checkpoint.chen import CheckpointSolverChen
from colossalai.auto_parallel.checkpoint.measure import StepRuns, measure_calls
from colossalai.auto_parallel.checkpoint.meta_leaks import none_left_on_meta
from colossalai.auto_parallel.checkpoint.mode_solver import (
    MODES,
    Choice,
    ModeProblem,
    does_no_more,
    peak_of,
    seconds_of,
)
from colossalai.auto_parallel.checkpoint.operation import Chain
from colossalai.auto_parallel.checkpoint.options import (
    bytes_of_option,
    check_batch,
    check_options,
    preset_of,
    whether_measured,
)
from colossalai.auto_parallel.checkpoint.plan import CheckpointPlan, CurvePoint
from colossalai.auto_parallel.checkpoint.profile import (
    Measured,
    inner_costs,
    longer_first,
    make_problem,
    peak_of_step,
    scaled_to,
    shared_out,
)
from colossalai.auto_parallel.checkpoint.ranks import Told, dist_size, tell, tell_error
from colossalai.auto_parallel.checkpoint.region_solver import again_in
from colossalai.auto_parallel.checkpoint.search import Judged, Search
from colossalai.auto_parallel.checkpoint.share import SharesModel
from colossalai.auto_parallel.checkpoint.states import StatesError, look_at_optimizer
from colossalai.auto_parallel.checkpoint.timeline import NOTHING, Like, StepTimeline, TrainingStep
from colossalai.auto_parallel.checkpoint.values import WaysOfStep
from colossalai.device.presets import DEVICES, DevicePreset
from colossalai.nn.checkpoint_blocks import can_be_grouped
from colossalai.utils.held_tensors import held
from colossalai.utils.kept_attributes import attributes_kept
from colossalai.utils.text import size_text

_TRIES = 6
_PARTS = 16
_SLOWER = 1.02
"""How much longer than predicted regions may take before single blocks are tried, too."""
Regions = tuple[tuple[str, ...], ...]


class Tried(NamedTuple):
    """A choice with the bytes and the seconds of its step, as it was run where that is possible."""

    judged: Judged
    peak: int
    seconds: float


class CheckpointPlanner:
    """Makes plans for one model and batch under many budgets; the arguments are those of
    ``auto_checkpoint``.

    Ranks tell each other of errors in ``plan``, which all of them call.  A planner may be made on one rank
    alone, and tells nobody if it cannot be made.
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
        regions: bool = True,
        plugin: SharesModel | None = None,
        accumulates: bool = False,
        compiled: bool = False,
    ) -> None:
        switches = {"regions": regions, "accumulates": accumulates, "compiled": compiled}
        check_options(stored, autocast, optimizer, plugin, **switches)
        check_batch(batch, criterion)
        self._copies, self._groups = stored - 1, regions and not compiled
        self.blocks = find_blocks(model, blocks)
        place = next((p.device for p in model.parameters() if p.requires_grad), None)
        if place is None:
            raise ValueError(
                f"auto_checkpoint: no parameter of {type(model).__name__} is trained (requires_grad), so its"
                " step has no backward pass"
            )
        self.notes = look_at_optimizer(optimizer, model, criterion)
        preset = preset_of(device, place)
        self._beside = bytes_of_option("reserved", reserved)
        self._plugin, share = plugin, None if plugin is None else plugin.share_of(model, optimizer)
        self.step = TrainingStep(
            model,
            batch,
            criterion,
            optimizer if share is None else None,
            autocast,
            self._beside + preset.workspace,
            preset,
            share,
            accumulates,
            compiled,
        )
        self.place = place
        self._measures = whether_measured(measure, place, plugin, compiled=compiled)
        self._look_at_kernels()
        with none_left_on_meta(model) as ours:
            self.played = self._play_all()
            ours += [line.inputs for line in self.played.values()]

    def _look_at_kernels(self) -> None:
        """LSTMs and their like are one kernel on each device, and many operations on the meta device."""
        kind = next((type(m).__name__ for m in self.step.model.modules() if isinstance(m, nn.RNNBase)), None)
        if kind is None or self._measures:
            return
        if self.place.type == "cpu" and self.step.device is DEVICES["cpu"]:
            self.step.is_played = False
            self.notes.append(f"{kind} has a kernel of its own on the CPU, so steps were run there")
        else:
            self.notes.append(
                f"{kind} has a kernel of its own on a GPU, whose bytes only a run there shows; leave room"
            )

    def _play_all(self) -> dict[str, StepTimeline]:
        """A step with all blocks in each mode."""
        played: dict[str, StepTimeline] = {}
        for mode in MODES:
            if mode == "offload" and (self.step.compiled or self.step.device is DEVICES["cpu"]):
                continue  # a compiler does not see it; or the device is the host
            try:
                if self._learns(mode):
                    self._play(dict.fromkeys(self.blocks, mode))
                line = (self._play if played else self._play_or_run)(dict.fromkeys(self.blocks, mode))
            except StatesError:
                raise
            except Exception as error:
                if mode == "keep":
                    raise self._does_not_fit(error) from error
                self.notes.append(f"mode {mode!r} is not used: {error}")
                continue
            if played and line.calls != played["keep"].calls:
                self.notes.append(f"mode {mode!r} is not used: the blocks are called in another order")
                continue
            played[mode] = line
        if unused := [name for name in self.blocks if name not in played["keep"].calls]:
            self.notes.append(
                f"{len(unused)} blocks, such as {unused[0]!r}, were not called in the step that was played;"
                " they keep everything, and a step that calls them needs more"
            )
        self.blocks = {name: b for name, b in self.blocks.items() if name in played["keep"].calls}
        return played

    def _learns(self, mode: str) -> bool:
        """Whether the first step with all blocks in ``mode`` differs from those that follow: it shows which
        products a second run does not need, and which blocks leave their inputs alone.
        """
        known = all(can_be_grouped(block) for block in self.blocks.values())
        return mode == "selective" or (mode == "full" and not known)

    def _does_not_fit(self, error: Exception) -> ValueError:
        return ValueError(
            f"auto_checkpoint: {type(self.step.model).__name__} cannot compute a loss of this batch: {error}"
        )

    def _play_or_run(self, modes: dict[str, str]) -> StepTimeline:
        """A step on the meta device, or where the model is if it needs values."""
        if not self.step.is_played:
            return self._play(modes)
        ways = WaysOfStep(self.step, partial(self._play, modes))
        if not ways.values_decide:
            self.notes += [
                f"a value is read, and was taken for 0 in the plan, at {read}" for read in ways.first.reads
            ]
            return ways.first
        if (found := self._run_where_it_is(modes, ways)) is not None:
            self.notes.append(
                f"values decide at {ways.line}; so steps were run on {self.place} instead of the meta"
                " device, and bytes counted there; a batch with other values may need more"
            )
            return found
        found = ways.larger
        self.notes.append(
            f"values decide at {ways.line}; they were taken for {self.step.read_as} in the plan, the way that"
            " needs more; a step in which they are large numbers may need more than that"
        )
        return found

    def _run_where_it_is(self, modes: dict[str, str], ways: WaysOfStep) -> StepTimeline | None:
        """A real step, after which all others are real ones, too; None where there cannot be one, or where
        it needs no more than a play.
        """
        is_trained_here = (self.place.type == "cpu") == (self.step.device is DEVICES["cpu"])
        if self.place.type == "meta" or (ways.are_known and not is_trained_here):
            return None  # a step of a model for another device may take minutes here, or not fit
        self.step.is_played = False
        try:
            found = self._play(modes)
        except Exception:
            self.step.is_played = True
            return None
        if ways.are_known and found.peak <= ways.larger.peak:
            self.step.is_played = True
            return None  # values of another batch, or random numbers, may decide for the play
        return found

    def _play(self, modes: dict[str, str], regions: Sequence[Sequence[str]] = ()) -> StepTimeline:
        with block_modes(self.step.model, modes, regions), attributes_kept(self.step.criterion):
            return self.step.play(self.blocks)

    @cached_property
    def measured(self) -> Measured:
        """What runs on the GPU have shown of each call in each mode."""
        if not self._measures or self.step.compiled:  # blocks that are compiled alone are not those of a step
            return {}
        return measure_calls(self.step, self.blocks, self.played)

    @cached_property
    def runs(self) -> StepRuns:
        """Steps on the GPU; there are none where nothing is measured."""
        modes = tuple(self.played) if self._measures else ()
        return StepRuns(self.step, self.played, self.measured, self._beside, modes)

    @property
    def unseen(self) -> int:
        """Bytes that runs on the GPU needed beyond those that were played."""
        return self.runs.unseen

    @cached_property
    def problem(self) -> ModeProblem:
        """Costs of all modes of all blocks.

        Blocks that run alone take longer than in a step, where the host prepares the next one meanwhile: so
        their times only say how the time of a step is shared out.  A mode whose step does not fit is taken
        for as much slower or faster as its blocks alone are.
        """
        problem = replace(make_problem(self.played, self.step.device, self.measured), copies=self._copies)
        if not (wholes := self.runs.wholes):
            if self._measures:
                self.notes.append("no step fitted on the GPU: times and bytes of the whole are predicted")
            return problem
        known = self._smallest if self._smallest in wholes else next(iter(wholes))
        times = {mode: found.seconds for mode, found in wholes.items()}
        if "keep" in times and not self.step.compiled:
            times["keep"] = min(times.values())  # what seems faster is noise of the host
        stages = shared_out(problem.stages, times, known)
        seconds = self.played[known].step.seconds + (0.0 if stages else wholes[known].seconds)
        problem = replace(problem, stages=stages, seconds=seconds)
        return scaled_to(problem, {m: self._alike_peak(m) for m in wholes}) if self.step.compiled else problem

    @property
    def _smallest(self) -> str:
        return "full" if "full" in self.played else "keep"

    @property
    def whole(self) -> int:
        """The bytes of a step that computes nothing again."""
        return self._alike("keep").peak + self.unseen

    @property
    def least(self) -> tuple[list[str], StepTimeline, int]:
        """The modes that need the least memory, their step, and its peak with all that is needed."""
        judged, peak, _ = self._least
        return judged.choice.modes, judged.line, peak

    @cached_property
    def _least(self) -> Tried:
        tried = [self._tried(self.search.least), *(self._tried(one) for one in self.search.alike)]
        return min(tried, key=lambda one: one.peak)

    @cached_property
    def search(self) -> Search:
        """Solvers, with all costs."""
        shares = self._groups and not self._copies and {"keep", "full"} <= self.played.keys()
        inner = inner_costs(self.played, self.measured) if shares else None
        if inner is not None:
            calls = self.played["keep"].calls
            groups = [can_be_grouped(self.blocks[name]) for name in calls]
            inner = [cost._replace(groups=may) for cost, may in zip(inner, groups, strict=True)]
        alike = [self._alike(mode) for mode in self.played]
        return Search(
            self.problem, self.measured, alike, inner, self._judge, plays_tell=not self.step.compiled
        )

    def _alike(self, mode: str) -> Judged:
        """A step with one mode for all blocks; its peak is the one on the GPU where it was run there."""
        line, peak = self.played[mode], self._alike_peak(mode)
        modes = [mode] * len(line.calls)
        return Judged(Choice(modes, seconds_of(self.problem, modes), peak), line, peak)

    def _alike_peak(self, mode: str) -> int:
        line = self.played[mode]
        if mode in self.runs.wholes and not self._copies:
            return max(self.runs.peak_of(self.runs.wholes[mode]) - self.unseen, line.step.peak)
        return peak_of_step(line, [mode] * len(line.calls), self.measured, self._copies)

    def plan(self, memory: int | str, time_limit: float = 10.0) -> CheckpointPlan:
        """The fastest modes with which the step stays within ``memory``; every rank of a job calls it."""
        try:
            budget = bytes_of_option("memory", memory)
            if not isinstance(time_limit, (int, float)) or not time_limit > 0:
                raise ValueError(
                    f"auto_checkpoint: time_limit is a number of seconds above 0, got {time_limit!r}"
                )
            resting = self._resting(budget)
            judged, peak, seconds = self._find(budget - resting, time_limit)
        except Exception as error:
            tell_error(error)
            raise
        modes, regions = self._agree(self._by_block(judged.choice))
        return CheckpointPlan(
            model=self.step.model,
            budget=budget,
            peak=peak + resting,
            seconds=seconds + self._travel(resting),
            gap=judged.choice.gap,
            modes=modes,
            timeline=judged.line,
            regions=regions,
            reserved=self.step.reserved + self.unseen,
            notes=tuple(self.notes),
            planner=self,
            resting=resting,
        )

    def _resting(self, budget: int) -> int:
        """How many of the bytes that may rest on the host or on the device had best lie on the device: what
        activations then must be computed again takes time, and so does what travels.
        """
        share = self.step.share
        if share is None or not share.movable:
            return 0
        found = [(float("inf"), 0)]
        for part in range(_PARTS + 1):
            resting = share.movable * part // _PARTS
            if budget - resting < self.least[2]:
                break
            choice = self.search.predicted(budget - resting - self.unseen)
            if choice is not None:
                found.append((choice.seconds + self._travel(resting), resting))
        return min(found)[1]

    def _travel(self, resting: int) -> float:
        """Seconds in which weights and gradients go to the host and come back, if so many bytes do not."""
        share = self.step.share
        return 0.0 if share is None else share.travels * (share.movable - resting) / self.step.device.host

    def _find(self, budget: int, time_limit: float) -> Tried:
        """The best choice with which a step, also one that is run on the GPU, stays within ``budget``."""
        tried = self._tries(budget, time_limit)
        if any(
            one.judged.choice.regions and one.seconds > _SLOWER * one.judged.choice.seconds for one in tried
        ):
            tried += self._tries(budget, time_limit, regions=False)
        # a mixture may take longer than its modes for all blocks, whose steps were run, let expect
        tried += [self._tried(one) for one in self.search.alike if one.peak + self.unseen <= budget]
        cuts = [one for one in self._cuts if one.line.peak + self.runs.least_unseen <= budget]
        tried += [self._tried(one) for one in sorted(cuts, key=lambda one: one.choice.seconds)[:2]]
        fits = [one for one in tried if one.peak <= budget]
        if not fits:
            return self._least_within(budget)
        fastest = min(fits, key=lambda one: one.seconds)
        if not self._measures or self.step.compiled:  # what is compiled may be faster when it keeps less
            return fastest
        # to compute less again takes no longer: where runs say so, only the host was slower meanwhile
        less = [one for one in fits if does_no_more(one.judged.choice, fastest.judged.choice)]
        return min(less, key=lambda one: one.judged.choice.seconds)

    @cached_property
    def _cuts(self) -> list[Judged]:
        """Chen's segments, few and many: where steps are run, they may show that costs were not right."""
        if not self.runs.wholes or not self._groups:
            return []
        cuts = CheckpointSolverChen(self.chain()).cuts()
        return self.search.segmented({tuple(cut): cut for cut in cuts if len(cut) > 1}.values())

    def _tries(self, budget: int, time_limit: float, *, regions: bool = True) -> list[Tried]:
        """Choices for less and less, or more, until the step of one just stays within ``budget``; the first
        leaves room for what plays do not show.
        """
        left, low, high = budget - self.unseen, 0, 2 * budget
        tried: list[Tried] = []
        for _ in range(_TRIES):
            judged = self.search.find(left, time_limit, regions=regions)
            is_known = any(judged is not None and judged.choice == one.judged.choice for one in tried)
            if judged is None or (is_known and high - low < budget // 50):
                break
            tried.append(self._tried(judged))
            room = budget - tried[-1].peak
            if 0 <= room < budget // 50 or not self.runs.wholes:
                break
            low, high = (max(low, left), high) if room >= 0 else (low, min(high, left))
            left += room  # more than was needed, or less
            if not low < left < high:
                left = (low + high) // 2
        return tried

    def _tried(self, judged: Judged) -> Tried:
        """A choice with the peak and the seconds of its step; those of a real one, where it can be run."""
        choice, peak = judged.choice, judged.peak + self.unseen
        if not self._measures or self._copies or not choice.modes or dist_size() > 1:
            return Tried(judged, peak, choice.seconds)
        whole = self.runs.run(*self._by_block(choice))
        if whole is None:
            return Tried(judged, peak, choice.seconds)
        line = judged.line
        stepped = line.step.peak + (0 if self.step.compiled else self.unseen)
        return Tried(judged, max(self.runs.peak_of(whole), stepped), whole.seconds + line.step.seconds)

    def _least_within(self, budget: int) -> Tried:
        judged, peak, _ = self._least
        if peak > budget:
            static = judged.line.weights + judged.line.states + self.step.reserved
            raise ValueError(
                f"auto_checkpoint: memory={budget} ({size_text(budget)}) is below the least that recomputing"
                f" and offloading blocks reach, {peak} ({size_text(peak)}), of which {size_text(static)} are"
                " weights, states and what is reserved; give more, take a smaller batch, or shard the model"
            )
        return self._least

    def _judge(self, choice: Choice) -> Judged:
        line = self._play(*self._by_block(choice))
        if line.calls != self.played["keep"].calls:
            raise ValueError(
                f"auto_checkpoint: {type(self.step.model).__name__} does not call the same blocks in every"
                " step, so no plan bounds them; let it call all of them while the plan is made"
            )
        if self.step.compiled:
            return Judged(choice, line, peak_of(self.problem, choice.modes))
        peak = peak_of_step(line, choice.modes, self.measured, self._copies)
        return Judged(choice, line, peak)

    def _by_block(self, choice: Choice) -> tuple[dict[str, str], Regions]:
        """The modes and the regions by the names of the blocks."""
        calls = self.played["keep"].calls
        regions = tuple(tuple(calls[first:stop]) for first, stop in choice.regions)
        return dict(zip(calls, choice.modes, strict=True)), regions

    def _agree(self, chosen: tuple[dict[str, str], Regions]) -> tuple[dict[str, str], Regions]:
        """The modes and regions that ranks with the same blocks share, who communicate when they recompute;
        raises where another rank has an error.
        """
        blocks = self.blocks.items()
        look = [(name, [tuple(p.shape) for p in block.parameters()]) for name, block in blocks]
        every = tell(Told(look, chosen))
        return next(told.chosen for told in every if told.look == look)

    def apply(self, plan: CheckpointPlan) -> None:
        """Give the blocks of the model the modes of ``plan``, and what these leave to the plugin."""
        set_modes(self.step.model, plan.modes, plan.regions)
        share = self.step.share
        if self._plugin is not None and share is not None and share.movable:
            self._plugin.take_room(plan.budget - plan.peak + plan.resting + share.fixed)

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
        ahead = [span.seconds for span in forward]
        if "full" in self.played:
            longer = [longer_first(self.played, i, self.measured) for i in range(len(stages))]
            ahead = [again_in(stage) * more for stage, more in zip(stages, longer, strict=True)]
        inputs = [_largest(given) for given in line.inputs]
        kept = [stage.costs["keep"].kept for stage in stages]
        return Chain(
            ahead,
            [max(0.0, s.costs["keep"].seconds - f) for s, f in zip(stages, ahead, strict=True)],
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
            choice = self.search.predicted(budget - self.unseen)
            if choice is not None:
                found.append(CurvePoint(budget, choice.peak + self.unseen, choice.seconds))
        return found


def _largest(inputs: Any) -> int:
    """The bytes of the largest tensor among the arguments of a call: what comes from the block before."""
    return max((like.nbytes for like in held(inputs, Like)), default=0)
