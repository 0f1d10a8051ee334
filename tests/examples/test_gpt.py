"""examples/language/gpt: every config runs through the real command, learns text, and can be played at full
size.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from colossalai.context import Config
from colossalai.context.config import ConfigException
from colossalai.testing import RankError, parametrize_sample
from tests.cli.tools import environment_with_package
from tests.examples.scripts import EXAMPLES, run_script

FOLDER = EXAMPLES / "language" / "gpt"
TRAIN = "language/gpt/train_gpt.py"
PP1D = "gpt2_configs/gpt2_pp1d.py"

# config, processes, changes of the file
RUNS: list[tuple[str, int, dict[str, str]]] = [
    ("gpt2_configs/gpt2_vanilla.py", 2, {}),
    ("gpt2_configs/gpt2_1d.py", 2, {}),
    ("gpt2_configs/gpt2_2d.py", 4, {}),
    ("gpt2_configs/gpt2_2p5d.py", 2, {}),
    ("gpt2_configs/gpt2_3d.py", 8, {}),
    ("gpt2_configs/gpt2_pp.py", 2, {}),
    (PP1D, 4, {}),
    (PP1D, 8, {}),
    (PP1D, 2, {"MODE": "None", "TENSOR_PARALLEL": "1"}),
    (PP1D, 8, {"MODE": "'2d'", "TENSOR_PARALLEL": "4"}),
    (PP1D, 8, {"MODE": "'2.5d'", "TENSOR_PARALLEL": "4"}),
    (PP1D, 16, {"MODE": "'3d'", "TENSOR_PARALLEL": "8"}),
    ("gpt2_configs/gpt2_zero2.py", 2, {}),
    ("gpt2_configs/gpt2_zero3.py", 2, {}),
    ("gpt2_configs/gpt2_nvme.py", 2, {}),
    ("gpt2_configs/gpt2_zero3_pp1d.py", 8, {}),
    ("gpt3_configs/gpt3_zero3.py", 2, {}),
    ("gpt3_configs/gpt3_zero3_min.py", 2, {}),
    ("gpt3_configs/gpt3_pp1d.py", 8, {}),
    ("gpt3_configs/gpt3_pp1d_min.py", 8, {}),
    ("gpt3_configs/gpt3_pp2d.py", 8, {}),
    ("gpt3_configs/gpt3_pp2p5d.py", 8, {}),
]
# the quick ones first: CI takes the first
FULL_SIZE = sorted(
    (f"gpt3_configs/{path.name}" for path in (FOLDER / "gpt3_configs").glob("*.py")), reverse=True
)


def changed(config: str, changes: dict[str, str], folder: Path) -> Path:
    """A copy of ``config`` with other values of some variables."""
    text = (FOLDER / config).read_text()
    for name, value in changes.items():
        text, count = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value}", text)
        assert count == 1, name
    path = folder / Path(config).name
    path.write_text(text)
    return path


@parametrize_sample("config, nprocs, changes", RUNS, n=2)
def test_every_config_trains(config: str, nprocs: int, changes: dict[str, str], tmp_path: Path) -> None:
    path = changed(config, changes, tmp_path)
    options = ["--config", path, "--from_torch", "-s", "--tiny", "--max_steps", 2]
    text = run_script(TRAIN, *options, nprocs=nprocs)
    lines = ["Build data loader", "Build model", "Build optimizer", "Init done, global batch size = "]
    assert [line for line in lines if line in text] == lines


def test_the_documented_command_learns_text(tmp_path: Path) -> None:
    """The beginning of a source of Python's, as a line of JSON."""
    text = Path(json.decoder.__file__).read_text()[:5000]
    (tmp_path / "webtext.jsonl").write_text(json.dumps({"text": text}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["train_gpt.py", "--config=gpt2_configs/gpt2_2p5d.py", "--from_torch", "--tiny"]
    environment = {**environment_with_package(), "DATA": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(x) for x in re.findall(r"/ Train\]: Loss = ([\d.]+) ", done.stdout + done.stderr)]
    assert len(losses) == 2
    assert losses[1] < losses[0] - 0.3, "guessing among 512 words is 6.2"


def dry_run(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "train_gpt.py", "--dry-run", *map(str, options)]
    return subprocess.run(
        command, cwd=FOLDER, env=environment_with_package(), capture_output=True, text=True, check=False
    )


@parametrize_sample("config", FULL_SIZE, n=1)
def test_gpt3_at_full_size_without_a_gpu(config: str) -> None:
    start = time.monotonic()
    done = dry_run("--config", config, "--memory", 40)
    assert done.returncode == 0, done.stderr[-3000:]
    assert time.monotonic() - start < 120
    assert "100%" in done.stderr, "a progress bar"
    gpus, gib = re.findall(
        rf"\| `{Path(config).name}` \| (\d+) .* \| ([\d.]+)[^|]*\|$", README, re.MULTILINE
    )[0]
    assert f"{config} on {gpus} ranks" in done.stdout
    assert f"needs most: {gib} GiB" in done.stdout, done.stdout


def test_zero_in_a_pipeline_at_full_size() -> None:
    done = dry_run("--config", "gpt2_configs/gpt2_zero3_pp1d.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "host MiB" in done.stdout


README = (FOLDER / "README.md").read_text()


def test_a_plan_that_does_not_fit(tmp_path: Path) -> None:
    small = dry_run("--config", "gpt2_configs/gpt2_vanilla.py", "--memory", 1)
    assert small.returncode == 1
    assert "this is more than --memory 1 GiB" in small.stderr
    path = changed(PP1D, {"BATCH_SIZE": "6", "MODE": "'2d'", "TENSOR_PARALLEL": "16"}, tmp_path)
    uneven = dry_run("--config", path)
    assert uneven.returncode != 0
    assert re.search(r"= 6 rows, which tensor mode '2d' of size 16 divides among 4 ranks", uneven.stderr)
    deep = dry_run("--config", changed(PP1D, {"PIPELINE": "13"}, tmp_path))
    assert deep.returncode != 0
    assert "the model has 12 layers, but 13 pipeline stages" in deep.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"NUM_MICRO_BATCHES": "3"}, "NUM_MICRO_BATCHES = 3 does not divide BATCH_SIZE = 8"),
        ({"BATCH_SIZE": "0"}, "BATCH_SIZE must be a positive integer, got 0"),
        ({"loss_fn": "None"}, "the config has no loss"),
        ({"model": "None"}, "the config has no model"),
    ],
)
def test_wrong_variables(
    changes: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import parts as gpt_parts

    try:
        with pytest.raises(ConfigException, match=re.escape(message)):
            gpt_parts.check_config(Config.from_file(changed(PP1D, changes, tmp_path)))
    finally:
        del sys.modules["parts"]  # other examples have one as well


def test_wrong_processes_shape_and_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--from_torch", "-s"]
    with pytest.raises(RankError, match=r"world size 3 is not a multiple of pipeline 2 x tensor 2 = 4"):
        run_script(TRAIN, "--config", FOLDER / PP1D, *options, nprocs=3)
    shape = changed("gpt3_configs/gpt3_pp2d.py", {"TENSOR_SHAPE": "(1, 2, 3)"}, tmp_path)
    found = dry_run("--config", shape)
    assert re.search(r"TENSOR_SHAPE = \(1, 2, 3\) is neither what a stage returns", found.stderr)
    with pytest.raises(RankError, match=r"--config is needed"):
        run_script(TRAIN, *options)
    missing = subprocess.run(
        [sys.executable, "train_gpt.py", "--config", PP1D, "--from_torch"],
        cwd=FOLDER,
        env={key: value for key, value in environment_with_package().items() if key != "DATA"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert missing.returncode == 2
    assert "set the environment variable DATA to a file or folder with text, or pass -s" in missing.stderr
    with pytest.raises(RankError, match=r"there is no text at nowhere"):
        run_script(
            TRAIN,
            "--config",
            FOLDER / "gpt2_configs/gpt2_vanilla.py",
            "--from_torch",
            "--tiny",
            data=Path("nowhere"),
        )


def test_the_table_of_the_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import memory_table as m; page = m.PAGE.read_text();"
        "new = m.write_into(page, m.table({c.key: m.predict(c) for c in m.CASES}, m.read_measured()));"
        "assert new == page, 'run python memory_table.py --write'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=FOLDER,
        env=environment_with_package(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
