"""`colossalai benchmark`."""

from __future__ import annotations

import io
import re
import signal
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from colossalai.cli.app import cli
from colossalai.cli.benchmark import command, runner
from colossalai.cli.benchmark.measure import MeasureRequest
from colossalai.cli.benchmark.models import MLP, BenchmarkBlock, ModelSizes
from colossalai.cli.benchmark.plans import BenchmarkPlan, all_plans
from colossalai.cli.spawned import progress
from colossalai.utils.memory.live_bytes import LiveBytes
from tests.cli.tools import Command, survivors, wait_until

TINY = ("-s", "4", "-d", "32", "-w", "1", "-p", "2", "-l", "1", "--device", "cpu", "--timeout", "60")


def invoke(*options: object) -> Result:
    return CliRunner().invoke(cli, ["benchmark", *map(str, options)])


def plans(devices: int) -> list[str]:
    return [str(plan) for plan in all_plans(devices)]


def test_every_configuration_of_a_device_count() -> None:
    assert plans(1) == ["size: 1, mode: None"]
    assert plans(4) == [
        "size: 1, mode: None",
        "size: 2, mode: 1d",
        "size: 4, mode: 1d",
        "size: 4, mode: 2d",
        "size: 4, mode: 2.5d, depth: 1",
    ]
    assert [p for p in plans(8) if "size: 8" in p] == [
        "size: 8, mode: 1d",
        "size: 8, mode: 2.5d, depth: 2",
        "size: 8, mode: 3d",
    ]
    assert "size: 4, mode: 2d" in plans(8)  # sizes that divide the count
    assert [p for p in plans(16) if "2.5d" in p and "size: 16" in p] == [
        "size: 16, mode: 2.5d, depth: 1",
        "size: 16, mode: 2.5d, depth: 4",
    ]
    assert not [p for p in plans(9) if "size: 2" in p or "size: 4" in p]
    assert BenchmarkPlan(8, "2.5d", 2).config == {
        "parallel": {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}
    }


def test_four_ranks_from_the_options_to_the_picture(tmp_path: Path) -> None:
    picture = tmp_path / "modes.png"
    result = invoke("-g", 4, "-b", 4, *TINY, "--model", "mlp", "-o", picture)
    assert result.exit_code == 0, result.output
    text = result.output
    assert text.startswith(
        "=== Benchmarking Parameters ===\ngpus: 4\nbatch_size: 4\nseq_len: 4\ndimension: 32\n"
    )
    assert re.findall(r"^=== (size.*) ===$", text, re.MULTILINE) == plans(4)
    sections = text.split("\n=== ")[1:6]
    lines = [
        r"Average forward time: \d+\.\d+ ms",
        r"Average backward time: \d+\.\d+ ms",
        r"Max allocated GPU memory: \d+\.\d+ MB \(no GPU: the tensors alive on the CPU, counted by us\)",
        r"Max cached GPU memory: none \(no GPU: .*\)",
        r"Bytes communicated: [\d,]+ forward, [\d,]+ backward, sent by each rank",
    ]
    for section in sections:
        assert re.fullmatch(r"size: .* ===\n" + "\n".join(lines) + r"\n*", section), section
    # one all-reduce of 4 x 4 x 32 floats forward and one backward: 2 (p - 1) / p
    sent = {4 * 4 * 32 * 4 * 2 * (p - 1) // p for p in (2, 4)}
    for section, expected in zip(sections[1:3], sorted(sent), strict=True):
        assert f"Bytes communicated: {expected:,} forward, {expected:,} backward" in section
    summary = text.partition("=== Summary ===\n")[2].splitlines()
    assert [line.split("  ")[0] for line in summary[:6]] == [
        "plan", "serial", "1d x2", "1d x4", "2d x4", "2.5d deep 1 x4",
    ]  # fmt: skip
    assert summary[1].endswith("1.00")
    assert text.endswith(f"picture: {picture}\n")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_plan_that_fails_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    # 3 rows cannot be shared by 2 rows of the grid
    result = invoke("-g", 4, "-b", 3, *TINY, "--model", "gpt", "-o", tmp_path / "gpt.png")
    assert result.exit_code == 0, result.output
    reason = r"failed: rank \d raised ValueError: a batch of 3 rows is shared by row=2 = 2 ranks"
    assert len(re.findall(rf"^{reason}", result.output, re.MULTILINE)) == 1
    assert re.search(r"^2d x4 +failed: rank", result.output, re.MULTILINE)
    assert re.search(r"^1d x4 +\d", result.output, re.MULTILINE)


def test_no_plan_works(tmp_path: Path) -> None:
    options = [*TINY[:2], "-d", "30", *TINY[4:]]  # 8 heads
    result = invoke("-g", 1, *options, "-m", "gpt", "-o", tmp_path / "x.png")
    assert result.exit_code == 1
    assert "dimension=30 cannot be shared by 8 heads; choose a multiple of 8" in result.output
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("model", ["gpt", "vit"])
@pytest.mark.parametrize("plan", [BenchmarkPlan(1, None), BenchmarkPlan(4, "2d")], ids=["serial", "2d"])
def test_models(model: str, plan: BenchmarkPlan) -> None:
    shape = ModelSizes(batch_size=4, seq_len=3, dimension=32, layers=1)
    request = MeasureRequest(model=model, shape=shape, warmup_steps=0, profile_steps=1, device="cpu")
    outcome = runner.run_plan(plan, request, timeout=60)
    assert outcome.error is None
    assert outcome.result is not None
    assert outcome.result.forward > 0
    assert (outcome.result.sent_backward > outcome.result.sent_forward > 0) == (plan.size > 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-g", "0"], "0 is not in the range x>=1"),
        (["--model", "resnet"], "'resnet' is not one of 'mlp', 'gpt', 'vit'"),
        (["--profile_steps", "0"], "0 is not in the range x>=1"),
        (["--output", "x.pdf"], "--output x.pdf: the picture is a .png file"),
        (["--output", "nowhere/x.png"], "--output nowhere/x.png: there is no folder .*nowhere"),
    ],
)
def test_bad_options(options: list[str], message: str) -> None:
    result = invoke(*options)
    assert result.exit_code != 0
    assert re.search(message, result.output), result.output
    assert "Benchmarking" not in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without GPU")
