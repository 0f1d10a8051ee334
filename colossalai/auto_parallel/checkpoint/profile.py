"""Makes of a few played steps, one for each mode, what the choice of modes costs in bytes and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.utils._pytree import tree_leaves

from colossalai.auto_parallel.checkpoint.mode_solver import (
    ModeCost,
    ModeProblem,
    ModeStage,
    peak_of,
    pieces_of,
)
from colossalai.auto_parallel.checkpoint.region_solver import InnerCost
from colossalai.auto_parallel.checkpoint.timeline import Like, Span, StepTimeline
from colossalai.device.presets import DevicePreset


@dataclass(frozen=True)
class CallCost:
    """What was measured of one call in one mode: seconds, bytes beyond those that were predicted, and, with
    ``keep``, the seconds of its forward pass.
    """

    seconds: float
    forward: int = 0
    backward: int = 0
    ahead: float = 0.0


Measured = Mapping[tuple[int, str], CallCost]
_NOISE = 1.03


def make_problem(
    played: Mapping[str, StepTimeline], device: DevicePreset, measured: Measured | None = None
) -> ModeProblem:
    """The costs of all modes, from a timeline of a step with all blocks in that mode.

    A stage keeps what is freed by its backward pass; of tensors that live only until the end of the forward
    pass (casts of autocast) the most is taken for all modes.
    """
    first = played["keep"]
    kept = {
        mode: [_kept(line, first, call) for call in range(len(first.calls))] for mode, line in played.items()
    }
    stages = []
    for call, name in enumerate(first.calls):
        before = {mode: sum(kept[mode][:call]) for mode in played}
        ground = max(line.forward[call].start - before[mode] for mode, line in played.items())
        costs = {}
        for mode, line in played.items():
            forward, backward = line.forward[call], line.backward.get(call, Span())
            costs[mode] = ModeCost(
                kept[mode][call],
                ground + forward.peak - forward.start,
                backward.peak - before[mode],
                forward.seconds + backward.seconds + _travel(line, call, mode, device),
                kept["full"][call] if mode == "offload" and "full" in played else None,
            )
        between = max(
            line.between[call].peak - before[mode] - kept[mode][call] for mode, line in played.items()
        )
        stages.append(ModeStage(name, _with_measured(costs, call, measured or {}), between))
    rest = first.before.seconds + sum(piece.seconds for piece in first.between) + first.step.seconds
    return ModeProblem(stages, max(max(p.before.peak, p.step.peak) for p in played.values()), rest)


def inner_costs(played: Mapping[str, StepTimeline], measured: Measured | None = None) -> list[InnerCost]:
    """What each call needs inside of a region of several."""
    keep, full = played["keep"], played["full"]
    found, before = [], 0
    for call in range(len(keep.calls)):
        kept = _kept(keep, keep, call)
        before += kept
        backward = keep.backward.get(call, Span())
        forward, passed = keep.forward[call], full.forward[call]
        seen = (measured or {}).get((call, "keep"), CallCost(0.0))
        found.append(
            InnerCost(
                _kept(full, keep, call),
                kept,
                backward.start - before if call in keep.backward else keep.weights,
                forward.peak - forward.start + seen.forward,
                passed.peak - passed.start + seen.forward,
                backward.peak - backward.start + seen.backward,
                longer_first(played, call, measured),
            )
        )
    return found


def longer_first(played: Mapping[str, StepTimeline], call: int, measured: Measured | None = None) -> float:
    """How many times as long a whole forward pass takes as what mode ``full`` computes again, which ends
    before a product at the end.
    """
    if measured:
        forward = measured[call, "keep"].ahead
        keep, full = (measured[call, mode].seconds for mode in ("keep", "full"))
    else:
        forward = played["keep"].forward[call].seconds
        keep, full = (
            line.forward[call].seconds + line.backward.get(call, Span()).seconds
            for line in (played["keep"], played["full"])
        )
    longer = forward / (full - keep) if full > keep else 1.0
    return min(2.0, longer) if longer > _NOISE else 1.0


def _travel(line: StepTimeline, call: int, mode: str, device: DevicePreset) -> float:
    """Seconds in which inputs of a call that are offloaded go to the host and come back."""
    if mode != "offload":
        return 0.0
    likes = tree_leaves(line.inputs[call][0], is_leaf=lambda leaf: isinstance(leaf, Like))
    return 2 * sum(like.nbytes for like in likes if isinstance(like, Like)) / device.host


def _kept(line: StepTimeline, first: StepTimeline, call: int) -> int:
    """Bytes that a call keeps: measured in the backward pass, relative to the mode that keeps all."""
    pair = {call, call - 1}
    if pair <= line.backward.keys() and pair <= first.backward.keys():
        freed, freed_first = (b[call].start - b[call - 1].start for b in (line.backward, first.backward))
        return _kept_forward(first, call) + freed - freed_first
    return _kept_forward(line, call)


def _kept_forward(line: StepTimeline, call: int) -> int:
    after = line.forward[call + 1] if call + 1 < len(line.forward) else line.between[call]
    return after.start - line.forward[call].start


def _with_measured(costs: dict[str, ModeCost], call: int, measured: Measured) -> dict[str, ModeCost]:
    found = {}
    for mode, cost in costs.items():
        seen = measured.get((call, mode), CallCost(cost.seconds))
        found[mode] = cost._replace(
            forward=cost.forward + seen.forward,
            backward=cost.backward + seen.backward,
            seconds=seen.seconds,
        )
    return found


def shared_out(stages: list[ModeStage], steps: Mapping[str, float], known: str) -> list[ModeStage]:
    """``stages`` with the seconds of ``steps``, of which each has all blocks in one mode, shared out among
    them as their own seconds are.  A mode without a step is taken for as much slower or faster than the mode
    ``known`` as its blocks are.
    """
    if not stages:
        return stages
    alone = {mode: sum(stage.costs[mode].seconds for stage in stages) for mode in stages[0].costs}
    factors = {mode: steps.get(mode, 0.0) / total for mode, total in alone.items()}
    factors |= {mode: factors[known] for mode in alone if mode not in steps}
    return [
        replace(
            stage,
            costs={
                mode: cost._replace(seconds=cost.seconds * factors[mode])
                for mode, cost in stage.costs.items()
            },
        )
        for stage in stages
    ]


def scaled_to(problem: ModeProblem, peaks: Mapping[str, int]) -> ModeProblem:
    """``problem`` with all that blocks keep in a mode made so much less, or more, that a step with all blocks
    in this mode has the peak that ``peaks`` tells.
    """
    stages, count = problem.stages, len(problem.stages)
    for mode, peak in peaks.items():
        kept = sum(stage.costs[mode].kept for stage in stages)
        excess = min(peak_of(problem, [mode] * count) - peak, kept)
        scaled = []
        for stage in stages:
            cost = stage.costs[mode]
            less = excess * cost.kept // max(1, kept)
            new = cost._replace(
                kept=cost.kept - less, forward=cost.forward - less, backward=cost.backward - less
            )
            scaled.append(replace(stage, costs={**stage.costs, mode: new}))
        stages = scaled
    return replace(problem, stages=stages)


def corrected(
    problem: ModeProblem, modes: list[str], judged: StepTimeline, measured: Measured
) -> ModeProblem:
    """``problem`` with the peaks of every piece moved to where they were when a step with ``modes`` was
    played.
    """
    stages = []
    for call, (stage, peaks) in enumerate(zip(problem.stages, pieces_of(problem, modes), strict=True)):
        extra = measured.get((call, modes[call]), CallCost(0.0))
        forward = judged.forward[call].peak + extra.forward - peaks[0]
        between = judged.between[call].peak - peaks[1]
        backward = judged.backward[call].peak + extra.backward - peaks[2] if call in judged.backward else 0
        costs = {
            mode: cost._replace(forward=cost.forward + forward, backward=cost.backward + backward)
            for mode, cost in stage.costs.items()
        }
        stages.append(replace(stage, costs=costs, between=stage.between + between))
    return replace(problem, stages=stages)


def peak_of_step(judged: StepTimeline, modes: list[str], measured: Measured, copies: int = 0) -> int:
    """The peak of a played step, with what was measured beyond, and other micro-batches that are kept."""
    pieces = [judged.before.peak, judged.step.peak, *(piece.peak for piece in judged.between)]
    for call, mode in enumerate(modes):
        extra = measured.get((call, mode), CallCost(0.0))
        pieces.append(judged.forward[call].peak + extra.forward)
        if call in judged.backward:
            pieces.append(judged.backward[call].peak + extra.backward)
    kept = judged.between[-1].start - judged.before.start if judged.between else 0
    return max(pieces) + copies * kept
