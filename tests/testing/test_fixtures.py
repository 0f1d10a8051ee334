"""The fixtures and options of tests/conftest.py, tried out on small test files."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # some installed plugins take seconds to import
    pytester.makeconftest(Path(__file__).parents[1].joinpath("conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers =\n    slow: sampled out\n    gpu: needs CUDA\n")
    return pytester


def run(suite: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    suite.makepyfile(source)
    return suite.runpytest_inprocess("-p", "no:cacheprovider", "-rs", *options)


LEAKS = {
    "torch.set_default_dtype(torch.float64)": r"*default dtype = torch.float64 (was torch.float32)*",
    "torch.set_default_device('meta')": r"*default device = meta (was cpu)*",
    "torch.set_num_threads(torch.get_num_threads() + 1)": r"*number of threads = * (was *)*",
    "torch.use_deterministic_algorithms(True)": r"*deterministic algorithms = True (was False)*",
    "torch.backends.cudnn.deterministic = True": r"*cudnn.deterministic = True (was False)*",
    "torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark": r"*cudnn.benchmark = *",
    "torch.set_grad_enabled(False)": r"*gradient mode = False (was True)*",
    "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)": r"*a process group*",
    "subprocess.Popen(['sleep', '1000'])": r"*process *: sleep 1000*",
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_fails_the_test_that_caused_it_and_not_the_next(suite: pytest.Pytester, leak: str) -> None:
    result = run(
        suite,
        f"""
        import subprocess
        import torch
        import torch.distributed as dist

        def test_leaks():
            {leak}

        def test_next():
            assert not dist.is_initialized()
            assert torch.get_default_dtype() == torch.float32
            assert torch.ones(1, requires_grad=True).sum().requires_grad
        """,
    )
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(
        ["*ERROR at teardown of test_leaks*", f"this test leaves behind {LEAKS[leak]}"]
    )


def test_the_environment_is_restored(suite: pytest.Pytester) -> None:
    result = run(
        suite,
        """
        import os

        def test_changes():
            os.environ["LEAKED"] = "1"
            del os.environ["PATH"]

        def test_next():
            assert "LEAKED" not in os.environ
            assert os.environ["PATH"]
        """,
    )
    result.assert_outcomes(passed=2)


def test_ranks_and_processes_that_ended_are_no_leak(suite: pytest.Pytester) -> None:
    result = run(
        suite,
        """
        import os, subprocess
        from colossalai.testing import spawn
        from tests.testing.test_spawn import threads

        def test_spawns():
            spawn(threads, 2)

        def test_kills_without_waiting():
            subprocess.Popen(["sleep", "1000"]).kill()
        """,
    )
    result.assert_outcomes(passed=2)


CASES = """
from colossalai.testing import parametrize_sample

@parametrize_sample("x", range(10), 3)
def test_case(x): pass
"""


def test_the_sample_runs_by_default(suite: pytest.Pytester) -> None:
    result = run(suite, CASES)
    result.assert_outcomes(passed=3, skipped=7)
    result.stdout.fnmatch_lines(["*SKIPPED*runs with --all-cases (make test-all)*"])


def test_all_cases_run_on_request(suite: pytest.Pytester) -> None:
    run(suite, CASES, "--all-cases").assert_outcomes(passed=10)


def test_a_gpu_test_is_skipped_without_one(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run(suite, "import pytest\n@pytest.mark.gpu\ndef test_x(): assert False\n")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*SKIPPED*needs CUDA*"])


def test_skips_of_our_decorators_are_skips(suite: pytest.Pytester) -> None:
    source = """
    from colossalai.testing import run_on_environment_flag, skip_if_not_enough_gpus

    @skip_if_not_enough_gpus(min_gpus=1000)
    def test_a(tmp_path): assert False

    @run_on_environment_flag("NEVER_SET")
    def test_b(): assert False
    """
    result = run(suite, source)
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["*needs 1000 GPUs*", "*runs with NEVER_SET=1*"])
