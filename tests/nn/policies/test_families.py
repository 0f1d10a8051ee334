"""Every family of transformers with a tensor-parallel plan trains as the serial model does in 1D, or is
refused in words.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import colossalai
from colossalai.core import global_context as gpc
from colossalai.mesh import placement
from colossalai.testing import spawn
from colossalai.testing.parity import ParityError, PlacedRun, Problem, Tolerance, check_plan

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")

from tests.nn.policies import families, zoo  # noqa: E402

# Gemma 4 scales its table by a root, and rounding grows with it.
ROUNDING = Tolerance(gradient=1e-3, weight=1e-3)
EQUAL, UNKNOWN = "equal", "not built: "


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def _train_beside(kind: str, options: dict[str, Any]) -> None:
    serial = families.build(kind, **options)
    problem = Problem(
        build=lambda: copy.deepcopy(serial),
        batches=[families.batch(serial, step) for step in range(2)],
        loss=families.loss,
        optimizer=_sgd,
    )
    model = colossalai.nn.parallelize(problem.build())
    check_plan(problem, lambda p: PlacedRun(p, model, gpc.mesh, p.loss), tolerance=ROUNDING)


def _train_with_dropout(kind: str, options: dict[str, Any]) -> None:
    """Masks are random, so there is nothing to compare with; but what all ranks hold must stay the same on
    all.
    """
    model = colossalai.nn.parallelize(families.build(kind, drop=0.5, **options))
    optimizer = _sgd(model.parameters())
    for step in range(3):
        families.loss(model, families.batch(model, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, param in model.named_parameters():
        if placement(param).sharded:
            continue
        both = [torch.empty_like(param.data) for _ in range(2)]
        dist.all_gather(both, param.data.contiguous())
        if not torch.equal(*both):
            raise ParityError(f"copies of {name} differ by {float((both[0] - both[1]).abs().max()):.1e}")


def _outcome(kind: str, options: dict[str, Any]) -> str:
    """``EQUAL``, or the words of a refusal; anything else is raised."""
    try:
        options = families.find_options(kind, **options)
    except LookupError as error:
        return f"{UNKNOWN}{error}"
    try:
        _train_beside(kind, options)
        _train_with_dropout(kind, options)
    except ValueError as error:  # of `parallelize`: both ranks raise it before anything is sent
        return str(error)
    except (ParityError, RuntimeError) as error:
        if "parameters that all tensor-parallel ranks hold alike got different gradients" in str(error):
            return str(error)
        raise AssertionError(f"{kind}: {error}") from error
    return EQUAL


def check_families(
    rank: int, world_size: int, port: int, kinds: list[tuple[str, dict[str, Any]]]
) -> list[str]:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    zoo.launch({"size": 2, "mode": "1d"})
    return [_outcome(kind, options) for kind, options in kinds]


def _outcomes(kinds: list[tuple[str, dict[str, Any]]]) -> list[str]:
    first, second = spawn(check_families, 2, kinds=kinds, timeout=600.0)
    assert first == second  # the same words on every rank
    return first


# Norms of heads, activations with parameters, dropout of the stream inside attention, attention that a plan
# leaves whole.
RIGHT = ("phi", "apertus", "starcoder2", "phi3", "gemma3n_text", "qwen3")
# Families whose own plans do not fit them, so that others are derived: weights with a dim of all heads
# (Cohere, Granite-SWA), masks that are not cut like heads (Doge), statistics over features (Gemma-3n),
# experts.
DERIVED: dict[str, dict[str, Any]] = {
    "cohere": {},
    "doge": {},
    "granite_swa": {},
    "embedding_gemma2_text": {},
    "gemma3n_text": {"activation_sparsity_pattern": [0.9, 0.9]},
    "mixtral": {},
}


def test_families_that_were_wrong() -> None:
    assert dict(zip(RIGHT, _outcomes([(kind, {}) for kind in RIGHT]), strict=True)) == dict.fromkeys(
        RIGHT, EQUAL
    )


def test_plans_that_do_not_fit_are_derived() -> None:
    kinds = {kind: options for kind, options in DERIVED.items() if kind in families.families()}
    found = _outcomes(list(kinds.items()))
    assert dict(zip(kinds, found, strict=True)) == dict.fromkeys(kinds, EQUAL)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Ask for the families, which takes seconds, only where they are to be tested."""
    if metafunc.function is not test_all_families:
        return
    kinds = ["skipped"]
    if metafunc.config.getoption("--all-cases"):
        kinds = [kind for kind in families.families() if kind not in RIGHT]
    rows = [kinds[i : i + 10] for i in range(0, len(kinds), 10)]
    metafunc.parametrize("kinds", rows, ids=lambda kinds: f"{kinds[0]}...{kinds[-1]}")


@pytest.mark.slow
def test_all_families(kinds: list[str]) -> None:
    for kind, got in zip(kinds, _outcomes([(kind, {}) for kind in kinds]), strict=True):
        print(f"{kind}: {got}")
        assert got == EQUAL or "parallelize" in got or "policy" in got or got.startswith(UNKNOWN), (
            f"{kind}: {got}"
        )


# ---- attentions ----


def check_attentions(rank: int, world_size: int, port: int) -> None:
    zoo.launch({"size": 2, "mode": "1d"})
    for kind in ("phi3", "olmo2", "llama"):
        serial = families.build(kind, attn_implementation="eager").eval()
        model = colossalai.nn.parallelize(copy.deepcopy(serial))
        given = {**families.batch(serial), "output_attentions": True}
        for got, expected in zip(model(**given).attentions, serial(**given).attentions, strict=True):
            torch.testing.assert_close(got, expected)


def test_attentions_have_every_head_once() -> None:
    spawn(check_attentions, 2)
