"""Activation checkpointing under a budget, on a GPU: ``auto_checkpoint`` beside its own predictions and its
rivals at the same peak.

    python -m benchmarks.activation_checkpointing --batches 1 --budgets 4
    python -m benchmarks.activation_checkpointing --compiled --models gpt2 llama --layers 4
    python -m benchmarks.activation_checkpointing --xl [--eager]

The first form measures steps (a forward and a backward pass) under budgets between the least that is possible
and all that is needed, then with all blocks recomputed and with Chen's segments, and ours with the bytes that
these took.  ``--compiled`` compares with torch's ``activation_memory_budget``, all compiled; ``--xl`` trains
GPT-2 XL of transformers and that of our zoo.  Every row is printed when it is known, what is under way says
after each half minute how long it has taken and how many bytes it needed so far, and a case that fails does
not end the others.  ``--seconds`` ends a run in time, with the verdicts so far.  ``--small`` runs toys on a
CPU.  With one file in the environment variable ``TURNS``, several runs take turns on the GPU.
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import checkpointed_xl
from benchmarks.checkpointed_models import CASES, SMALL, Case
from benchmarks.visit import end_after, turn
from colossalai.auto_parallel.checkpoint import (
    CheckpointPlan,
    CheckpointPlanner,
    CheckpointSolverChen,
    measure,
)
from colossalai.auto_parallel.checkpoint.blocks import block_modes
from colossalai.auto_parallel.checkpoint.measure import fastest_row, nothing_collected, with_gaps
from colossalai.nn import chunk_causal_loss, skip_causal_mask
from colossalai.utils.memory.live_bytes import LiveBytes

GIB = 2**30
HALF_MINUTE = 30.0
PEAK_BAR, TIME_BAR, NOISE, GAPS = 0.05, 0.10, 0.02, 0.002
WARM = 2
VERDICTS: Counter[str] = Counter()


class Measured(NamedTuple):
    """The bytes at the worst moment of a step, 0 where they are not seen, and its seconds."""

    peak: int
    seconds: float

    def faster(self, other: Measured) -> Measured:
        """The faster of two runs of the same steps; the larger of their peaks."""
        return Measured(max(self.peak, other.peak), min(self.seconds, other.seconds))


def in_turns(seconds: Callable[..., float], *, compiled: bool) -> Callable[..., float]:
    """``seconds`` of the planner, which times what it runs on the GPU, in a turn; compiling comes before."""

    def timed(once: Callable[[], None], *args: Any) -> float:
        if compiled:
            once()
        with turn():
            return seconds(once, *args)

    return timed


@dataclass
class Bench:
    """One model with one batch on one device."""

    label: str
    model: nn.Module
    planner: CheckpointPlanner
    repeat: int

    @property
    def device(self) -> torch.device:
        return self.planner.place

    def measure(self, model: nn.Module | None = None) -> Measured:
        """Steps of the model as it is, or of what was compiled of it, one after the other as in training."""
        is_compiled, model = model is not None, self.model if model is None else model
        counts = self.device.type == "cpu" and not is_compiled  # what is compiled is not seen
        with LiveBytes(block=512) if counts else nullcontext() as memory:
            if memory is not None:
                memory.hold(self.held)
            if is_compiled:  # here, while others use the GPU
                self._step(model)
                self._wait()
            with turn(), nothing_collected():
                for _ in range(WARM):
                    self._step(model)
                self._wait()
                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                seconds = fastest_row(lambda: self._seconds(model))
        self.model.zero_grad(set_to_none=True)
        on_gpu = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        return Measured(on_gpu if memory is None else memory.peak, seconds)

    def _seconds(self, model: nn.Module) -> float:
        start = time.perf_counter()
        for _ in range(self.repeat):
            self._step(model)
        self._wait()
        return (time.perf_counter() - start) / self.repeat

    def _step(self, model: nn.Module) -> None:
        step = self.planner.step
        self.model.zero_grad(set_to_none=True)
        with step.autocasts(self.device.type):
            loss = step.loss(model, step.batch)
        loss.backward()  # type: ignore[no-untyped-call]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def budget_of(self, rival: Measured) -> int:
        """The budget of a plan whose step may take as much as the rival's did: a plan leaves room besides.
        Where it needs more than that, its own least, so that the row shows by how much.
        """
        wanted = with_gaps(rival.peak) if self.device.type == "cuda" else rival.peak
        return max(int(wanted * (1 + GAPS / 2)), self.planner.least[2])

    @property
    def held(self) -> list[Tensor]:
        """What is there before a step."""
        batch = [leaf for leaf in tree_leaves(self.planner.step.batch) if isinstance(leaf, Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), *batch]

    def planned(self, plan: CheckpointPlan) -> Measured:
        with block_modes(self.model, plan.modes, plan.regions):
            return self.measure()


def row(
    label: str, side: str, measured: Measured, plan: CheckpointPlan | None = None, verdict: str = ""
) -> None:
    """One row of the table: what was measured, and what was planned."""
    budget = f"{plan.budget / GIB:8.3f}" if plan else " " * 8
    cells = [f"{label:16} {side:24} {budget} {measured.peak / GIB:8.3f} {measured.seconds * 1e3:8.2f}"]
    if plan is not None:
        cells.append(f"{plan.peak / GIB:8.3f} {plan.seconds * 1e3:8.2f} {plan.timeline.peak / GIB:8.3f}")
        peak_off = f"{plan.peak / measured.peak - 1:+7.1%}" if measured.peak else " " * 7
        cells.append(f"{peak_off} {plan.seconds / measured.seconds - 1:+7.1%}")
        counts = Counter(plan.modes.values())
        kinds = [*(f"{mode[0]}{count}" for mode, count in counts.items()), f"r{len(plan.regions)}"]
        cells.append(" ".join(kinds).ljust(16))
    print(" ".join([*cells, verdict]), flush=True)
    if verdict:
        VERDICTS[verdict.split(" by ")[0]] += 1


def against_prediction(measured: Measured, plan: CheckpointPlan) -> str:
    """What is wrong with a plan, or ``ok``."""
    wrong = []
    if measured.peak > plan.budget:
        wrong.append("OVER THE BUDGET")
    if abs(plan.peak / measured.peak - 1) > PEAK_BAR:
        wrong.append("PEAK OFF")
    if abs(plan.seconds / measured.seconds - 1) > TIME_BAR:
        wrong.append("TIME OFF")
    return " and ".join(wrong) or "ok"


def against_rival(measured: Measured, rival: Measured) -> str:
    """How ours does with at most the bytes of a rival, but for gaps that the allocator happens to leave."""
    if measured.peak > (1 + GAPS) * rival.peak:
        return f"MORE MEMORY by {measured.peak / rival.peak - 1:.1%}"
    if measured.seconds > (1 + NOISE) * rival.seconds:
        return f"SLOWER by {measured.seconds / rival.seconds - 1:.1%}"
    return f"not slower by {1 - measured.seconds / rival.seconds:.1%}"


def made(name: str, case: Case, samples: int, args: argparse.Namespace) -> Bench:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start = time.perf_counter()
    model = case.build(args.layers).to(device).train()
    if args.chunked and hasattr(model, "lm_head"):
        model = skip_causal_mask(chunk_causal_loss(model, whole_scores=False))
    half = torch.bfloat16 if args.precision == "bf16" else torch.float32
    batch = tree_map_only(
        Tensor, lambda t: t.to(device, half if t.is_floating_point() else None), case.batch(samples)
    )
    autocast = torch.bfloat16 if args.precision == "autocast" else None
    built = time.perf_counter()
    planner = CheckpointPlanner(
        model.to(half), batch, criterion=case.criterion, autocast=autocast, compiled=args.compiled
    )
    _ = planner.least
    bench = Bench(f"{name} x {samples}", model, planner, args.repeat)
    print(
        f"{bench.label:16} built in {built - start:.1f} s, profiled in {time.perf_counter() - built:.1f} s,"
        f" {len(planner.blocks)} blocks, {planner.least[2] / GIB:.3f} to {planner.whole / GIB:.3f} GiB",
        flush=True,
    )
    for note in planner.notes:
        print(f"{bench.label:16} note: {note}", flush=True)
    return bench


def run(name: str, case: Case, samples: int, args: argparse.Namespace) -> None:
    """All sides of one model with one batch."""
    bench = made(name, case, samples, args)
    planner = bench.planner
    least, most = planner.least[2], planner.whole
    for share in args.shares or [number / max(1, args.budgets - 1) for number in range(args.budgets)]:
        with guarded(bench.label, "ours"):
            plan = planner.plan(least + int((most - least) * share))
            measured = bench.planned(plan)
            row(bench.label, "auto_checkpoint", measured, plan, against_prediction(measured, plan))
    with guarded(bench.label, "all full"):
        _against(bench, "all blocks full", dict.fromkeys(planner.blocks, "full"))
    with guarded(bench.label, "Chen"):
        segments = CheckpointSolverChen(planner.chain()).segments()
        calls = planner.played["keep"].calls
        regions = [calls[first:stop] for first, stop in segments[:-1]]
        _against(bench, f"Chen, {len(segments)} segments", dict.fromkeys(planner.blocks, "keep"), regions)


def _against(
    bench: Bench, side: str, modes: Mapping[str, str], regions: Sequence[Sequence[str]] = ()
) -> None:
    """A rival, and ours with the bytes that it needed.  What seems slower gets more turns, as its rival."""

    def measured() -> Measured:
        with block_modes(bench.model, modes, regions):
            return bench.measure()

    theirs = measured()
    plan = bench.planner.plan(bench.budget_of(theirs))
    ours = bench.planned(plan)
    same = plan.modes == modes and plan.regions == tuple(map(tuple, regions))
    for _ in range(2):
        if same or ours.seconds <= (1 + NOISE) * theirs.seconds:
            break
        theirs, ours = theirs.faster(measured()), ours.faster(bench.planned(plan))
    row(bench.label, side, theirs)
    row(bench.label, "  ours at its peak", ours, plan, "the same" if same else against_rival(ours, theirs))


def run_compiled(name: str, case: Case, samples: int, args: argparse.Namespace) -> None:
    """torch's own budget, and ours with the bytes that it needed, all compiled."""
    from torch._functorch import config

    bench = made(name, case, samples, args)
    for share in args.torch_budgets:
        with guarded(bench.label, f"torch {share}"):
            before = config.activation_memory_budget
            start = time.perf_counter()
            try:
                config.activation_memory_budget = share
                theirs = _compiled(bench)
            finally:
                config.activation_memory_budget = before
            row(bench.label, f"activation budget {share}", theirs)
            plan = bench.planner.plan(bench.budget_of(theirs))
            with block_modes(bench.model, plan.modes):
                ours = _compiled(bench)
            row(bench.label, "  ours at its peak", ours, plan, against_rival(ours, theirs))
            print(f"{bench.label:16} both compiled in {time.perf_counter() - start:.0f} s", flush=True)


