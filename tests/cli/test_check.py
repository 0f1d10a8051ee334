"""`colossalai check`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from colossalai._version import __version__
from colossalai.cli import installation
from colossalai.cli.app import cli
from colossalai.cli.check import render
from colossalai.cli.installation import Component, Row, Section, cuda_match
from tests.cli.tools import ROOT

TITLES = [
    "Environment",
    "CUDA Extensions AOT Compilation",
    "Compatibility",
    "Communication",
    "Kernels",
    "Optional Components",
]


def report(*options: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, ["check", *options])
    assert result.exit_code == code, result.output
    return result.output


def value(text: str, label: str) -> str:
    found = re.search(rf"^{re.escape(label)}[^:]*: (\S+)", text, re.MULTILINE)
    assert found, text
    return found.group(1)


def test_sections_and_versions() -> None:
    text = report("-i")
    assert text.startswith("#### Installation Report ####\n")
    assert re.findall(r"^-{12} (.*) -{12}$", text, re.MULTILINE) == TITLES
    assert value(text, "Colossal-AI version") == __version__
    assert value(text, "PyTorch version") == torch.__version__
    assert value(text, "CUDA version required by PyTorch") == (torch.version.cuda or "N/A")
    assert value(text, "PyTorch version match") == "\u2713"
    assert value(text, "gloo") == "\u2713"
    assert value(text, "Fused AdamW") == "\u2713"
    assert report() == report("--installation") == text


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without GPU")
def test_without_gpu() -> None:
    text = report("-i")
    for label in ("GPU", "NCCL", "Triton", "FP8 matrix products", "PyTorch can compute on the GPU"):
        assert value(text, label) == "N/A"


@pytest.mark.gpu
def test_with_gpu() -> None:
    text = report("-i")
    assert torch.cuda.get_device_name(0) in text
    for label in ("NCCL", "PyTorch can compute on the GPU", "Flash attention"):
        assert value(text, label) == "\u2713"


def test_terminal_without_check_marks() -> None:
    sections = [
        Section(title="T", rows=[Row(label="a", value=True), Row(label="b", value=False, remark="buy one")])
    ]
    assert render(sections, "utf-8").endswith("a: \u2713\nb: x (buy one)")
    assert render(sections, "ascii").endswith("a: OK\nb: x (buy one)")


def test_old_torch_is_told_by_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    assert value(report("-i", code=1), "PyTorch version match") == "x"


@pytest.mark.parametrize(
    ("system", "pytorch", "match"), [("13.0", "13.2", True), ("12.8", "13.0", False), (None, "13.0", None)]
)
def test_cuda_versions(system: str | None, pytorch: str, match: bool | None) -> None:
    assert cuda_match(system, pytorch).value is match


def test_system_cuda_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert installation.system_cuda_version() is None
    nvcc.parent.mkdir()
    nvcc.write_text('#!/bin/sh\necho "Cuda compilation tools, release 13.0, V13.0.88"\n')
    nvcc.chmod(0o755)
    assert installation.system_cuda_version() == "13.0"


def test_missing_components_say_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Component(name="no-such-program", purpose="p", how="apt-get install it", is_program=True)
    package = Component(name="no_such_package", purpose="q", how="pip install it")
    monkeypatch.setattr(installation, "COMPONENTS", (program, package))
    text = report("-i")
    assert "no-such-program: x (p: apt-get install it)" in text
    assert "no_such_package: x (q: pip install it)" in text


def test_oldest_versions_are_those_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert f'"torch>={installation.OLDEST_TORCH}",' in project
    assert f'requires-python = ">={installation.OLDEST_PYTHON}"' in project


def test_the_command_does_not_wait_for_torch() -> None:
    code = "import sys, colossalai.cli.app; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_bandwidth_of_processes_that_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    text = report("--bandwidth", "--device", "cpu")
    lines = [line.split() for line in text.splitlines() if line.startswith("this machine")]
    assert [line[3] for line in lines] == ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
    assert all(line[2] == "2" and float(line[4]) > 0 and float(line[5]) > 0 for line in lines)
    assert "Installation Report" not in text


def test_bandwidth_in_a_job(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "colossalai", "run", "--nproc_per_node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [*command, "-m", "colossalai", "check", "--bandwidth"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("Bandwidth Report (cpu)") == 1  # of rank 0
    assert run.stdout.count("this machine") == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "2"], "belong to --bandwidth"),
        (["--bandwidth", "--ranks", "1"], "1 is not in the range x>=2"),
        (["--bandwidth", "--device", "cuda", "--ranks", "99"], "links of 99 GPUs are asked for"),
    ],
)
def test_options_of_bandwidth_that_are_refused(options: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["check", *options])
    assert result.exit_code != 0
    assert message in result.output
