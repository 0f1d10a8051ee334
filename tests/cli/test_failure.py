"""Which failure is the cause, and how it is told."""

from __future__ import annotations

from typing import Any

import pytest

from colossalai.cli.failure import (
    EarlyEnd,
    RankFailure,
    collect,
    describe,
    describe_early,
    exit_text,
    first,
    is_own_fault,
)


def make(rank: int, kind: str = "raised", summary: str = "ValueError: x", **more: Any) -> RankFailure:
    defaults = {"local_rank": rank, "exitcode": 1, "time": 10.0}
    return RankFailure(rank=rank, kind=kind, summary=summary, **{**defaults, **more})


TOLD = "colossalai.pipeline.p2p.PipelineError: pipeline stage 1 (rank 1) failed with ValueError: x"
LOST = "torch.distributed.DistNetworkError: The client socket has timed out"


@pytest.mark.parametrize(
    ("cause", "others"),
    [
        (make(2, time=5.0), [make(0, time=6.0), make(1, time=7.0)]),
        # a killed rank leaves no note: it is seen last, and its peers complained before
        (
            make(3, kind="died", exitcode=-9, time=9.0),
            [make(0, summary=LOST), make(1, summary="Connection reset")],
        ),
        (
            make(1, time=9.0),
            [make(0, summary="RuntimeError: Connection closed by peer [127.0.0.1]:4", time=1.0)],
        ),
        (make(1, kind="exit", exitcode=7, time=9.0), [make(0, kind="died", exitcode=-6, time=1.0)]),
        (make(1, summary=LOST), [make(0, kind="stopped", exitcode=-15, time=1.0)]),
        # a stage that fails tells the others before it ends itself
        (make(1, time=9.0), [make(0, summary=TOLD, time=1.0), make(2, summary=TOLD, time=1.0)]),
    ],
)
def test_first(cause: RankFailure, others: list[RankFailure]) -> None:
    assert first([*others, cause]) is cause


def test_collect_joins_exit_codes_and_notes() -> None:
    exits = [
        {"rank": 0, "local_rank": 0, "exitcode": -9, "kind": "stopped", "time": 3.0},
        {"rank": 1, "local_rank": 1, "exitcode": 7, "kind": "died", "time": 3.0},
    ]
    note = {
        "rank": 1,
        "local_rank": 1,
        "pid": 5,
        "time": 2.0,
        "kind": "exit",
        "exitcode": 7,
        "summary": "sys.exit",
    }
    alone = {**note, "rank": 2, "exitcode": 1, "kind": "raised", "traceback": "Traceback ..."}
    zero, one, two = collect(exits, [note, alone])
    assert (zero.kind, zero.summary) == ("stopped", "ended with exit code 137 (SIGKILL)")
    assert (one.kind, one.time, one.exitcode) == ("exit", 2.0, 7)
    assert (two.kind, two.traceback, two.exitcode) == ("raised", "Traceback ...", 1)


def test_a_rank_stopped_while_it_was_ending_keeps_its_own_exit_code() -> None:
    ended = {"rank": 1, "local_rank": 1, "exitcode": -15, "kind": "stopped", "time": 3.0}
    note = {**ended, "exitcode": 1, "kind": "raised", "summary": "ValueError: x", "time": 2.0}
    (failure,) = collect([ended], [note])
    assert (failure.kind, failure.shell_code) == ("raised", 1)


def test_describe_names_the_others_but_not_the_stopped() -> None:
    cause = make(2, host="node7", traceback="Traceback:\n  deep inside\nValueError: x\n", time=1.0)
    text = describe(
        [make(0, summary="OSError: y\nlong\nstory"), cause, make(1, kind="stopped", exitcode=-15)]
    )
    head, *body, foot = text.splitlines()
    assert " rank 2 failed on node7 " in head
    assert foot == "=" * len(head)
    assert body == [
        "rank 2 (local rank 2) on node7 ended with exit code 1",
        "",
        "Traceback:",
        "  deep inside",
        "ValueError: x",
        "",
        "Failed after it:",
        "  rank 0: OSError: y ... story",
    ]


def test_describe_many() -> None:
    text = describe([make(rank, time=float(rank)) for rank in range(20)])
    assert "rank 0:" not in text
    assert "  rank 8: ValueError: x\n  and 11 more\n" in text


def test_describe_names_ranks_that_ended_before_the_failure() -> None:
    early = EarlyEnd(rank=2, local_rank=2, seconds=3.14, time=9.0)
    late = EarlyEnd(rank=3, local_rank=3, seconds=4.0, time=11.0)
    head, line, *_ = describe([make(0, summary=LOST), make(1, summary=LOST)], [late, early]).splitlines()
    assert head.strip("=") == " rank 2 ended too early "
    assert line == "rank 2 ended with exit code 0 after 3.1 s, before the others"
    text = describe([make(0)], [late, early])
    assert " rank 0 failed " in text, "an error of its own is the cause"
    assert line in text
    assert "rank 3" not in text
    assert describe_early([early] * 20)[-1] == "and 12 more"


def test_whose_fault() -> None:
    assert is_own_fault(make(0))
    assert not is_own_fault(make(0, summary=LOST))


def test_exit_codes() -> None:
    assert make(0, exitcode=-11).shell_code == 139
    assert make(0, exitcode=3).shell_code == 3
    assert exit_text(-64 - 30) == "exit code 222 (signal 94)"
