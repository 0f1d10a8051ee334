"""The older names: models by their size, the service by its config file, and metaseq's file."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from colossalai.cli.app import cli
from energonai import BatchManagerForGeneration, Executor, InferenceEngine, launch_engine
from energonai.context import ServiceConfig
from energonai.context.config import ConfigError
from energonai.model import bert_small, gpt2_small, opt_125M
from energonai.service import launch_service
from tests.serving.folders import write_opt

TINY = {
    **{"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "ffn_dim": 64, "vocab_size": 300},
    **{"max_position_embeddings": 128, "word_embed_proj_dim": 32},
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 256),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_opt(tmp_path_factory.mktemp("opt"))


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """What transformers writes, the prompt included."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
            if ids[0, -1] == 256:
                break
    return ids[0].tolist()


def request(ids: list[int], most: int) -> dict[str, Any]:
    return {"input_ids": ids, "max_tokens": most, "top_k": 1}


@pytest.mark.parametrize(
    ("tp", "pp"), [(2, 1), *(pytest.param(*c, marks=pytest.mark.slow) for c in ((1, 1), (1, 2), (2, 2)))]
)
def test_opt_in_batches_writes_what_transformers_writes(folder: Path, tp: int, pp: int) -> None:
    manager = BatchManagerForGeneration(max_batch_size=4, pad_token_id=1)
    engine = launch_engine(
        tp, pp, "localhost", 0, 0, opt_125M, batch_manager=manager, checkpoint=str(folder), **TINY
    )
    assert engine is not None
    try:
        prompts = [[72, 101], [5], list(range(40, 60)), [9, 8, 7]]
        for i, prompt in enumerate(prompts):
            engine.submit(i, request(prompt, 8 - i))
        for i, prompt in enumerate(prompts):
            assert engine.get(i).tolist() == greedy(folder, prompt, 8 - i)
        engine.submit("long", request([1] * 125, 8))
        assert len(engine.get("long")) <= 128  # a row ends where the model has no more positions
        engine.submit("longer", request([1] * 129, 8))
        with pytest.raises(ValueError, match="128"):
            engine.get("longer")
        engine.submit("scores", {"input_ids": torch.tensor([[5, 6]])})
        engine.submit("again", request([5], 4))
        assert engine.get("again").tolist() == greedy(folder, [5], 4)
    finally:
        engine.shutdown()


def test_inference_engine_and_executor(folder: Path) -> None:
    engine = InferenceEngine(
        opt_125M, {"checkpoint": str(folder), **TINY}, "gpt", port=0, dtype=torch.float32
    )
    try:
        assert engine.run({"input_ids": torch.tensor([[5, 6, 7]])}).to_here()["logits"].shape == (1, 3, 300)
        executor = Executor(engine, pad_token_id=1, max_batch_size=4)
        executor.start()
        handles = [executor.submit({"input_ids": [5, 6, i]}, 6, top_k=1) for i in range(7, 10)]
        rows = [asyncio.run(executor.wait(handle)).tolist() for handle in handles]
        assert rows == [greedy(folder, [5, 6, i], 6) for i in range(7, 10)]
        executor.teardown()
    finally:
        engine.shutdown()


def test_gpt_and_bert_run_forward() -> None:
    small = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50}
    scores = gpt2_small(**small)(torch.tensor([[1, 2]])).logits
    assert scores.shape == (1, 2, 50)
    assert not scores.requires_grad
    again = gpt2_small(**small)(torch.tensor([[1, 2]])).logits
    torch.testing.assert_close(scores, again)  # without a checkpoint weights are alike on all ranks
    tiny = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    states = bert_small(**tiny, vocab_size=50)(input_ids=torch.tensor([[1, 2]])).last_hidden_state
    assert states.shape == (1, 2, 16)


def as_metaseq(folder: Path) -> dict[str, Tensor]:
    """The weights of an OPT of transformers as metaseq stores them."""
    from safetensors.torch import load_file

    state = {
        name.removeprefix("model."): value for name, value in load_file(folder / "model.safetensors").items()
    }
    state.pop("lm_head.weight", None)
    for name in [name for name in state if ".q_proj." in name]:
        kinds = [state.pop(name.replace("q_proj", kind)) for kind in ("k_proj", "v_proj", "q_proj")]
        state[name.replace("q_proj", "qkv_proj")] = torch.cat(kinds)
    for end in ("weight", "bias"):
        state[f"decoder.layer_norm.{end}"] = state.pop(f"decoder.final_layer_norm.{end}")
    return {"decoder.version": torch.tensor([3.0]), **state}


