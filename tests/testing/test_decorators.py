from __future__ import annotations

import inspect
import socket

import pytest
import torch

from colossalai.testing import (
    RankError,
    clear_cache_before_run,
    free_port,
    parameterize,
    rerun_if_address_is_in_use,
    rerun_on_exception,
    run_on_environment_flag,
    skip_if_not_enough_gpus,
    spawn,
)
from colossalai.testing.random import seed_all


def test_parameterize_runs_all_combinations_in_one_call() -> None:
    seen = []

    @parameterize("a", [1, 2])
    @parameterize("b", iter("xy"))
    def function(a: int, b: str, scale: int) -> None:
        seen.append((a * scale, b))

    function(scale=10)
    function(scale=1)
    assert seen == [(10, "x"), (10, "y"), (20, "x"), (20, "y"), (1, "x"), (1, "y"), (2, "x"), (2, "y")]
    assert list(inspect.signature(function).parameters) == ["scale"], "pytest takes the rest for fixtures"


@parameterize("number", [1, 2, 3])
def odd_only(rank: int, world_size: int, port: int, number: int) -> None:
    if number % 2 == 0:
        raise ValueError("even")


def test_parameterize_names_the_value_that_failed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankError, match="even"):
        spawn(odd_only, 1)
    assert "[rank 0] odd_only failed with number = 2" in capsys.readouterr().err


def test_parameterize_needs_the_argument() -> None:
    with pytest.raises(
        TypeError, match=r"parameterize\('c', ...\) needs a function with that argument, but f has \(a\)"
    ):

        @parameterize("c", [1])
        def f(a: int) -> None: ...


class Flaky:
    def __init__(self, failures: int, error: Exception) -> None:
        self.failures, self.error, self.calls = failures, error, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return "done"


def rerun(flaky: Flaky, **options: object) -> str:
    def function() -> str:
        return flaky()

    return rerun_on_exception(**options)(function)()


def test_rerun_until_it_works(capsys: pytest.CaptureFixture[str]) -> None:
    flaky = Flaky(2, ValueError("busy now"))
    assert rerun(flaky, exception_type=ValueError, pattern="busy", max_try=3) == "done"
    assert flaky.calls == 3
    assert "function failed at try 2 and runs again: busy now" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({"exception_type": ValueError, "max_try": 2}, 2),
        ({"exception_type": ValueError}, 5),
        ({"exception_type": KeyError}, 1),
        ({"exception_type": ValueError, "pattern": "another"}, 1),
    ],
)
def test_rerun_lets_the_exception_through(options: dict, calls: int) -> None:
    flaky = Flaky(100, ValueError("busy"))
    with pytest.raises(ValueError, match="busy"):
        rerun(flaky, **options)
    assert flaky.calls == calls


def test_rerun_without_end() -> None:
    assert rerun(Flaky(50, OSError("no")), exception_type=OSError, max_try=None) == "done"


def test_rerun_refuses_no_tries() -> None:
    with pytest.raises(ValueError, match="max_try counts the calls and is at least 1, got 0"):
        rerun_on_exception(ValueError, max_try=0)


def test_rerun_when_the_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        ports = [taken, taken, free_port()]

        @rerun_if_address_is_in_use()
        def listen() -> int:
            port = ports.pop(0)
            torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            return port

        assert listen() != taken
        assert ports == []


def test_a_free_port_can_be_bound() -> None:
    with socket.create_server(("127.0.0.1", free_port())):
        pass


def test_too_few_gpus_skip_the_test() -> None:
    calls = []
    skip_if_not_enough_gpus(0)(lambda: calls.append(1))()
    assert calls == [1]
    with pytest.raises(pytest.skip.Exception, match=r"needs 1000 GPUs, this machine has \d+"):
        skip_if_not_enough_gpus(1000)(lambda: calls.append(2))()
    assert calls == [1]


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    test = run_on_environment_flag("NIGHTLY")(lambda: "ran")
    monkeypatch.setenv("NIGHTLY", "1")
    assert test() == "ran"
    monkeypatch.setenv("NIGHTLY", "0")
    with pytest.raises(pytest.skip.Exception, match="runs with NIGHTLY=1 in the environment"):
        test()


def test_clear_cache_calls_the_function() -> None:
    assert clear_cache_before_run()(lambda x: x + 1)(1) == 2


@pytest.mark.gpu
def test_clear_cache_restarts_the_statistics() -> None:
    before = torch.cuda.memory_allocated()  # what earlier tests still hold
    x = torch.ones(1 << 26, device="cuda")
    del x
    assert torch.cuda.max_memory_allocated() >= before + (1 << 28)
    assert clear_cache_before_run()(torch.cuda.max_memory_allocated)() < before + (1 << 28)
    assert torch.cuda.memory_reserved() < before + (1 << 28)


def test_seed_all_repeats_every_generator() -> None:
    import random

    import numpy

    def draw() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), torch.rand(()).item()

    seed_all(7)
    first = draw()
    assert draw() != first
    seed_all(7)
    assert draw() == first


def test_seed_all_can_fix_the_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    seed_all(7)
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (False, True)
    seed_all(7, cuda_deterministic=True)
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)
