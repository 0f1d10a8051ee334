"""Models of transformers with experts equal the serial ones: losses, gradients, weights, under every plan."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import colossalai
from colossalai.checkpoint_io import load_pretrained
from colossalai.core import global_context as gpc
from colossalai.mesh import Mesh, placement, serial_tensor
from colossalai.nn.layer.base import FOLLOW_CONFIG
from colossalai.nn.layer.moe.tokens import TokenOrder
from colossalai.nn.policies.cutting import balance_loss, experts
from colossalai.testing import RankError, fake_world, spawn
from colossalai.testing.parity import Problem, Tolerance, check_plan

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")

from transformers import AutoModelForCausalLM  # noqa: E402

from tests.nn.policies.expert_models import (  # noqa: E402
    CONFIGS,
    SAMPLES,
    SIZES,
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
# Of all pairs, those that run always.
CHOSEN: dict[str, list[str]] = {
    "dp2": ["mixtral"],
    "tp2": ["qwen2_moe", "deepseek_v2"],
    "ep2": ["olmoe"],
    "ep2-dp2": ["qwen3_moe"],
    "ep4": ["few", "deepseek_v3"],
    "ep2-tp2": ["mixtral", "deepseek_v3", "gpt_oss"],
    "ep2-sp2": ["qwen2_moe", "deepseek_v2"],
}


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
    spawn(partial(_compare, parallel, {name: serial(name) for name in CHOSEN[plan]}), ranks)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_all_equal_to_serial(plan: str) -> None:
    parallel, ranks = PLANS[plan]
    left_out = {*CHOSEN[plan], *(UNCUT if "sp" in plan else ())}
    names = [name for name in CONFIGS if name not in left_out]
    spawn(partial(_compare, parallel, {name: serial(name) for name in names}), ranks)


def _round_trip(folder: str, names: list[str], **place: Any) -> None:
    launched({"moe": 2, "tensor": TENSOR})
    for name in names:
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
    spawn(partial(_round_trip, str(tmp_path), ["mixtral"]), 4)


@pytest.mark.slow
def test_files_of_all_families(tmp_path: Path) -> None:
    spawn(partial(_round_trip, str(tmp_path), [*CONFIGS]), 4)


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


def _hidden(**place: Any) -> None:
    samples = launched({"moe": 2})
    model = colossalai.nn.parallelize(build("mixtral"))
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.warns(UserWarning, match="balances the experts trains nothing.*use_reentrant"):
        train(model, samples, steps=1)


def test_balancing_losses_that_a_checkpoint_hides() -> None:
    spawn(_hidden, 2)


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


@cache
def one_step() -> Seen:
    return train(build("mixtral"), steps=1)


def _without_a_sum(what: str, want: Seen, **place: Any) -> None:
    samples = launched({"moe": 2, "tensor": TENSOR})
    broken = {
        "loss": mock.patch.object(TokenOrder, "total", lambda self, x: x),
        "outputs": mock.patch.object(experts, "redistribute", lambda x, *_: x),
        "inputs": mock.patch.object(experts, "use", lambda x, *_: x),
    }
    with broken[what]:
        model = colossalai.nn.parallelize(build("mixtral"))
        check("mixtral", want, train(model, samples, steps=1))


@pytest.mark.parametrize("what", ["loss", "outputs", "inputs"])
def test_a_sum_that_is_left_out_is_seen(what: str) -> None:
    want = one_step()
    with pytest.raises(RankError, match=r"not close|different gradients"):
        spawn(partial(_without_a_sum, what, want), 4)


def _cut(model: Any, sizes: dict[str, int], mode: str | None = FOLLOW_CONFIG) -> Any:
    with fake_world(rank=0, world_size=torch.Size(sizes.values()).numel()):
        return colossalai.nn.parallelize(model, mode, mesh=Mesh(sizes))


def _meta(name: str, **options: Any) -> Any:
    with torch.device("meta"):
        kind, sizes = CONFIGS[name]
        return AutoModelForCausalLM.from_config(kind(**{**SIZES, **sizes, **options}))


class Unknown(torch.nn.Module):
    """Experts that do not tell what they compute."""

    num_experts = 4

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(4, 3, 3))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return x


def test_refusals() -> None:
    home = "MixtralForCausalLM, module 'model.layers.0.mlp.experts': "
    wrong: dict[str, tuple[Any, dict[str, int], str | None]] = {
        home + "6 experts and 4 ranks .* do not divide each other": (
            _meta("mixtral", num_local_experts=6),
            {"ep": 2, "ep1": 2},
            FOLLOW_CONFIG,
        ),
        home + "the inner features of its experts, 9, cannot be shared by 2 .* multiple of 2": (
            _meta("mixtral", intermediate_size=9),
            {"ep": 2, "tp": 2},
            "1d",
        ),
        "no policy for MixtralForCausalLM.*only mode '1d' can be derived|knows mode '1d' only": (
            _meta("mixtral"),
            {"row": 2, "col": 2},
            "2d",
        ),
        "Sequential, module '0': a .*Unknown holds experts, but does not tell what they compute": (
            torch.nn.Sequential(Unknown()),
            {"ep": 2},
            FOLLOW_CONFIG,
        ),
    }
    for words, (model, sizes, mode) in wrong.items():
        before = {n: p.shape for n, p in model.named_parameters()}
        with pytest.raises(ValueError, match=words):
            _cut(model, sizes, mode)
        assert before == {n: p.shape for n, p in model.named_parameters()}


def test_fewer_experts_than_ranks() -> None:
    """They are cut by some of the axes, and the others hold copies."""
    model = _cut(_meta("mixtral", num_local_experts=2), {"ep": 2, "ep1": 2})
    assert placement(model.model.layers[0].mlp.experts.down_proj).dims == (("ep1",), (), ())


def test_a_model_without_experts_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert _cut(torch.nn.Linear(2, 2), {"ep": 2}) is not None
    assert "Linear): it has no experts that 2 ranks" in capsys.readouterr().err


def test_a_balancing_loss_of_another_kind() -> None:
    """Its value over all ranks is not known, so it is refused in place of a wrong one."""
    balance = balance_loss._Balance(lambda logits, *_: torch.cat(logits).std())
    assert not balance.is_known
    assert balance((torch.ones(2, 3), torch.zeros(2, 3)), 3) > 0  # outside of a model that was cut
    token = balance_loss._mesh.set(mock.Mock())
    try:
        with pytest.raises(ValueError, match=r"not the loss that parallelize knows.*logits=False"):
            balance((torch.ones(2, 3),), 3)
    finally:
        balance_loss._mesh.reset(token)
