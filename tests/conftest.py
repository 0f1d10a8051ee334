"""Options and fixtures that every test shares.

Tests run in one process and in any order, so a test that leaves something behind changes the tests after it.
The fixtures here undo that, and fail the test that did it.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# torch.compile would start a pool of compilers that outlives the test which compiles first
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# Models this small are computed faster by one thread than by several, which wait for each other by spinning.
# Also for the scripts that tests start; a rank of ``spawn`` has one thread anyway.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from colossalai.kernel.native.build import library

# What a test may change in torch for all tests after it: how to read it and how to set it.
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, torch.set_default_device),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "cudnn.deterministic": (
        lambda: torch.backends.cudnn.deterministic,
        lambda value: setattr(torch.backends.cudnn, "deterministic", value),
    ),
    "cudnn.benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
    ),
}


def pytest_configure() -> None:
    """Preload ``patient_epoll.c`` into the processes that tests start, which only makes them quicker."""
    if sys.platform == "linux" and "patient_epoll" not in os.environ.get("LD_PRELOAD", ""):
        with contextlib.suppress(RuntimeError, OSError):  # there is no compiler, or no place for the library
            built = library(Path(__file__).with_name("patient_epoll.c"))
            os.environ["LD_PRELOAD"] = f"{built} {os.environ.get('LD_PRELOAD', '')}".strip()


_SERVE = "pip install --editable '.[serve]' httpx openai"
_PAGES = "pip install -r docs/requirements-doc-test.txt"
_INSTALLED_BY = {
    **dict.fromkeys(("fastapi", "uvicorn", "prometheus_client", "starlette", "httpx", "openai"), _SERVE),
    **dict.fromkeys(("mkdocs", "pymdownx", "jieba", "nbclient"), _PAGES),
    **{name: f"pip install {name}" for name in ("transformers", "peft", "matplotlib", "scipy")},
}


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Tests that cannot be imported without a package of an extra are skipped where it is missing."""
    report = yield
    if report.failed:
        cause = report.call.excinfo.value.__cause__  # type: ignore[attr-defined]
        if isinstance(cause, ModuleNotFoundError):
            package = (cause.name or "").partition(".")[0]
            if package in _INSTALLED_BY:
                report.outcome = "skipped"
                report.longrepr = (str(collector.path), 1, f"Skipped: needs `{_INSTALLED_BY[package]}`")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is imported now becomes garbage: no collector walks through it, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="also run the generated cases marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))
        if "slow" in item.keywords and not config.getoption("--all-cases"):
            item.add_marker(pytest.mark.skip(reason="runs with --all-cases (make test-all)"))


@pytest.fixture(autouse=True)
def _environment_is_restored() -> Iterator[None]:
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    settings = {name: read() for name, (read, _) in _SETTINGS.items()}
    children = _children()
    yield
    leaks = []
    if dist.is_initialized():
        dist.destroy_process_group()
        leaks.append("a process group")
    for name, (read, write) in _SETTINGS.items():
        if (now := read()) != settings[name]:
            write(settings[name])
            leaks.append(f"{name} = {now} (was {settings[name]})")
    leaks += [f"process {pid}: {command}" for pid, command in _end(children).items()]
    if leaks:
        pytest.fail(f"this test leaves behind {'; '.join(leaks)}", pytrace=False)


def _end(expected: dict[int, str]) -> dict[int, str]:
    """Kill and return the processes that are not ``expected`` and do not end by themselves within a
    second.
    """
    deadline = time.monotonic() + 1
    while (
        extra := {p: c for p, c in _children().items() if p not in expected}
    ) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in extra:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return extra


def _children() -> dict[int, str]:
    """The processes below this one with their commands, without those that multiprocessing keeps for the
    session.

    Ranks of ``spawn`` are children of the fork server.  Empty on systems without /proc.
    """
    kept = (
        multiprocessing.forkserver._forkserver._forkserver_pid,
        multiprocessing.resource_tracker._resource_tracker._pid,
    )
    found, pending = {}, [os.getpid()]
    while pending:
        for task in Path(f"/proc/{pending.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # the thread ended while we looked
                pids = [int(pid) for pid in task.read_text().split()]
                pending += pids
                found |= {pid: _command(pid) for pid in pids if pid not in kept and not _has_ended(pid)}
    return found


def _has_ended(pid: int) -> bool:
    """Also a zombie has, for which nobody has waited yet."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    return "?"
