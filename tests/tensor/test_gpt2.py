"""Hugging Face GPT-2 by specs equals the serial one: weights bit for bit, loss, every gradient, weights after
Adam steps.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from colossalai.mesh import collectives, count_communication
from colossalai.tensor import ColoTensor
from colossalai.testing import spawn
from colossalai.testing.parity import ParityError, check_plan
from tests.tensor.gpt2 import page_10, page_42, problem
from tests.tensor.world import start

pytest.importorskip("transformers")

# One start of the ranks for all cases: importing GPT-2 takes longer than training it.
CASES: dict[int, dict[str, tuple[Any, dict[str, Any]]]] = {
    2: {
        "page 10": (partial(page_10, tp=2), {}),
        "checkpointing": (partial(page_10, tp=2), {"checkpoint": True}),
        "dropout": (partial(page_10, tp=2), {"dropout": 0.2}),
        "page 42": (partial(page_42, tp=2), {"vocab_size": 38}),
        "copies only": (partial(page_10, tp=1), {}),
    },
    4: {"page 10": (partial(page_10, tp=4), {}), "two by two": (partial(page_10, tp=2), {})},
}


def _check(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    for name, (plan, sizes) in CASES[world_size].items():
        try:
            check_plan(problem(**sizes), plan)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    if world_size == 2:
        _look_inside()
        _forget_the_sum()


@pytest.mark.parametrize("nprocs", CASES)
def test_specs_equal_serial(nprocs: int) -> None:
    spawn(_check, nprocs)


def _check_on_gpu(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    check_plan(problem("cuda"), partial(page_10, tp=2, device="cuda"))
    check_plan(problem("cuda", checkpoint=True), partial(page_10, tp=2, device="cuda"))


@pytest.mark.gpu
def test_specs_equal_serial_on_one_gpu() -> None:
    """Both ranks share the GPU and talk over gloo."""
    spawn(_check_on_gpu, 2, timeout=180)


def _look_inside() -> None:
    """Pieces are where the page says, the MLP between its layers is cut, and nothing is gathered that need
    not be.
    """
    run = page_10(problem(num_layers=1), tp=2)
    model: Any = run.model.model
    block = model.transformer.h[0]
    shapes = {n: tuple(p.shape) for n, p in block.named_parameters() if p.is_sharded()}
    assert shapes == {
        "attn.c_attn.weight": (16, 24),
        "attn.c_attn.bias": (24,),
        "attn.c_proj.weight": (16, 8),
        "attn.c_proj.bias": (8,),
        "mlp.c_fc.weight": (16, 32),
        "mlp.c_fc.bias": (32,),
        "mlp.c_proj.weight": (32, 16),
    }
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.lm_head.weight.shape == (37, 8)
    inside: list[Any] = []
    block.mlp.act.register_forward_hook(lambda *call: inside.append(call[2]))
    with count_communication() as log, torch.no_grad():
        run.loss(run.model, torch.zeros(2, 4, dtype=torch.long))
    assert isinstance(inside[0], ColoTensor)
    assert (inside[0].shape, inside[0].size()) == ((2, 4, 32), (2, 4, 64))
    # gathered: both embeddings, attention's two products; summed: the MLP and the head
    assert (log.calls("all_gather"), log.calls("all_reduce"), log.calls()) == (4, 2, 6)


def _forget_the_sum() -> None:
    """The check fails when the package is broken."""
    run, kept = page_10(problem(), tp=2), collectives.all_reduce
    collectives.all_reduce = lambda x, *_: x
    try:
        with pytest.raises(ParityError, match="loss at step 0"):
            check_plan(problem(), lambda _: run)
    finally:
        collectives.all_reduce = kept
