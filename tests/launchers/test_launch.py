from __future__ import annotations

import os
import random
import re
import socket
import sys
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist

import colossalai
from colossalai.context import Config, ParallelMode, RendezvousError
from colossalai.context.random import get_seeds, seed
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.testing import spawn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def total_of_ranks(device: str = "cpu") -> int:
    total = torch.tensor([dist.get_rank()], device=device)
    dist.all_reduce(total)
    return int(total)


@pytest.mark.parametrize("config", [{}, None, Config()])
def test_one_process_is_a_job(config: Config | None, free_port: int) -> None:
    colossalai.launch(config, 0, 1, "localhost", free_port, verbose=False)
    assert total_of_ranks() == 0
    for mode in (
        ParallelMode.GLOBAL,
        ParallelMode.DATA,
        ParallelMode.MODEL,
        ParallelMode.PIPELINE,
        ParallelMode.TENSOR,
    ):
        assert gpc.is_initialized(mode)
        assert gpc.get_world_size(mode) == 1
    assert gpc.is_pipeline_first_stage()
    assert gpc.is_pipeline_last_stage()


def test_the_documented_way_with_the_parser(
    free_port: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.py").write_text("BATCH_SIZE = 32\n")
    command = f"--config {tmp_path}/config.py --host localhost --port {free_port} --rank 0 --world_size 1"
    args = colossalai.get_default_parser().parse_args(command.split())
    colossalai.launch(
        config=args.config,
        rank=args.rank,
        world_size=args.world_size,
        host=args.host,
        port=args.port,
        backend=args.backend,
    )
    assert gpc.config.BATCH_SIZE == 32
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    printed = re.sub(r"\s+", " ", "".join(capfd.readouterr()))
    for line in (
        f"process rank 0 is bound to device {device}",
        "initialized seed on rank 0, numpy: 1024, python random: 1024, ParallelMode.DATA: 1024,"
        " ParallelMode.TENSOR: 1024,the default parallel seed is ParallelMode.DATA.",
        "Distributed environment is initialized, data parallel size: 1, pipeline parallel size: 1, tensor"
        " parallel size: 1",
    ):
        assert line in printed


def test_not_verbose_prints_nothing(free_port: int, capfd: pytest.CaptureFixture[str]) -> None:
    colossalai.launch({}, 0, 1, "localhost", free_port, verbose=False)
    assert "".join(capfd.readouterr()) == ""


def test_a_second_launch_is_refused_and_possible_after_destroy(free_port: int) -> None:
    for _ in range(2):  # the same port again: the store of the first launch has gone
        colossalai.launch({"X": 1}, 0, 1, "localhost", free_port, verbose=False)
        with pytest.raises(
            RuntimeError, match=r"already launched .* call colossalai\.core\.global_context\.destroy\(\)"
        ):
            colossalai.launch({"X": 2}, 0, 1, "localhost", free_port, verbose=False)
        assert gpc.config.X == 1
        assert total_of_ranks() == 0
        gpc.destroy()


def test_a_failed_launch_leaves_the_process_able_to_launch(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLOSSALAI_RENDEZVOUS_TIMEOUT", "0.3")
    with pytest.raises(
        RendezvousError, match=f"rank 1 of 2 found no rank 0 at localhost:{free_port} within 0.3 s"
    ):
        colossalai.launch({"X": 1}, 1, 2, "localhost", free_port, verbose=False)
    assert gpc.config == {}
    monkeypatch.setenv("COLOSSALAI_RENDEZVOUS_TIMEOUT", "30")
    colossalai.launch({}, 0, 1, "localhost", free_port, verbose=False)
    assert total_of_ranks() == 0


def test_rank_0_with_a_wrong_host_gives_its_port_back(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLOSSALAI_RENDEZVOUS_TIMEOUT", "0.3")
    with pytest.raises(RendezvousError, match=r"found no rank 0 at no-such-host\.invalid") as caught:
        colossalai.launch({}, 0, 1, "no-such-host.invalid", free_port, verbose=False)
    assert caught.tb is not None  # whoever keeps the error keeps the frames that raised it
    colossalai.launch({}, 0, 1, "localhost", free_port, verbose=False)
    assert total_of_ranks() == 0


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as listener:
            listener.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["::1", "[::1]", "127.0.0.1", socket.gethostname()])
def test_forms_of_the_host(host: str, free_port: int) -> None:
    if ":" in host and not _has_ipv6():
        pytest.skip(
            "this machine has no IPv6 loopback address; enable it with sysctl net.ipv6.conf.lo.disable_ipv6=0"
        )
    colossalai.launch({}, 0, 1, host, free_port, verbose=False)
    assert total_of_ranks() == 0


def test_seeds_at_launch(free_port: int) -> None:
    colossalai.launch({}, 0, 1, "localhost", free_port, seed=7, verbose=False)
    assert get_seeds() == {ParallelMode.DATA: 7, ParallelMode.TENSOR: 7}
    drawn = random.random(), numpy.random.rand(), torch.rand(1).item()
    random.seed(7)
    numpy.random.seed(7)
    assert drawn == (
        random.random(),
        numpy.random.rand(),
        torch.rand(1, generator=torch.Generator().manual_seed(7)).item(),
    )


ENVIRONMENT = {
    "slurm": {"SLURM_PROCID": "{rank}", "SLURM_NPROCS": "{world_size}"},
    "openmpi": {
        "OMPI_COMM_WORLD_RANK": "{rank}",
        "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
        "OMPI_COMM_WORLD_SIZE": "{world_size}",
    },
}


def _every_launcher(rank: int, world_size: int, port: int, own_port: int) -> None:
    """The agent's store for torchrun; for the others rank 0 hosts the store on a port of its own."""
    colossalai.launch_from_torch({"parallel": {"pipeline": 2}}, verbose=False)
    assert (gpc.get_global_rank(), gpc.pipeline_parallel_size, total_of_ranks()) == (rank, 2, 1)
    gpc.destroy()
    for name, variables in ENVIRONMENT.items():
        os.environ.update(
            {key: value.format(rank=rank, world_size=world_size) for key, value in variables.items()}
        )
        launch = getattr(colossalai, f"launch_from_{name}")
        launch({}, host="localhost", port=own_port, verbose=False)
        assert (gpc.get_global_rank(), gpc.data_parallel_size, total_of_ranks()) == (rank, 2, 1)
        gpc.destroy()


def test_every_launcher_on_two_ranks(free_port: int) -> None:
    spawn(_every_launcher, 2, own_port=free_port)


def _streams(rank: int, world_size: int, port: int) -> None:
    config = {"parallel": {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}}
    colossalai.launch(config, rank, world_size, "localhost", port, seed=100, verbose=False)
    assert get_seeds()[ParallelMode.TENSOR] == 100 + rank % 2 + 1024 * (rank // 2)

    def on_all_ranks(value: float) -> list[float]:
        found = [torch.zeros(1, dtype=torch.float64) for _ in range(world_size)]
        dist.all_gather(found, torch.tensor([value], dtype=torch.float64))
        return [v.item() for v in found]

    equal = torch.rand((), dtype=torch.float64).item(), random.random(), numpy.random.rand()
    with seed(ParallelMode.TENSOR):
        different = torch.rand((), dtype=torch.float64, device=DEVICE).item()
    for value in (*equal, torch.rand((), dtype=torch.float64).item()):
        assert len(set(on_all_ranks(value))) == 1
    assert len(set(on_all_ranks(different))) == world_size


def test_the_data_stream_is_equal_and_the_tensor_stream_differs() -> None:
    spawn(_streams, 4)


def _bad_on_every_rank(rank: int, world_size: int, port: int, messages: Path) -> None:
    try:
        colossalai.launch_from_torch({"parallel": {"tensor": {"size": 3, "mode": "1d"}}}, verbose=False)
    except ValueError as error:
        (messages / str(rank)).write_text(str(error))


def test_a_bad_config_is_refused_on_every_rank(tmp_path: Path) -> None:
    spawn(_bad_on_every_rank, 2, messages=tmp_path)
    texts = {path.read_text() for path in tmp_path.iterdir()}
    assert len(list(tmp_path.iterdir())) == 2
    assert texts == {
        "the world size 2 is not a multiple of pipeline 1 x tensor 3 = 3; start a multiple of 3 processes or"
        " change parallel.pipeline or parallel.tensor"
    }


def _different_plans_then_equal_ones(rank: int, world_size: int, port: int) -> None:
    for _ in range(2):
        with pytest.raises(
            RendezvousError,
            match=r"not launched alike: rank 0 with .*pipeline=1, .*tensor=1.*, rank 1 with .*pipeline=2,"
            r" .*tensor=1",
        ):
            colossalai.launch_from_torch({"parallel": {"pipeline": rank + 1}}, verbose=False)
        colossalai.launch_from_torch({"parallel": {"pipeline": 2}}, verbose=False)
        assert total_of_ranks() == 1
        gpc.destroy()


def test_ranks_with_different_plans_are_refused_and_may_try_again() -> None:
    spawn(_different_plans_then_equal_ones, 2)


def _lines(rank: int, world_size: int, port: int, folder: Path) -> None:
    with (folder / str(rank)).open(
        "w"
    ) as file:  # the streams of a forked rank are not those that pytest captures
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        colossalai.launch_from_torch({}, verbose=True)
        gpc.destroy()
        print("again", file=sys.stderr, flush=True)
        get_dist_logger().set_level("DEBUG")
        colossalai.launch_from_torch({}, verbose=True)


def test_lines_of_two_ranks(tmp_path: Path) -> None:
    spawn(_lines, 2, folder=tmp_path)
    for rank in (0, 1):
        quiet, _, all_ranks = (tmp_path / str(rank)).read_text().partition("again\n")
        for printed, heard in ((quiet, rank == 0), (all_ranks, True)):
            lines = [line for line in printed.splitlines() if line.startswith("colossalai - ")]
            texts = [
                *[f"process rank {rank} is bound to device ", f"initialized seed on rank {rank}, "] * heard,
                *["Distributed environment is initialized, data parallel size: 2"] * (rank == 0),
            ]
            assert len(lines) == len(texts), "one line for each message"
            assert all(text in line for text, line in zip(texts, lines, strict=True))


def _both_devices(rank: int, world_size: int, port: int, backend: str | None) -> None:
    colossalai.launch({}, rank, world_size, "localhost", port, backend=backend, verbose=False)
    assert torch.cuda.current_device() == rank % torch.cuda.device_count()
    for device in ("cpu", "cuda"):
        for group in (gpc.get_group(ParallelMode.DATA), gpc.get_cpu_group(ParallelMode.DATA)):
            total = torch.ones(1, device=device)
            dist.all_reduce(total, group=group)
            assert total.item() == world_size


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "world_size"), [(None, 1), ("nccl", 1), ("gloo", 2)])
def test_one_group_carries_tensors_of_both_devices(backend: str | None, world_size: int) -> None:
    """NCCL by default; with gloo, two ranks share a GPU."""
    spawn(_both_devices, world_size, backend=backend)
