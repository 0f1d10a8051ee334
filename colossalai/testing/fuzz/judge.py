"""Compares a plan with the serial model: references, tolerances, and the verdict of a case."""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colossalai.booster import Booster
from colossalai.checkpoint_io.files.training import load_checkpoint
from colossalai.testing.fuzz.cases import Case
from colossalai.testing.fuzz.plans import PlanSpec
from colossalai.testing.fuzz.pool import RankAnswer, RankPool, Task, TaskResult, load_text
from colossalai.testing.fuzz.script import case_text, cuts_of

Log = list[tuple[str, int, Any]]
EQUAL, REFUSED, UNSTABLE, DIFFERENT, CRASHED, HANG, DISAGREE, BROKEN = (
    "equal",
    "refused",
    # rounding alone takes serial runs apart: the plan ran to its end, and its numbers say nothing
    "unstable",
    "different",
    "crashed",
    "hang",
    "disagree",
    "broken",  # the serial model itself raises: the fault of the fuzzer
)
FAILURES = (DIFFERENT, CRASHED, HANG, DISAGREE, BROKEN)


@dataclass
class CaseVerdict:
    """The outcome of a case, and the evidence."""

    outcome: str
    message: str = ""
    details: str = ""

    @property
    def failed(self) -> bool:
        return self.outcome in FAILURES

    @property
    def headline(self) -> str:
        """The message without its numbers, for counting."""
        return _kind(self.message)[:160]

    @property
    def kind(self) -> str:
        """What stays the same while a failure is made smaller: how it failed, and for exceptions which
        one.
        """
        if self.outcome in (DIFFERENT, HANG):
            return self.outcome
        return f"{self.outcome}: {_kind(self.message.partition(': ')[2])[:40]}"


@dataclass
class Reference:
    """The log of the serial model, and its states at the saves."""

    log: Log = field(default_factory=list)
    snaps: dict[str, tuple[dict[str, Any], dict[Any, Any]]] = field(default_factory=dict)
    margin: float = 1.0  # of the closest decision of a branch, relative to what it adds up


@dataclass
class Noise:
    """The distance of serial runs by rounding alone: in fp32 a number, in half precision a run under
    autocast.
    """

    fine: float
    coarse: Reference | None
    exact: Reference

    @property
    def is_too_large(self) -> bool:
        """Whether a comparison says nothing, as where the losses of a training that diverges are off by
        themselves.
        """
        if self.coarse is None:
            return self.fine > 1e-3
        flips = min(self.coarse.margin, self.exact.margin) < 0.004  # half precision may take the other branch
        return self.fine > 1e-3 or flips or _log_distance(self.coarse, self.exact) > 0.02

    def of_weight(self, snap: str, key: str) -> float:
        """The norm of what half precision changes of a weight."""
        if self.coarse is None:
            return 0.0
        return _norm_between(self.coarse.snaps[snap][0][key], self.exact.snaps[snap][0][key])

    def of_logged(self, step: int, key: str, exact: Tensor) -> float:
        """The norm of what half precision changes of a weight that is read after ``step``."""
        if self.coarse is None:
            return 0.0
        values = [v for what, at, v in self.coarse.log if (what, at) == ("weights", step)]
        return _norm_between(values[0][key], exact)

    def of_state(self, snap: str, number: Any, key: str) -> float:
        """The norm of what half precision changes of a state of the optimizer."""
        if self.coarse is None:
            return 0.0
        found, exact = (run.snaps[snap][1].get(number, {}).get(key) for run in (self.coarse, self.exact))
        return _norm_between(found, exact) if found is not None and exact is not None else 0.0


