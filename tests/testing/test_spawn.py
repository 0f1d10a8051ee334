from __future__ import annotations

import functools
import gc
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from colossalai.testing import RankError, spawn


def start(rank: int, world_size: int, port: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")


def sum_of_ranks(rank: int, world_size: int, port: int) -> float:
    start(rank, world_size, port)
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return x.item()


def scaled(rank: int, world_size: int, port: int, factor: int, offset: torch.Tensor) -> torch.Tensor:
    return rank * factor + offset


def surroundings(rank: int, world_size: int, port: int) -> tuple[str | None, str, str, str]:
    return os.environ.get("SEEN_BY_RANKS"), os.getcwd(), os.environ["RANK"], os.environ["MASTER_PORT"]


def threads(rank: int, world_size: int, port: int) -> int:
    return torch.get_num_threads()


def burdens(rank: int, world_size: int, port: int) -> tuple[bool, bool, int]:
    """Whether ``patient_epoll.c`` is loaded, whether the collector works, and how many objects it sees."""
    maps = Path("/proc/self/maps")
    return (
        "patient_epoll" in (maps.read_text() if maps.exists() else ""),
        gc.isenabled(),
        len(gc.get_objects()),
    )


def load_with_a_worker(rank: int, world_size: int, port: int) -> int:
    return sum(int(x) for x in DataLoader(range(8), num_workers=1))  # type: ignore[arg-type]


def speak(rank: int, world_size: int, port: int) -> None:
    print(f"out of {rank}")
    print(f"err of {rank}", file=sys.stderr)
    os.write(2, b"from below Python, without an end of line")


class CustomError(Exception):
    pass


def raise_on_rank_1(rank: int, world_size: int, port: int) -> None:
    if rank == 1:
        raise CustomError("the reason")
    start(rank, world_size, port)


def raise_local_class(rank: int, world_size: int, port: int) -> None:
    class LocalError(KeyError):
        pass

    raise LocalError("hidden")


def exit_quietly(rank: int, world_size: int, port: int) -> None:
    sys.exit(3)


def fail_bare_assert(rank: int, world_size: int, port: int) -> None:
    got = torch.tensor([1.0, 2.0])
    expected = 3
    assert got.sum() == expected + 1


def die_in_collective(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    if rank == 1:
        print("last words", file=sys.stderr)
        os.kill(os.getpid(), 9)
    dist.all_reduce(torch.ones(1))


def crash(rank: int, world_size: int, port: int) -> None:
    os.abort()


def lose_connection_then_raise(rank: int, world_size: int, port: int, raises: bool) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if rank == 0:
        store.set("lost", "1")
        try:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:1")
        except RuntimeError as error:
            raise ValueError("cannot reduce") from error
    store.get("lost")
    if raises:
        raise KeyError("the cause")
    store.get("never set")


def return_a_function(rank: int, world_size: int, port: int) -> object:
    return lambda: None


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_ranks_reach_each_other_and_return(world_size: int) -> None:
    assert spawn(sum_of_ranks, world_size) == [sum(range(world_size))] * world_size


def test_arguments_arrive_and_results_come_in_the_order_of_ranks() -> None:
    results = spawn(functools.partial(scaled, factor=10), 3, offset=torch.tensor([1, 2]))
    assert [r.tolist() for r in results] == [[1, 2], [11, 12], [21, 22]]


def test_ranks_see_the_environment_and_folder_of_the_test(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SEEN_BY_RANKS", "yes")
    monkeypatch.setenv("RANK", "17")
    monkeypatch.chdir(tmp_path)
    first, second = spawn(surroundings, 2)
    assert first[:3] == ("yes", str(tmp_path), "0")
    assert second[:3] == ("yes", str(tmp_path), "1")
    assert first[3] == second[3]
    assert os.environ["RANK"] == "17"


def test_a_rank_uses_one_thread() -> None:
    assert spawn(threads, 1) == [1]


def test_a_rank_may_start_processes() -> None:
    assert spawn(load_with_a_worker, 1) == [28]


def test_output_of_ranks_is_passed_on_with_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    spawn(speak, 2)
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[rank 0] out of 0", "[rank 1] out of 1"]
    of_rank_1 = [line for line in err.splitlines() if line.startswith("[rank 1]")]
    assert of_rank_1 == ["[rank 1] err of 1", "[rank 1] from below Python, without an end of line"]


def test_the_traceback_of_the_rank_that_raised_is_shown() -> None:
    with pytest.raises(RankError) as caught:
        spawn(raise_on_rank_1, 2)
    error = caught.value
    assert error.rank == 1
    assert error.cause_type is CustomError
    assert error.traceback in str(error)
    assert re.match(
        r"(?s)rank 1 raised .*CustomError: the reason\n\nTraceback.*test_spawn.py.*in raise_on_rank_1",
        str(error),
    )
    assert "_rank.py" not in str(error), "frames of the harness are noise"
    assert re.search(r"rank 0 (waits in init_process_group|is at)", str(error)), str(error)


def test_a_class_that_the_parent_cannot_import_becomes_its_base() -> None:
    with pytest.raises(RankError, match=r"LocalError: 'hidden'") as caught:
        spawn(raise_local_class, 1)
    assert caught.value.cause_type is KeyError


def test_exit_is_a_failure() -> None:
    with pytest.raises(RankError, match="rank 0 raised SystemExit: 3") as caught:
        spawn(exit_quietly, 1)
    assert caught.value.cause_type is SystemExit


def test_a_bare_assert_shows_the_values() -> None:
    with pytest.raises(
        RankError, match=r"(?s)assert got.sum\(\) == expected.*got = tensor\(\[1., 2.\]\).*expected = 3"
    ):
        spawn(fail_bare_assert, 1)


def test_a_killed_rank_is_the_cause_and_not_the_ranks_that_lost_it() -> None:
    with pytest.raises(
        RankError, match=r"^rank 1 died with exit code -9 \(SIGKILL\)\n\nlast words"
    ) as caught:
        spawn(die_in_collective, 3)
    assert (caught.value.rank, caught.value.cause_type) == (1, ChildProcessError)


def test_a_crash_shows_the_python_stack() -> None:
    with pytest.raises(RankError, match=r"(?s)^rank 0 died with exit code -6 \(SIGABRT\).*line \d+ in crash"):
        spawn(crash, 1)


def test_a_lost_connection_yields_to_the_error_of_another_rank() -> None:
    with pytest.raises(RankError, match=r"(?s)^rank 1 raised KeyError: 'the cause'") as caught:
        spawn(lose_connection_then_raise, 2, raises=True)
    assert (caught.value.rank, caught.value.cause_type) == (1, KeyError)


def test_a_lost_connection_without_another_error_is_shown() -> None:
    with pytest.raises(
        RankError, match=r"(?s)^rank 0 raised ValueError: cannot reduce.*rank 1 is at .*never set"
    ):
        spawn(lose_connection_then_raise, 2, raises=False)


def test_a_result_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0 raised .*(pickle|lambda)"):
        spawn(return_a_function, 1)


def test_a_function_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(TypeError, match=r"cannot send <function .*<lambda>.*Use a function at the top level"):
        spawn(lambda rank, world_size, port: None, 1)


def test_an_argument_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(TypeError, match=r"with the arguments \['factor', 'offset'\] to another process"):
        spawn(scaled, 1, factor=2, offset=lambda: None)


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one rank, got nprocs=0"):
        spawn(sum_of_ranks, 0)


def test_ranks_neither_spin_nor_look_for_garbage_among_imports() -> None:
    """What keeps the suite fast, see docs/source/en/testing.md."""
    ((patient, collects, objects),) = spawn(burdens, 1)
    assert collects
    assert objects < 20_000  # torch alone has some 200,000
    if sys.platform == "linux" and any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        assert patient
