from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from colossalai.cluster import DistCoordinator
from colossalai.cluster.dist_coordinator import priority_execution
from colossalai.testing import RankError, spawn


def _start(rank: int, world_size: int, port: int, prefix: str = "job") -> None:
    store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)


def _questions(rank: int, world_size: int, port: int) -> None:
    _start(rank, world_size, port)
    coordinator = DistCoordinator()
    assert coordinator is DistCoordinator()
    assert (coordinator.rank, coordinator.world_size, coordinator.local_rank) == (rank, world_size, rank)
    assert (coordinator.num_nodes, coordinator.local_world_size) == (1, world_size)
    assert coordinator.is_master() == coordinator.is_node_master() == (rank == 0)
    assert coordinator.is_last_process() == (rank == world_size - 1)

    group = dist.new_group([1, 2])
    assert coordinator.is_master(group) == (rank == 1)
    assert coordinator.is_last_process(group) == (rank == 2)

    @coordinator.on_master_only()
    def double(x: int) -> int:
        return 2 * x

    assert double(3) == (6 if rank == 0 else None)
    assert double.__name__ == "double"
    assert coordinator.on_master_only(group)(lambda: "ran")() == ("ran" if rank == 1 else None)

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        coordinator.print_on_master("job")
        coordinator.print_on_master("group", group)
        coordinator.print_on_node_master("node")
    assert printed.getvalue() == {0: "job\nnode\n", 1: "group\n"}.get(rank, "")

    os.environ["LOCAL_WORLD_SIZE"] = "1"
    assert coordinator.num_nodes == world_size
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    with pytest.raises(RuntimeError, match="3 ranks are not a multiple of the 2 processes on this node"):
        _ = coordinator.num_nodes
    os.environ["LOCAL_RANK"] = "1"
    assert not coordinator.is_node_master()
    del os.environ["LOCAL_RANK"]
    with pytest.raises(RuntimeError, match=r"local rank is unknown: none of LOCAL_RANK, .* torchrun"):
        _ = coordinator.local_rank
    os.environ["SLURM_LOCALID"] = "4"
    assert coordinator.local_rank == 4


def test_who_is_who() -> None:
    spawn(_questions, 3)


def test_a_job_of_one_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        coordinator = DistCoordinator()
        assert (coordinator.local_rank, coordinator.local_world_size, coordinator.num_nodes) == (0, 1, 1)
        with priority_execution():
            pass
        with pytest.raises(KeyError, match="mine"), priority_execution():
            raise KeyError("mine")
        with pytest.raises(TypeError, match=r"write @coordinator.on_master_only\(\)"):
            coordinator.on_master_only(lambda: None)  # type: ignore[arg-type]
    finally:
        coordinator.destroy()
    assert not dist.is_initialized()
    with pytest.raises(
        RuntimeError, match=r"DistCoordinator needs torch.distributed, which is not initialized"
    ):
        _ = coordinator.rank


def test_before_launch_the_remedy_is_named() -> None:
    with pytest.raises(
        RuntimeError, match=r"DistCoordinator needs .*not initialized; call colossalai.launch_"
    ):
        DistCoordinator()
    with pytest.raises(RuntimeError, match="not initialized"), priority_execution():
        pass


def _two_jobs(rank: int, world_size: int, port: int) -> None:
    _start(rank, world_size, port, "first")
    coordinator = DistCoordinator()
    assert coordinator.rank == rank
    coordinator.destroy()
    _start(world_size - 1 - rank, world_size, port, "second")
    assert coordinator.rank == DistCoordinator().rank == world_size - 1 - rank
    coordinator.block_all()


def test_a_second_job_is_not_answered_from_the_first() -> None:
    spawn(_two_jobs, 2)


def _download(
    rank: int, world_size: int, port: int, folder: str, executor: int, members: list[int] | None
) -> None:
    _start(rank, world_size, port)
    group = dist.new_group(members) if members else None
    file = Path(folder, "data")
    ran = False
    for coordinated in (priority_execution, DistCoordinator().priority_execution):
        with coordinated(executor, group):
            ran = True
            if members and rank not in members:
                break
            if dist.get_rank(group) == executor:
                assert not file.exists()
                file.write_text("downloaded")
            assert file.read_text() == "downloaded"
        DistCoordinator().block_all(group)
        if dist.get_rank(group) == executor:
            file.unlink()
        DistCoordinator().block_all(group)
    assert ran


@pytest.mark.parametrize(("executor", "members"), [(0, None), (2, None), (1, [1, 2])])
def test_the_executor_goes_first(tmp_path: Path, executor: int, members: list[int] | None) -> None:
    spawn(_download, 3, folder=str(tmp_path), executor=executor, members=members)


def _executor_raises(rank: int, world_size: int, port: int) -> None:
    _start(rank, world_size, port)
    group = dist.new_group([1, 2])
    if rank == 1:
        with pytest.raises(OSError, match="disk full"), priority_execution(0, group):
            raise OSError("disk full")
    if rank == 2:
        with (
            pytest.raises(RuntimeError, match="rank 1, which goes first, failed with OSError: disk full"),
            priority_execution(0, group),
        ):
            pytest.fail("the block ran after the executor had failed")
    DistCoordinator().block_all()


def test_the_executors_error_reaches_those_who_wait() -> None:
    spawn(_executor_raises, 3)


def _executor_exits(rank: int, world_size: int, port: int) -> None:
    _start(rank, world_size, port)
    with priority_execution():
        raise SystemExit("stop")


def test_nobody_waits_for_an_executor_that_exits() -> None:
    with pytest.raises(RankError, match="SystemExit: stop"):
        spawn(_executor_exits, 2, timeout=20)


def _another_rank_raises(rank: int, world_size: int, port: int) -> None:
    _start(rank, world_size, port)
    expectation = pytest.raises(ValueError, match="mine") if rank == 1 else contextlib.nullcontext()
    with expectation, priority_execution():
        if rank == 1:
            raise ValueError("mine")
    DistCoordinator().block_all()


def test_an_error_of_a_later_rank_is_its_own() -> None:
    spawn(_another_rank_raises, 2)


def _bad_executor(rank: int, world_size: int, port: int) -> None:
    _start(rank, world_size, port)
    for executor in (2, -1):
        with (
            pytest.raises(
                ValueError, match=rf"executor_rank {executor} is not a rank of a group of 2; .* 0 to 1"
            ),
            priority_execution(executor),
        ):
            pytest.fail("the block ran")


def test_an_executor_outside_of_the_group_is_refused_on_every_rank() -> None:
    spawn(_bad_executor, 2)