class Pools:
    """A pool for each number of ranks, made when it is needed and renewed after failures."""

    def __init__(self, prepare: Any = None, limit: float = 20.0) -> None:
        self.limit = limit
        self._prepare = prepare
        self._pools: dict[int, RankPool] = {}

    def run(self, ranks: int, task: Task) -> TaskResult:
        if ranks not in self._pools:
            self._pools[ranks] = RankPool(ranks, self._prepare)
        pool = self._pools[ranks]
        result = pool.run(task, self.limit)
        clean = all(answer is not None and answer.error is None for answer in result.answers)
        if not clean or pool.tasks >= 40:
            self.drop(ranks)
        return result

    def drop(self, ranks: int) -> None:
        if ranks in self._pools:
            self._pools.pop(ranks).close()

    def close(self) -> None:
        for ranks in list(self._pools):
            self.drop(ranks)


def run_case(case: Case, pools: Pools) -> CaseVerdict:
    """Train the serial model and the plans of ``case``, and compare."""
    text = case_text(case)
    functions = load_text(text)
    folder = tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    try:
        try:
            noise, references = _references(case, functions)
        except Exception as error:
            return CaseVerdict(BROKEN, f"the serial model raises {type(error).__name__}: {error}", text)
        logs: dict[str, list[Log]] = {}
        for name, plan in zip(("plan_a", "plan_b"), case.plans, strict=False):
            result = pools.run(plan.ranks, Task(text, name, folder))
            verdict = _end_of(result, name, plan)
            if verdict is not None:
                return verdict
            logs[name] = [answer.log for answer in result.answers if answer is not None]
            problem = _compare(case, name, plan, logs, references[name], noise, functions, folder)
            if problem:
                return CaseVerdict(DIFFERENT, f"{name}: {problem}", result.output)
        return CaseVerdict(UNSTABLE if noise.is_too_large else EQUAL)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _end_of(result: TaskResult, name: str, plan: PlanSpec) -> CaseVerdict | None:
    """The verdict of a run that did not end well."""
    answers = result.answers
    raised = [answer for answer in answers if answer is not None and answer.error is not None]
    if not raised and None not in answers:
        return None
    details = "\n".join(_told(rank, answer) for rank, answer in enumerate(answers))
    details += f"\n{result.stuck}\n{result.output}"
    if not raised:
        return CaseVerdict(HANG, f"{name}: {sum(a is None for a in answers)} ranks did not end", details)
    crash = next((answer for answer in raised if not answer.refusal), None)
    if None in answers or len(raised) < len(answers):
        waiting = "did not end" if None in answers else "went on"
        return CaseVerdict(DISAGREE, f"{name}: {raised[0].error}, while other ranks {waiting}", details)
    if crash is not None:
        told_by_another = any(a.refusal for a in raised) and "pipeline stage" in str(crash.error)
        if not told_by_another:
            return CaseVerdict(CRASHED, f"{name}: {crash.error}", details)
    refusals = [a for a in raised if a.refusal]
    # stages have different layers, so each may have a reason of its own; and each rank may say what it does
    # itself
    if plan.pipeline == 1 and len({_kind(str(a.error))[:60] for a in refusals}) > 1:
        texts = " | ".join(str(a.error) for a in refusals)
        return CaseVerdict(DISAGREE, f"{name}: ranks refuse differently: {texts}", details)
    return CaseVerdict(REFUSED, str(refusals[0].error), details)


def _told(rank: int, answer: RankAnswer | None) -> str:
    if answer is None:
        return f"rank {rank} did not answer"
    return f"rank {rank}: {answer.error or 'done'}\n{answer.traceback}"


def _kind(message: str) -> str:
    """A refusal without its numbers, and without who of the others has told it."""
    first = re.sub(r"[0-9]+", "#", message.split("\n")[0])
    return re.sub(r"^\w+: rank # could not (load|save): ", "", first)


# Comparisons


