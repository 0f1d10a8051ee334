"""The examples that serve: options, lines, routes, and from training to an answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.serving.folders import write_opt

FOLDER = Path(__file__).parents[2] / "examples" / "tutorial" / "opt" / "inference"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER.parents[3])}


@pytest.mark.slow
def test_opt_fastapi_has_the_documented_options(tmp_path: Path) -> None:
    folder = write_opt(
        tmp_path / "opt", **{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
        ffn_dim=3072, word_embed_proj_dim=768, vocab_size=50272, max_position_embeddings=2048,
        bos_token_id=2, eos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    options = {
        **{"tp": 2, "master_host": "localhost", "master_port": 0, "rpc_port": 19980, "max_batch_size": 8},
        **{"pipe_size": 1, "queue_size": 4, "http_host": "127.0.0.1", "http_port": 0, "checkpoint": folder},
        **{"cache_size": 4, "cache_list_size": 1},
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-u", "opt_fastapi.py", "opt-125m", *words]
    process = subprocess.Popen(command, cwd=FOLDER, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.startswith("listening on "):
                break
        assert lines[:3] == ["", "==> Args:", "model = opt-125m"]
        assert {f"{name} = {value}" for name, value in options.items()} <= set(lines)
        url = lines[-1].split()[-1]
        body = {"prompt": "Hello", "max_tokens": 3, "top_k": 5, "top_p": 0.9, "temperature": 0.7}
        first = httpx.post(f"{url}/generation", json=body, timeout=100)
        assert first.json()["text"].startswith("Hello")
        assert httpx.post(f"{url}/generation", json=body, timeout=100).json() == first.json()
        assert httpx.post(f"{url}/generation", json={**body, "top_k": 0}).status_code == 422
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("program", ["opt_fastapi.py", "opt_server.py"])
def test_the_programs_refuse_in_one_line(tmp_path: Path, program: str) -> None:
    command = [sys.executable, program, "opt-125m", "--tokenizer", str(tmp_path), "--http_port", "0"]
    done = subprocess.run(command, cwd=FOLDER, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "holds no tokenizer; give the folder of one" in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith(f"{program}: ")
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[1:4] == ["==> Args:", "model = opt-125m", "tp = 1"]
    missing = [sys.executable, program, "opt-125m", "--checkpoint", str(tmp_path / "none")]
    told = subprocess.run(missing, cwd=FOLDER, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert told.stderr.splitlines()[-1] == f"{program}: there is no checkpoint {tmp_path / 'none'}"
    assert {"master_port = 19990", "rpc_port = 19980", "max_batch_size = 8", "cache_list_size = 1"} <= set(
        done.stdout.splitlines()
    )


@pytest.mark.slow
def test_from_training_to_an_answer() -> None:
    command = [sys.executable, "ask.py", "--epochs", "2", "--max_tokens", "5"]
    done = subprocess.run(command, cwd=FOLDER, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].startswith("The quick brown fox")