def test_devices_without_gpu() -> None:
    assert command._devices("auto", None) == ("cpu", 4)
    result = invoke("--device", "cuda")
    assert "Error: --device cuda: torch finds no GPU here; use --device cpu" in result.output


def test_devices_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert command._devices("auto", None) == ("cuda", 2)
    assert command._devices("cpu", 3) == ("cpu", 3)
    result = invoke("--gpus", 4)
    assert "Error: --gpus 4: this machine has 2; use --gpus 2, or --device cpu" in result.output


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert "matplotlib is not installed (pip install matplotlib)" in invoke("-o", "x.png").output
    result = invoke("-g", 1, *TINY)
    assert result.exit_code == 0, result.output
    assert result.output.endswith("no picture: matplotlib is not installed (pip install matplotlib)\n")
    assert list(tmp_path.iterdir()) == []


def test_help() -> None:
    text = invoke("--help").output
    for option in (
        "-g, --gpus",
        "-b, --batch_size",
        "-s, --seq_len",
        "-d, --dimension",
        "-w, --warmup_steps",
    ):
        assert option in text
    for option in (
        "-p, --profile_steps",
        "-l, --layers",
        "-m, --model [mlp|gpt|vit]",
        "--device",
        "-o, --output",
    ):
        assert option in text


def test_interrupted_leaves_no_process(tmp_path: Path) -> None:
    # a plan that would take an hour
    running = Command("benchmark", "-g", 2, "--device", "cpu", "-p", 10**6, "-s", 4, "-d", 32, cwd=tmp_path)
    # the command, the two helpers of multiprocessing, and a rank
    wait_until(lambda: len(survivors(running.mark)) >= 4, seconds=60, what="a rank")
    running.process.send_signal(signal.SIGINT)
    result = running.finish(30)
    assert result.code == 1
    assert "Aborted!" in result.err
    assert result.survivors == {}


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, ticks = Terminal(), tmp_path / "ticks"
    monkeypatch.setattr("sys.stderr", terminal)
    ticks.write_bytes(b"...")
    with progress(ticks, steps=7, every=0.01):
        wait_until(lambda: "3/7" in terminal.getvalue(), seconds=10, what="three steps")
    assert terminal.getvalue().endswith("\r")  # the bar is gone


def test_live_bytes() -> None:
    x, before = torch.ones(10), torch.ones(3)
    with LiveBytes() as live:
        live.hold([before])
        y = x * 2
        assert live.now == 12 + 40
        z = y.view(2, 5)  # no memory of its own
        del y
        assert live.now == 12 + 40
        z = z + 1
        assert (live.now, live.peak) == (12 + 40, 12 + 80)
    w = z + 1  # outside
    del z
    assert (live.now, len(w)) == (12, 2)


@pytest.mark.parametrize(
    "build", [lambda: MLP(32), lambda: BenchmarkBlock(32, 4, causal=True)], ids=["mlp", "block"]
)
def test_one_graph_with_one_rank(build: type[torch.nn.Module]) -> None:
    model = build()
    x = torch.randn(2, 4, 32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, model(x))
    compiled.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.gpu
def test_on_one_gpu(tmp_path: Path) -> None:
    picture = tmp_path / "gpu.png"
    result = invoke("-g", 1, "-b", 2, "-s", 64, "-d", 128, "-w", 1, "-p", 2, "-m", "gpt", "-o", picture)
    assert result.exit_code == 0, result.output
    for line in ("allocated", "cached"):
        found = re.search(rf"^Max {line} GPU memory: (\d+\.\d+) MB$", result.output, re.MULTILINE)
        assert found, result.output
        assert float(found.group(1)) > 8192 * 128 * 4 / 2**20  # the table alone
    assert "device: cuda" in result.output
    assert picture.exists()
