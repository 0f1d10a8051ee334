"""The run that survives: killed at random steps and resumed, it ends with the weights of one that was not
disturbed.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from colossalai.testing import assert_equal
from tests.checkpoint_io.families import stored_tensors
from tests.cli.tools import Command, Result, free_port
from tests.examples.scripts import EXAMPLES, run_script

SCRIPT = EXAMPLES / "features" / "resume" / "train.py"
KILLED = Path(__file__).with_name("killed.py")
STEPS, SAVE_EVERY = 40, 3


def options(folder: Path, *more: object) -> tuple[object, ...]:
    return ("--folder", folder, "--steps", STEPS, "--save_every", SAVE_EVERY, *more)


def calm(folder: Path, *more: object, nprocs: int = 2) -> dict[int, float]:
    """The losses of a run that nobody disturbs."""
    found = losses(run_script("features/resume/train.py", *options(folder, *more), nprocs=nprocs))
    assert sorted(found) == list(range(1, STEPS + 1))
    return found


def killed(
    folder: Path, kills: list[tuple[int, int]], restarts: int, *more: object, nprocs: int = 2
) -> Result:
    """A run through the command line, in whose n-th start the n-th of ``kills`` happens."""
    launch = ("--nproc_per_node", nprocs, "--master_port", free_port(), "--max-restarts", restarts)
    script = (KILLED, json.dumps(kills), SCRIPT)
    return Command("run", *launch, *script, *options(folder, *more)).finish(60 + 60 * restarts)


def losses(text: str) -> dict[int, float]:
    """The loss of each step; a step that was made again must have had the same loss."""
    found: dict[int, float] = {}
    for step, loss in re.findall(r"^step (\d+) loss (\S+)$", text, re.MULTILINE):
        assert found.setdefault(int(step), float(loss)) == float(loss), (
            f"step {step} came again with another loss"
        )
    return found


def random_kills(count: int, seed: int, most: int) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    return [(draw.randrange(2), draw.randrange(most)) for _ in range(count)]


def check_killed_run(folder: Path, kills: list[tuple[int, int]], *more: object) -> None:
    expected_losses = calm(folder / "calm", *more)
    result = killed(folder / "killed", kills, len(kills), *more)
    assert result.code == 0, result
    assert result.survivors == {}
    assert losses(result.out) == expected_losses
    assert result.err.count("ended with exit code 137 (SIGKILL)") == len(kills), result
    assert f"restart {len(kills)} of {len(kills)}: all processes start again" in result.err
    assert re.findall(r"rank (\d) failed", result.err) == [str(rank) for rank, _ in kills]
    last = f"step-{STEPS:06d}"
    expected = dict(stored_tensors(folder / "calm" / last))
    for name, value in stored_tensors(folder / "killed" / last):
        assert_equal(value, expected.pop(name))
    assert not expected


def test_killed_twice_and_resumed(tmp_path: Path) -> None:
    check_killed_run(tmp_path, [(1, 8), (0, 4)], "--background")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["synchronous", "background"])
def test_killed_ten_times(tmp_path: Path, mode: str) -> None:
    kills = random_kills(
        10, seed=len(mode), most=7
    )  # most starts save once or twice, and the run outlives them all
    check_killed_run(tmp_path, kills, *(["--background"] if mode == "background" else []))


def test_resumed_with_fewer_processes(tmp_path: Path) -> None:
    still = ("--dropout", 0)  # the masks of two ranks are not those of one
    expected = calm(tmp_path / "calm", *still)
    broken = killed(tmp_path / "shrunk", [(1, 17)], 0, *still)
    assert broken.code == 137, broken
    resumed = run_script("features/resume/train.py", *options(tmp_path / "shrunk", *still), nprocs=1)
    assert "resumed after step 15" in resumed
    found = losses(broken.out) | losses(resumed)
    assert min(losses(resumed)) == 16
    assert found == pytest.approx(expected, rel=1e-5)