def _references(case: Case, functions: dict[str, Any]) -> tuple[Noise, dict[str, Reference]]:
    """The serial run that each plan is compared with; and how far rounding alone takes serial runs apart."""
    cuts = {"plan_a": cuts_of(case, case.a)}
    if case.b is not None:
        cuts["plan_b"] = cuts["plan_a"][: case.save_at] + cuts_of(case, case.b)[case.save_at :]
    parts = {name: _serial(functions, each) for name, each in cuts.items()}
    last = list(cuts)[-1]
    fine = _distance(parts[last], _serial(functions, cuts[last], jitter=True))
    coarse = None
    if case.half:
        # a cache would keep the weights of the first step for the whole run
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            coarse = _serial(functions, cuts[last])
    if not case.model.by_parts:
        whole = _serial(functions, [(1, 1)] * case.steps)
        fine = max(fine, *(_distance(whole, other) for other in parts.values()))
        parts = dict.fromkeys(parts, whole)
    return Noise(fine, coarse, parts[last]), parts


def _serial(functions: dict[str, Any], cuts: list[tuple[int, int]], *, jitter: bool = False) -> Reference:
    """One serial run; with ``jitter`` the initial weights are off by a rounding error."""
    found = Reference()
    build = functions["build"]

    def watched(seed: int) -> Any:
        model = build(seed)
        for module in model.modules():
            if type(module).__name__ == "Branch":
                module.register_forward_pre_hook(decide)
        with torch.no_grad():
            for p in model.parameters() if jitter else ():
                p.mul_(1 + 1e-7 * torch.randn_like(p).sign())
        return model

    def decide(_: Any, args: tuple[Tensor, ...]) -> None:
        total = args[0].detach().double()
        found.margin = min(found.margin, (total.sum().abs() / total.abs().sum().clamp_min(1e-9)).item())

    def log(name: str, step: int, value: Any) -> None:
        found.log.append((name, step, value))

    def snap(name: str, model: Any, optimizer: Any) -> None:
        found.snaps[name] = _states(model, optimizer)

    functions["build"] = watched
    try:
        functions["serial"](log, snap, cuts)
    finally:
        functions["build"] = build
    return found


