"""A layer with experts is the serial one under every plan: outputs, losses, decisions, gradients."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch

from colossalai.testing import spawn
from tests.nn.layer.moe.cases import Case, Seen, launched, seen

CASES = {
    "top2": Case(),
    "top1": Case(k=1, capacity=0.8),
    "any": Case("any", k=1),
    "gated": Case("gated", number=8, k=3),
    "inner": Case("tp", k=2),
    "few": Case(number=2, k=1),
    "dropless": Case(options=(("drop_tks", False),)),
    "normalized": Case(options=(("normalize", True),), noise="normal"),
    "random": Case(k=1, capacity=0.7, options=(("select_policy", "random"),)),
    "random2": Case(k=2, capacity=0.7, options=(("select_policy", "random"),), noise="uniform"),
    "padded": Case(padded=True, capacity=0.7),
    "none": Case(capacity=0.01),
    "even": Case(length=6),
}
PLANS: dict[str, tuple[dict[str, Any], int]] = {
    "dp2": ({}, 2),
    "ep2": ({"moe": {"size": 2}}, 2),
    "ep4": ({"moe": 4}, 4),
    "dp2-ep2": ({"moe": {"size": 2}}, 4),
    "tp2": ({"tensor": {"size": 2, "mode": "1d"}}, 2),
    "ep2-tp2": ({"moe": 2, "tensor": {"size": 2, "mode": "1d"}}, 4),
    "ep2-megatron": ({"moe": 2, "tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}}, 4),
    "sp2": ({"sequence": 2}, 2),
    "ep2-sp2": ({"moe": 2, "sequence": 2}, 4),
    "ep2-ulysses2": ({"moe": 2, "sequence": {"size": 2, "attention": "ulysses"}}, 4),
    "ep2-tp2-sp2": ({"moe": 2, "sequence": 2, "tensor": {"size": 2, "mode": "1d"}}, 8),
    "ep8": ({"moe": 8}, 8),
    "2d": ({"moe": 1, "tensor": {"size": 4, "mode": "2d"}}, 4),
}


@cache
def serial(name: str) -> Seen:
    return seen(CASES[name])


def _compare(parallel: dict[str, Any], names: list[str], expected: dict[str, Seen], **place: Any) -> None:
    samples = launched(parallel)
    for name in names:
        want, got = expected[name], seen(CASES[name], samples)
        assert torch.equal(got.chosen, want.chosen[samples]), f"{name}: other decisions"
        assert torch.equal(got.load, want.load), name
        assert got.dropped == want.dropped, name
        close = {"rtol": 1e-9, "atol": 1e-12, "msg": lambda text, name=name: f"{name}: {text}"}
        torch.testing.assert_close(got.entropy, want.entropy, **close)
        for key, value in want.weights.items():
            assert torch.equal(got.weights[key], value), f"{name}: {key} starts with other values"
        torch.testing.assert_close(got.output, want.output[samples], **close)
        torch.testing.assert_close(got.grads, want.grads, **close)


@pytest.mark.parametrize("plan", PLANS)
def test_equal_to_serial(plan: str) -> None:
    parallel, ranks = PLANS[plan]
    names = [name for name in CASES if "megatron" not in plan or CASES[name].length % 2 == 0]
    spawn(partial(_compare, parallel, names, {name: serial(name) for name in names}), ranks)
