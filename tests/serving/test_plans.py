"""A model behind ranks writes what it writes in one process, under every plan, also with a new rank."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from colossalai.cli.app import cli
from colossalai.serving import Answer, Generation, Job, Service
from colossalai.serving.loading import FolderError, build_generator, inspect_folder
from tests.serving.folders import write_opt

PROMPTS = [[72, 101, 108, 108, 111], [5], list(range(40, 70)), [9, 8, 7, 9, 8, 7]]
LENGTH = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_opt(tmp_path_factory.mktemp("opt"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """What transformers writes, one prompt at a time, in this process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    rows = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(LENGTH):
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
        rows.append(ids[0, len(prompt) :].tolist())
    return rows


def written(service: Service, sampling: dict[str, Any]) -> list[list[int]]:
    answers: queue.Queue[Answer] = queue.Queue()
    asked = {
        service.ask("generate", {"prompt": prompt, "sampling": sampling}, answers.put): i
        for i, prompt in enumerate(PROMPTS)
    }
    rows: list[list[int]] = [[] for _ in PROMPTS]
    left = len(asked)
    while left:
        got = answers.get(timeout=60)
        assert got.failure is None, got
        assert "error" not in got.value, got
        rows[asked[got.uid]] += got.value["tokens"]
        left -= got.last
    return rows


PLANS = [(1, 1), (2, 2)]
MORE = [(2, 1), (4, 1), (1, 2), (1, 4)]


@pytest.mark.parametrize(
    ("tp", "pp"), [*PLANS, *(pytest.param(*plan, marks=pytest.mark.slow) for plan in MORE)]
)
def test_a_plan_writes_what_one_process_writes(
    folder: Path, expected: list[list[int]], tp: int, pp: int
) -> None:
    job = Job(Generation, {"build": build_generator, "options": {"path": str(folder)}}, tp=tp, pp=pp)
    service = Service(job)
    service.start()
    try:
        greedy = {"max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True}
        assert written(service, greedy) == expected
        drawn = written(service, {"max_tokens": LENGTH, "seed": 5, "ignore_eos": True})
        os.kill(service.pids[tp * pp - 1], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while service.restarted == 0 or service.state != "ready":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert written(service, greedy) == expected
        assert written(service, {"max_tokens": LENGTH, "seed": 5, "ignore_eos": True}) == drawn
    finally:
        service.close()


def test_a_folder_is_looked_at(folder: Path) -> None:
    found = inspect_folder(folder, tp=4, pp=2)
    assert found.max_length == 128
    assert found.tokenizer("Hi")["input_ids"] == [39, 72]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ("", {"tp": 3}, r"--tp 3 does not divide the model's 4 attention heads; \[1, 2, 4\] do"),
        ("", {"pp": 5}, "--pp 5 is more than the model's 4 layers"),
        ("", {"max_length": 500}, "--max-length 500 is more than the 128 positions"),
        ("rm tokenizer.json tokenizer_config.json", {}, "holds no tokenizer.*--tokenizer"),
        ("rm model.safetensors", {}, "holds no weights"),
        ("mv model.safetensors pytorch_model.bin", {}, "holds pickles.*colossalai ckpt convert"),
        ("rm config.json", {}, "config.json cannot be read"),
        ("echo { > config.json", {}, "config.json cannot be read"),
        ('sed -i \'s/"opt"/"vit"/\' config.json', {}, "no model that continues texts"),
        ("sed -i 's/{/{\"auto_map\": {},/' config.json", {}, "run code of its own"),
        (
            'sed -i \'s/"vocab_size": 300/"vocab_size": 100/\' config.json',
            {},
            "tokenizer .* knows 257 tokens",
        ),
    ],
)
def test_folders_that_cannot_be_served(
    folder: Path, tmp_path: Path, change: str, options: dict[str, Any], message: str
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    subprocess.run(change, shell=True, cwd=copy, check=True)
    with pytest.raises(FolderError, match=message):
        inspect_folder(copy, **options)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="is not a folder"):
        inspect_folder(tmp_path / "missing")


def test_the_command_refuses_in_one_line(folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, message in (
            ([str(tmp_path / "missing"), "--port", "0"], "is not a folder"),
            ([str(folder), "--port", port], f"cannot listen on 127.0.0.1:{port}"),
            ([str(folder), "--port", "0", "--tensor_parallel_size", "3"], "--tp 3 does not divide"),
            ([str(folder), "--port", "0", "--chat-template", str(tmp_path / "missing")], "No such file"),
            ([str(folder), "--port", "0", "--api-key", " "], "api_key must be"),
        ):
            done = CliRunner().invoke(cli, ["serve", *arguments])
            assert done.exit_code == 1
            assert len(done.output.splitlines()) == 1, done.output
            assert message in done.output