def test_metaseq_is_converted_and_opened(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    state = as_metaseq(folder)
    torch.save({"cfg": {"model": {"name": "opt"}}, "model": state}, tmp_path / "restored.pt")
    command = [
        "ckpt",
        "convert",
        str(tmp_path / "restored.pt"),
        str(tmp_path / "new"),
        "--config",
        str(folder),
    ]
    assert CliRunner().invoke(cli, command, catch_exceptions=False).exit_code == 0
    ids = torch.arange(12).view(1, -1)
    want = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "new")(ids).logits, want)
    for path in (tmp_path, tmp_path / "restored.pt"):
        torch.testing.assert_close(opt_125M(checkpoint=path, **TINY)(ids).logits, want.detach())
    with pytest.raises(ValueError, match="another size"):
        opt_125M(checkpoint=tmp_path, **{**TINY, "ffn_dim": 128})
    torch.save({"model": {**state, "decoder.layers.0.adapter.weight": torch.ones(1)}}, tmp_path / "more.pt")
    failed = CliRunner().invoke(cli, ["ckpt", "convert", str(tmp_path / "more.pt"), str(tmp_path / "other")])
    assert failed.exit_code == 1
    assert "decoder.layers.0.adapter.weight has no place" in failed.output
    assert not (tmp_path / "other").exists()


CONFIG = """
from beside import opt_125M


def model_class(**options):
    return opt_125M(**options)


model_type = "gpt"
host, port = "localhost", 0
half = False
checkpoint = {folder!r}
backend = "gloo"
tp_init_size, pp_init_size = 2, 1
tokenizer_path = {folder!r}
server_host, server_port = "127.0.0.1", 0
log_level = "critical"
allow_cors = True
executor_max_batch_size = 16
cache_size, cache_list_size = 50, 1
timeout_keep_alive = 180
executor_max_queue_size = 0
fixed_cache_keys = [("Hello", 4)]
model_kwargs = {sizes!r}
"""


def test_a_config_file_is_served(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("from energonai.model import opt_125M")
    (tmp_path / "opt_config.py").write_text(CONFIG.format(folder=str(folder), sizes=TINY))
    process = subprocess.Popen(
        [
            sys.executable,
            "-u",
            "-m",
            "energonai",
            "service",
            "init",
            f"--config_file={tmp_path / 'opt_config.py'}",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("listening on "):
                break
        assert lines[0] == "*** Energon Init Configurations: ***\n"
        assert "cache_size\t:\t50\n" in lines
        url = lines[-1].split()[-1]
        body = {"prompt": "Hello", "max_tokens": 4}
        first = httpx.post(f"{url}/generation", json=body, timeout=60).json()["text"]
        assert first.startswith("Hello")
        assert {httpx.post(f"{url}/generation", json=body).json()["text"] for _ in range(5)} == {first}
        assert httpx.post(f"{url}/generation", json={"prompt": "Hello", "max_tokens": 0}).status_code == 422
        assert httpx.post(f"{url}/generation", json={"prompt": "x" * 400, "max_tokens": 4}).status_code == 422
        assert httpx.get(f"{url}/docs").status_code == 200
        assert httpx.get(f"{url}/health").json() == {"status": "ready"}
        metrics = httpx.get(f"{url}/metrics").text
        assert "colossalai_up 1.0" in metrics
        assert "colossalai_output_tokens_total 0.0" not in metrics
        assert 'colossalai_finished_total{reason="error"} 1.0' in metrics
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_an_engine_server_that_returns_no_engine(folder: Path) -> None:
    where = {"tokenizer_path": str(folder), "server_host": "127.0.0.1", "server_port": 0}
    config = ServiceConfig({"model_class": opt_125M, "engine_server": lambda model_class: None, **where})
    with pytest.raises(ConfigError, match="returned None; it returns an AsyncEngine"):
        launch_service(config)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "needs model_class"),
        ({"model_class": opt_125M}, "needs tokenizer_path"),
        ({"modle_class": 1}, "unknown variables .*modle_class"),
        ({"model_class": opt_125M, "rm_padding": True}, "rm_padding=True is not offered"),
        ({"model_class": opt_125M, "max_batch_size": 8}, "executor_max_batch_size=32 .* more than"),
        ({"model_class": opt_125M, "host": "10.0.0.2"}, "all on this machine"),
    ],
)
def test_configs_that_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServiceConfig(values)
