"""What ``record_run`` sees, on which clock, and what becomes of it; plans without a job."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from colossalai.core import global_context as gpc
from colossalai.pipeline import Recording, planned_run, record_run
from colossalai.pipeline.executor import Executor
from colossalai.pipeline.p2p import Link
from colossalai.pipeline.recording import recorder as clock
from colossalai.pipeline.recording.recording import RecordedStep
from colossalai.pipeline.schedule import PassKind, RunTimes, Timetable, make_timetable, price
from colossalai.testing import spawn
from colossalai.trainer import Trainer, hooks
from tests.pipeline.plans import config, launch, problem
from tests.pipeline.test_engine import _engine


def assert_follows(timetable: Timetable, played: RunTimes, error: float = 0.0) -> None:
    """Every rank did its actions in order, none at a time, and none before what it needs was made."""
    made: dict[Any, float] = {}
    for rank, row in enumerate(played.spans):
        assert [action for action, *_ in row] == list(timetable.ranks[rank])
        for (_, _, end), (_, start, _) in pairwise(row):
            assert end <= start
        made |= {timetable.makes(rank, action): end for action, _, end in row}
    for rank, row in enumerate(played.spans):
        for action, start, end in row:
            assert start < end
            if (needed := timetable.needs(rank, action)) is not None:
                assert made[needed] <= start + error, (rank, action)


def check_recorded(rank: int, world_size: int, port: int, folder: str, schedule: str, chunks: int) -> Any:
    settings = config(schedule, 2, 4, chunks)
    launch(settings)
    engine = _engine(settings)
    batches = problem().batches
    with record_run() as recording:
        for batch in batches[:2]:
            engine.execute_schedule(iter([batch]))
        engine.execute_schedule(iter([batches[0]]), forward_only=True)
    engine.execute_schedule(iter([batches[0]]))  # nobody looks any more
    path = Path(folder) / f"{schedule}.json"
    recording.trace(path)
    if rank > 0:
        assert recording.steps == []
        assert recording.summary() == ""
        return None
    assert path.exists()
    return recording.steps, recording.summary(step=0)


@pytest.mark.parametrize(("schedule", "chunks", "nprocs"), [("zbh1", 1, 4), ("interleaved", 2, 2)])
def test_a_run(schedule: str, chunks: int, nprocs: int, tmp_path: Path) -> None:
    (steps, summary), *_ = spawn(
        check_recorded, nprocs, folder=str(tmp_path), schedule=schedule, chunks=chunks
    )
    table = make_timetable(schedule, 2, 4, chunks)
    assert [step.timetable.name for step in steps] == [schedule, schedule, "forward only"]
    assert steps[0].timetable == table
    for step in steps:
        assert list(step.pipelines) == (["dp 0", "dp 1"] if nprocs == 4 else [""])
        for played in step.pipelines.values():
            assert_follows(step.timetable, played)  # on one machine, all ranks read the same clock
    assert summary.count("measured") == nprocs // 2
    found = next(iter(steps[0].pipelines.values()))
    # the same numbers in all forms
    assert f"measured {found.bubble:.1%}" in summary
    assert f"timetable with the mean times {price(table, found.costs()).bubble:.1%}" in summary


def check_clocks(rank: int, world_size: int, port: int) -> float:
    clock.now = lambda real=clock.now: real() + 100 * rank  # a machine whose clock began earlier
    launch(config("1f1b", 3, 2))
    found = clock.offset_to_first_rank()
    settings = config("1f1b", 3, 2)
    engine = _engine(settings)
    with record_run() as recording:
        engine.execute_schedule(iter([problem().batches[0]]))
    if rank == 0:
        (step,) = recording.steps
        assert_follows(step.timetable, step.pipelines[""], error=1.0)
    return found


def check_one_machine(rank: int, world_size: int, port: int) -> float:
    launch(config("1f1b", 2, 2))
    return clock.offset_to_first_rank()


def test_clocks_of_machines_are_set_to_the_first() -> None:
    offsets = spawn(check_clocks, 3)
    assert offsets == [0.0, pytest.approx(-100, abs=1.0), pytest.approx(-200, abs=1.0)]
    assert spawn(check_one_machine, 2) == [0.0, 0.0]


def check_waiting_is_no_work(rank: int, world_size: int, port: int) -> None:
    """Messages are received before the clock starts, and sent after it has stopped."""
    settings = config("1f1b", 2, 2)
    launch(settings)
    engine = _engine(settings)
    log: list[str] = []

    class Log:
        def mark(self) -> None:
            log.append("mark")

        def record(self, action: Any, start: Any, end: Any) -> None:
            log.append(str(action))

    for name in ("receive", "send"):
        plain = getattr(Link, name)

        def noted(self: Link, *args: Any, name: str = name, plain: Any = plain) -> Any:
            log.append(name)
            return plain(self, *args)

        setattr(Link, name, noted)
    run = Executor.run
    Executor.run = lambda self, table, **kw: run(self, table, **{**kw, "recorder": Log()})  # type: ignore[method-assign]
    engine.execute_schedule(iter([problem().batches[0]]))
    own = {"F": "mark mark F0 send", "B": "receive mark mark B0"}
    other = {"F": "receive mark mark F0", "B": "mark mark B0 send"}
    words = own if rank == 0 else other
    row = make_timetable("1f1b", 2, 2).ranks[rank]
    assert " ".join(log) == " ".join(words[a.kind.value].replace("0", str(a.microbatch)) for a in row)


def test_waiting_is_no_work() -> None:
    spawn(check_waiting_is_no_work, 2)


def check_mistakes(rank: int, world_size: int, port: int) -> None:
    settings = config("1f1b", 2, 2)
    launch(settings)
    engine = _engine(settings)
    with (
        pytest.raises(RuntimeError, match=r"record_run saw no step of a pipeline; call engine\.execute"),
        record_run(),
    ):
        pass
    with record_run() as recording:
        with pytest.raises(RuntimeError, match="record_run is active already"), record_run():
            pass
        with pytest.raises(RuntimeError, match="can be read once its block"):
            recording.summary()
        engine.execute_schedule(iter([problem().batches[0]]))
    if rank == 0:
        with pytest.raises(ValueError, match="the recording has the steps 0 to 0, got 1"):
            recording.summary(step=1)
        with pytest.raises(ValueError, match="there is no pipeline 'dp 1' in this step; there are ''"):
            recording.summary(pipeline="dp 1")
    with pytest.raises(KeyError, match="of the user"), record_run():
        raise KeyError("of the user")  # nothing is gathered
    dist.barrier()


def test_mistakes() -> None:
    spawn(check_mistakes, 2)


def check_hook(rank: int, world_size: int, port: int, folder: str) -> None:
    settings = config("1f1b", 2, 4)
    launch(settings)
    batches = problem().batches
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
    names = ("whole.json", "short.json", "never.json")
    for name, skip, steps in zip(names, (1, len(batches) - 1, len(batches)), (2, 2, 1), strict=True):
        hook = hooks.RecordPipelineHook(Path(folder) / name, skip=skip, steps=steps)
        Trainer(_engine(settings)).fit(DataLoader(data, batch_size=16), epochs=1, hooks=[hook])
    gpc.destroy()


def test_hook(tmp_path: Path) -> None:
    spawn(check_hook, 2, folder=str(tmp_path))
    found = {p.name: json.loads(p.read_text())["traceEvents"] for p in tmp_path.iterdir()}
    steps = {name: {e["args"]["step"] for e in events if e["ph"] == "X"} for name, events in found.items()}
    assert steps == {"whole.json": {0, 1}, "short.json": {0}}
    with pytest.raises(ValueError, match="records at least 1, got skip=2 and steps=0"):
        hooks.RecordPipelineHook("x.json", steps=0)


def two_pipelines() -> Recording:
    table = make_timetable("zbv", 2, 3, 2)
    played = price(table)
    later = RunTimes(tuple(tuple((a, s + 50, e + 50) for a, s, e in row) for row in played.spans))
    return Recording([RecordedStep(table, {"dp 0": played, "dp 1": later})])


def test_trace(tmp_path: Path) -> None:
    two_pipelines().trace(tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    names = [(e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert names == [
        *((0, name) for name in ("pipeline dp 0", "rank 0", "rank 1")),
        *((1, name) for name in ("pipeline dp 1", "rank 0", "rank 1")),
    ]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == 2 * 2 * 3 * 2 * 3
    last = max(slices, key=lambda e: e["ts"])
    assert (last["name"], last["cat"], last["tid"]) == ("W2", "gradients of weights", 1)
    assert last["args"] == {"step": 0, "micro-batch": 2, "chunk": 0, "stage": 1}
    assert last["ts"] + last["dur"] == pytest.approx(
        (50 + price(make_timetable("zbv", 2, 3, 2)).makespan) * 1e6
    )
    # every arrow begins at the end of a slice and ends at the start of one, on another rank of the same
    # pipeline
    starts = {(e["pid"], e["tid"], e["ts"]) for e in slices}
    ends = {(e["pid"], e["tid"], e["ts"] + e["dur"]) for e in slices}
    out, into = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert out.keys() == into.keys()
    assert (
        len(out) == 2 * 3 * 2 * 2
    )  # pipelines, micro-batches, ways between ranks, activations and gradients
    for number, arrow in out.items():
        assert (arrow["pid"], arrow["tid"], arrow["ts"]) in ends
        assert (into[number]["pid"], into[number]["tid"], into[number]["ts"]) in starts
        assert arrow["tid"] != into[number]["tid"]
        assert arrow["ts"] <= into[number]["ts"]


def test_picture(tmp_path: Path) -> None:
    two_pipelines().picture(tmp_path / "run.svg")
    planned_run(make_timetable("1f1b", 2, 3)).picture(tmp_path / "plan.png")
    two_pipelines().picture(tmp_path / "one.svg", pipeline="dp 1")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    bars = {}
    for name in ("run.svg", "one.svg"):
        fills = [e.get("style", "") for e in ElementTree.parse(tmp_path / name).iter()]
        bars[name] = sum("fill:" in style and "stroke: #ffffff" in style for style in fills)
    assert bars == {"run.svg": 72, "one.svg": 36}


def test_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="needs matplotlib, which is not installed; pip install matplotlib"):
        planned_run(make_timetable("1f1b", 2, 3)).picture("never.png")


def test_summary_of_a_plan() -> None:
    table = make_timetable("1f1b", 2, 3)
    assert planned_run(table).summary().splitlines() == [
        "1f1b, 2 ranks, 3 micro-batches",
        "  rank 0   busy      9.0  idle      3.0  (25.0%)",
        "  rank 1   busy      9.0  idle      3.0  (25.0%)",
        "bubble: planned 25.0%, formula 25.0%",
    ]
    slow = planned_run(table, {PassKind.FORWARD: 1, PassKind.BACKWARD: 2}, message=1)
    assert slow.steps[0].pipelines[""].makespan > 12
    few = planned_run(make_timetable("zbv", 3, 2, 2)).summary()
    assert re.search("bubble: planned [0-9.]+%$", few)  # there is no formula


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["1f1b", "zbh1"])
def test_a_run_on_a_gpu(schedule: str) -> None:
    (recording, window, table), _ = spawn(check_cuda, 2, schedule=schedule)
    for step in recording:
        assert_follows(table, step.pipelines[""], error=1e-3)
        played = step.pipelines[""]
        assert window[0] - 1e-3 < played.start
        assert played.start + played.makespan < window[1] + 1e-3


def check_cuda(rank: int, world_size: int, port: int, schedule: str) -> Any:
    import colossalai

    settings = config(schedule, 2, 4)
    colossalai.launch_from_torch(config=settings, backend="gloo", verbose=False)
    engine = _engine(settings)
    assert next(engine.model.parameters()).is_cuda
    start = clock.now()
    with record_run() as recording:
        for batch in problem().batches:
            engine.execute_schedule(iter([batch]))
    return recording.steps, (start, clock.now()), make_timetable(schedule, 2, 4)