def _states(model: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Copies of the weights, and of the states of the optimizer by the number of the parameter."""
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    states = optimizer.state_dict()["state"]
    copied = {
        key: {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in state.items()}
        for key, state in states.items()
    }
    return weights, copied


def _distance(one: Reference, other: Reference) -> float:
    """The largest difference between two serial runs, relative to what is compared."""
    worst = 0.0
    for name, (weights, _) in one.snaps.items():
        for key, value in weights.items():
            worst = max(worst, _off(other.snaps[name][0][key], value))
    return max(worst, _log_distance(one, other))


def _log_distance(one: Reference, other: Reference) -> float:
    """The largest difference between the numbers that two serial runs have logged, relative to them."""
    pairs = [(a, b) for (_, _, a), (_, _, b) in zip(one.log, other.log, strict=True) if isinstance(a, float)]
    return max((abs(a - b) / (1 + abs(b)) for a, b in pairs), default=0.0)


def _off(value: Tensor, expected: Tensor) -> float:
    """How far ``value`` is from ``expected``: the largest difference, relative to 1 and to the expected
    element.
    """
    if value.shape != expected.shape:
        return float("inf")
    a, b = value.detach().double(), expected.detach().double()
    worst = ((a - b).abs() / (1 + b.abs())).max().item() if a.numel() else 0.0
    return float("inf") if worst != worst else worst


def _norm_between(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).norm().item()


@dataclass(frozen=True)
class Measure:
    """The tolerance of a plan: relative to the values, or in half precision to the distance that training
    moved them.
    """

    fine: float
    half: bool
    reach: float = 0.0  # the farthest that training moved any element of the model

    def problem(
        self, value: Tensor, expected: Tensor, start: Tensor | None = None, noise: float = 0.0
    ) -> str | None:
        if not self.half:
            off = _off(value, expected)
            return None if off <= self.fine else f"off by {off:.3g} (allowed {self.fine:.3g})"
        if value.shape != expected.shape:
            return f"shape {tuple(value.shape)} in the place of {tuple(expected.shape)}"
        a, b = value.detach().double(), expected.detach().double()
        moved = (b - start.double()).norm().item() if start is not None else b.norm().item()
        allowed = 0.15 * moved + 4 * noise + 0.005 * b.norm().item() + 5e-4 * b.numel() ** 0.5
        reach = self.reach * b.numel() ** 0.5
        if start is not None and 0 < moved < 0.1 * reach:
            # rounding is a large part of its gradient, or all of it (a bias before a norm), which Adam makes
            # as large as any other
            allowed += reach if moved < 1e-4 * b.numel() ** 0.5 else 0.3 * reach
        off = _norm_between(a, b)
        return (
            None
            if off <= allowed
            else f"off by {off:.3g} (norm; allowed {allowed:.3g}), where training moved it by {moved:.3g}"
        )


def _compare(
    case: Case,
    name: str,
    plan: PlanSpec,
    logs: dict[str, list[Log]],
    reference: Reference,
    noise: Noise,
    functions: dict[str, Any],
    folder: str,
) -> str | None:
    """The first difference between a plan and its reference."""
    if noise.is_too_large:
        return None
    half = plan.precision != "fp32" or (name == "plan_b" and case.half)
    start = functions["build"](0).state_dict()
    measure = Measure(5e-5 + 100 * noise.fine, half, _reach(start, reference.snaps["end"][0]))
    first = 0 if name == "plan_a" else case.save_at or 0
    expected = [entry for entry in reference.log if entry[1] >= first]
    if problem := _compare_logs(logs[name], expected, measure, start, noise):
        return problem
    saves = [("mid", "mid")] if name == "plan_a" and case.save_at is not None else []
    for file, snap in [*saves, (name, "end")]:
        problem = _compare_save(f"{folder}/{file}", snap, reference, measure, noise, start, functions)
        if problem:
            return f"checkpoint {file!r}: {problem}"
    if name == "plan_b" and case.b == case.a and not case.file:
        # on three ranks DDP adds in another order after its first pass
        return None if plan.plugin == "ddp" and plan.ranks > 2 else _same_bits(logs, first, folder, functions)
    return None


def _reach(start: dict[str, Tensor], end: dict[str, Tensor]) -> float:
    moved = (
        (end[k].double() - start[k].double()).abs()
        for k in start
        if start[k].is_floating_point() and k in end
    )
    return max((m.max().item() for m in moved if m.numel()), default=0.0)


def _compare_logs(
    logs: list[Log], expected: Log, measure: Measure, start: dict[str, Tensor], noise: Noise
) -> str | None:
    if any(len(log) != len(expected) for log in logs):
        return f"logged {[len(log) for log in logs]} values where the serial model has {len(expected)}"
    for i, (what, step, value) in enumerate(expected):
        told = [log[i] for log in logs]
        if any(entry[:2] != (what, step) for entry in told):
            return f"logged {[e[:2] for e in told]} in the place of {(what, step)}"
        found = [entry[2] for entry in told if entry[2] is not None]
        if what == "weights":
            for key, tensor in value.items():
                rounding = noise.of_logged(step, key, tensor)
                told_of = found[0].get(key, torch.empty(0))
                if problem := measure.problem(told_of, tensor, start.get(key), rounding):
                    return f"weight {key!r} read after step {step} {problem}"
            continue
        # replicas have parts of a batch; of layers with statistics of their own, the first is the one that
        # counts
        number = sum(found) / len(found) if what == "loss" else found[0]
        allowed = (measure.fine if not measure.half else 2e-2) * (1 + abs(value))
        if not abs(number - value) <= allowed:
            return f"{what} of step {step} is {number:.7g}, serial {value:.7g}"
    return None


def _compare_save(
    path: str,
    snap: str,
    reference: Reference,
    measure: Measure,
    noise: Noise,
    start: dict[str, Tensor],
    functions: dict[str, Any],
) -> str | None:
    expected = reference.snaps[snap]
    try:
        weights, states = read_save(path, functions)
    except (RuntimeError, ValueError, OSError, KeyError) as error:
        return f"a run without a plan cannot load it: {error}"
    # a weight that half precision has not trained yet may have its other digits and nothing else
    states = {number: state for number, state in states.items() if set(state) != {"master"}}
    for key, value in expected[0].items():
        if problem := measure.problem(weights[key], value, start.get(key), noise.of_weight(snap, key)):
            return f"weight {key!r} {problem}"
    # Adagrad's constructor makes states of frozen weights too; a plan that does not hold those has nothing to
    # save
    wanted = {n: state for n, state in expected[1].items() if n in states or n not in _frozen(functions)}
    if sorted(states) != sorted(wanted):
        return f"optimizer states of the parameters {sorted(states)}, serial {sorted(wanted)}"
    for number, state in wanted.items():
        names = sorted(set(states[number]) - {"master"})  # the digits that half precision lacks
        if names != sorted(state):
            return f"states of parameter {number}: {names}, serial {sorted(state)}"
        for key, value in state.items():
            found = states[number][key]
            if isinstance(value, Tensor) and key != "step":
                # of a weight before a norm the gradient is nothing but rounding, compared with those of other
                # weights
                rounding = 0.005 * _largest(wanted, key) * value.numel() ** 0.5 if measure.half else 0.0
                rounding += noise.of_state(snap, number, key)
                if problem := measure.problem(found, value, noise=rounding):
                    return f"state {key!r} of parameter {number} {problem}"
            elif value is not None and found is not None and float(found) != float(value):
                return f"state {key!r} of parameter {number} is {found}, serial {value}"
    return None


def _largest(states: dict[Any, dict[str, Any]], key: str) -> float:
    found = [
        s[key].abs().max().item()
        for s in states.values()
        if isinstance(s.get(key), Tensor) and s[key].numel()
    ]
    return max(found, default=0.0)


def _frozen(functions: dict[str, Any]) -> set[int]:
    """The numbers, in the optimizer, of the parameters that are not trained."""
    groups = functions["make_optimizer"](functions["build"](0)).param_groups
    params = [p for group in groups for p in group["params"]]
    return {number for number, p in enumerate(params) if not p.requires_grad}


def read_save(path: str, functions: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A checkpoint of ``booster.save`` or ``save_checkpoint``, loaded by a run without a plan."""
    model = functions["build"](9)
    optimizer = functions["make_optimizer"](model)
    if Path(path).is_file():
        load_checkpoint(path, model, optimizer)
        return _states(model, optimizer)
    booster = Booster(device="cpu")
    boosted = booster.boost(model, optimizer)
    booster.load(path, strict=True)
    return _states(boosted.model, boosted.optimizer)


def _same_bits(logs: dict[str, list[Log]], first: int, folder: str, functions: dict[str, Any]) -> str | None:
    """Under the same plan, a run that went on from a checkpoint has the numbers of the one that was not
    interrupted.
    """
    for rank, (a, b) in enumerate(zip(logs["plan_a"], logs["plan_b"], strict=True)):
        later = [entry for entry in a if entry[1] >= first]
        for (what, step, x), (_, _, y) in zip(later, b, strict=True):
            # each rank has statistics of its own, of which the first one's are saved
            if isinstance(x, float) and x != y and (what != "evaluation" or rank == 0):
                return f"resumed under the same plan, {what} of step {step} is {y!r}, without a break {x!r}"
    one, other = read_save(f"{folder}/plan_a", functions), read_save(f"{folder}/plan_b", functions)
    for key, value in one[0].items():
        if not torch.equal(value, other[0][key]):
            off = (value.double() - other[0][key].double()).abs().max().item()
            return (
                f"resumed under the same plan, weight {key!r} ends {off:.3g} away from a run without a break"
            )
    return None
