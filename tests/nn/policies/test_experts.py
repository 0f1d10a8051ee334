"""Models of transformers with experts equal the serial ones: losses, gradients and weights, under every plan."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch

import colossalai
from colossalai.testing import spawn

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")

from tests.nn.policies.expert_models import (  # noqa: E402
    CONFIGS,
    Seen,
    build,
    launched,
    mean_over_ranks,
    train,
)

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
UNCUT = ("gpt_oss", "deepseek_v2", "deepseek_v3")  # families whose sequences are not cut


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
        check(name, want, train(colossalai.nn.parallelize(model), samples))


@pytest.mark.parametrize("plan", PLANS)
def test_equal_to_serial(plan: str) -> None:
    parallel, ranks = PLANS[plan]
    names = [name for name in CONFIGS if "sp" not in plan or name not in UNCUT]
    spawn(partial(_compare, parallel, {name: serial(name) for name in names}), ranks)
