"""Models of transformers with experts equal the serial ones: losses, gradients and weights, under every plan."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import colossalai
from colossalai.checkpoint_io import load_pretrained
from colossalai.core import global_context as gpc
from colossalai.mesh import serial_tensor
from colossalai.testing import spawn
from colossalai.testing.parity import Problem, Tolerance, check_plan

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")

from tests.nn.policies.expert_models import (  # noqa: E402
    CONFIGS,
    SAMPLES,
    Seen,
    batch,
    build,
    in_double,
    launched,
    mean_over_ranks,
    train,
)
from tests.pipeline.hugging_face import StagedRun  # noqa: E402

TENSOR = {"size": 2, "mode": "1d"}
PLANS: dict[str, tuple[dict[str, Any], int]] = {
    "dp2": ({}, 2),
    "tp2": ({"tensor": TENSOR}, 2),
    "ep2": ({"moe": {"size": 2}}, 2),
    "ep2-dp2": ({"moe": 2}, 4),
    "ep4": ({"moe": 4}, 4),
    "ep2-tp2": ({"moe": 2, "tensor": TENSOR}, 4),
    "ep2-sp2": ({"moe": 2, "sequence": 2}, 4),
}
UNCUT = ("gpt_oss",)  # families whose sequences are not cut


@cache
def serial(name: str) -> Seen:
    return train(build(name))


def check(name: str, want: Seen, got: Seen) -> None:
    close = {"rtol": 1e-9, "atol": 1e-10, "msg": lambda text: f"{name}: {text}"}
    torch.testing.assert_close([mean_over_ranks(x) for x in got.losses], want.losses, **close)
    torch.testing.assert_close(got.aux, want.aux, **close)
    torch.testing.assert_close(got.grads, want.grads, **close)
    torch.testing.assert_close(got.weights, want.weights, **close)


def _compare(parallel: dict[str, Any], expected: dict[str, Seen], **place: Any) -> None:
    samples = launched(parallel)
    for name, want in expected.items():
        model = build(name)
        with in_double(model):  # what is compared here as well
            colossalai.nn.parallelize(model)
        check(name, want, train(model, samples))


@pytest.mark.parametrize("plan", PLANS)
def test_equal_to_serial(plan: str) -> None:
    parallel, ranks = PLANS[plan]
    names = [name for name in CONFIGS if "sp" not in plan or name not in UNCUT]
    spawn(partial(_compare, parallel, {name: serial(name) for name in names}), ranks)


def _round_trip(folder: str, **place: Any) -> None:
    launched({"moe": 2, "tensor": TENSOR})
    for name in ("mixtral", "deepseek_v3", "gpt_oss"):
        serial_model = build(name)
        path = f"{folder}/{name}"
        colossalai.nn.parallelize(build(name)).save_pretrained(path)
        opened = type(serial_model).from_pretrained(path, dtype=torch.float64)
        want = serial_model.state_dict()
        assert opened.state_dict().keys() == want.keys()
        assert all(torch.equal(value, want[key]) for key, value in opened.state_dict().items()), name
        cut = colossalai.nn.parallelize(opened)
        with torch.device("meta"):
            empty = type(serial_model)(opened.config).double()
        filled = load_pretrained(colossalai.nn.parallelize(empty), path)
        for (key, one), other in zip(cut.named_parameters(), filled.parameters(), strict=True):
            assert torch.equal(one, other), f"{name}: {key}"
            assert torch.equal(serial_tensor(one.detach(), one, gpc.mesh), want[key]), f"{name}: {key}"
        assert cut.model.layers[1].mlp.experts.down_proj.numel() * 4 == want[EXPERTS].numel()


EXPERTS = "model.layers.1.mlp.experts.down_proj"


def test_files_of_transformers(tmp_path: Path) -> None:
    spawn(partial(_round_trip, str(tmp_path)), 4)


def _generates(words: dict[str, list[list[int]]], **place: Any) -> None:
    samples = launched({"moe": 2, "tensor": TENSOR})
    for name, expected in words.items():
        model = colossalai.nn.parallelize(build(name)).eval()
        with in_double(model):
            got = written(model, samples)
        assert got == expected[samples], name


def written(model: Any, samples: slice) -> list[list[int]]:
    """What follows after each prompt; they end at different lengths."""
    found = []
    for number in range(SAMPLES)[samples]:
        prompt = batch(7)["input_ids"][number : number + 1, : 3 + number]
        ids = model.generate(prompt, max_new_tokens=3 + 2 * number, do_sample=False)
        found.append(ids[0].tolist())
    return found


def test_ranks_generate_together() -> None:
    words = {}
    for name in ("mixtral", "deepseek_v3"):
        model = build(name).eval()
        with in_double(model):
            words[name] = written(model, slice(None))
    spawn(partial(_generates, words), 4)


def _checkpointed(want: Seen, **place: Any) -> None:
    samples = launched({"moe": 2, "tensor": TENSOR})
    model = colossalai.nn.parallelize(build("mixtral"))
    model.gradient_checkpointing_enable()
    check("mixtral", want, train(model, samples))


def test_recomputation() -> None:
    spawn(partial(_checkpointed, serial("mixtral")), 4)


def _staged(name: str, parallel: dict[str, Any], **place: Any) -> None:
    torch.set_num_threads(1)
    config = {"parallel": parallel, "NUM_MICRO_BATCHES": 2}
    colossalai.launch_from_torch(config, backend="gloo", verbose=False)
    task = Problem(
        build=lambda: build(name, output_router_logits=False),
        batches=[batch(step) for step in range(2)],
        loss=lambda model, given: model(**given).loss,
    )
    with in_double(task.build()):
        check_plan(task, StagedRun, tolerance=Tolerance(loss=1e-7, gradient=1e-9, weight=1e-9))


def test_stages() -> None:
    spawn(partial(_staged, "mixtral", {"pipeline": 2, "moe": 2}), 4)
    spawn(partial(_staged, "deepseek_v3", {"pipeline": 2, "tensor": TENSOR}), 4)