def _compiled(bench: Bench) -> Measured:
    torch.compiler.reset()
    try:
        return bench.measure(torch.compile(bench.model))
    finally:
        torch.compiler.reset()


@contextmanager
def guarded(label: str, side: str) -> Iterator[None]:
    """An error is printed, and the next side begins; meanwhile a line is printed each half minute."""
    is_done = threading.Event()
    threading.Thread(target=_report, args=(f"{label:16} {side}", is_done), daemon=True).start()
    try:
        yield
    except Exception as error:
        VERDICTS["failed"] += 1
        print(f"{label:16} {side}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        if not isinstance(error, (torch.OutOfMemoryError, ValueError)):
            traceback.print_exc(limit=-4)
    finally:
        is_done.set()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _report(what: str, is_done: threading.Event) -> None:
    start = time.perf_counter()
    while not is_done.wait(HALF_MINUTE):
        used = torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else 0.0
        print(f"{what}: {time.perf_counter() - start:.0f} s so far, at most {used:.3f} GiB", flush=True)


def _cases(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Iterator[tuple[str, Case, int]]:
    cases = SMALL if args.small else CASES
    names = args.models or [name for name in cases if name != "gpt2-xl"]
    if unknown := [name for name in names if name not in cases]:
        parser.error(f"unknown model {unknown[0]!r}; choose from {', '.join(cases)}")
    for number, name in enumerate(names):
        case = cases[name]
        sizes = (
            case.batches[: args.batches]
            if args.batches > 1
            else case.batches[number % len(case.batches) :][:1]
        )
        for samples in [args.batch] if args.batch else sizes:
            yield name, case, samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=None, help=f"of {', '.join(CASES)}")
    parser.add_argument(
        "--batches", type=int, default=3, help="how many sizes of batches; 1: models take turns"
    )
    parser.add_argument("--batch", type=int, default=None, help="this size only")
    parser.add_argument("--budgets", type=int, default=10)
    parser.add_argument(
        "--shares", type=float, nargs="+", help="these budgets: 0 is the least possible, 1 all that is needed"
    )
    parser.add_argument("--seconds", type=float, default=None, help="end after so many seconds")
    parser.add_argument(
        "--repeat",
        type=int,
        default=4,
        help="steps in a row that are timed; the fastest of such rows counts",
    )
    parser.add_argument("--layers", type=int, default=None, help="so many layers instead of all")
    parser.add_argument("--precision", choices=("bf16", "autocast", "fp32"), default="bf16")
    parser.add_argument("--compiled", action="store_true", help="beside torch's activation_memory_budget")
    parser.add_argument(
        "--torch-budgets", type=float, nargs="+", default=(0.25, 0.6), help="with --compiled: those of torch"
    )
    parser.add_argument("--xl", action="store_true", help="GPT-2 XL of transformers beside that of our zoo")
    parser.add_argument("--eager", action="store_true", help="with --xl: not compiled")
    parser.add_argument(
        "--chunked", action="store_true", help="language models: chunk_causal_loss and skip_causal_mask first"
    )
    parser.add_argument("--small", action="store_true", help="toys, for a CPU")
    args = parser.parse_args()
    if args.xl:
        checkpointed_xl.compare(args.seconds, eager=args.eager, layers=args.layers)
        return
    end_after(args.seconds, _tell_verdicts)
    measure._seconds = in_turns(measure._seconds, compiled=args.compiled)
    if args.small:
        args.precision = "fp32"
    print(
        f"{'case':16} {'side':24} {'budget':>8} {'peak GiB':>8} {'ms':>8} {'planned':>8} {'ms':>8}"
        f" {'played':>8} {'peak':>7} {'time':>7} modes            verdict",
        flush=True,
    )
    for name, case, samples in _cases(args, parser):
        with guarded(name, "case"):
            (run_compiled if args.compiled else run)(name, case, samples, args)
    _tell_verdicts()


def _tell_verdicts() -> None:
    counts = [f"{count} x {verdict}" for verdict, count in VERDICTS.items()]
    print("verdicts: " + (", ".join(counts) or "none"), flush=True)


if __name__ == "__main__":
    main()
