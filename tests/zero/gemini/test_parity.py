"""Training under Gemini equals serial training with the ranks' batches joined."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from colossalai.testing import sample_cases, spawn
from tests import shared_memory
from tests.zero.gemini.runs import Case, Serial, Training, batch, compare, equal_courses, launch, net

DIMENSIONS = (
    ("cpu", "cuda", "auto", "const"),
    (torch.float32, torch.bfloat16),
    (None, 1 / 2, 1 / 4, 1 / 8),  # of the weights, in the compute tier
    (1, 4),  # parts of a batch
    (0.0, 0.1),  # clipping
    (False, True),  # checkpoints
    (0.0, 0.5, 1.0),  # states on the disk
)


def _case(*at: int) -> Case:
    """The two kinds of checkpoints, and updates within the backward pass or after it, take turns."""
    policy, dtype, share, accumulate, clip, has_checkpoints, nvme = (
        values[i] for values, i in zip(DIMENSIONS, at, strict=True)
    )
    is_odd = sum(at[:-1]) % 2 == 1
    reentrant = sum(at) % 2 == 1 if has_checkpoints else None
    return Case(policy, dtype, share, accumulate, clip, reentrant, is_odd and not clip, nvme)


def _takes_turn(*at: int) -> bool:
    """Each policy meets each size of the compute tier once: a Latin square with parts of a batch and
    checkpoints.
    """
    policy, _, share, accumulate, _, has_checkpoints, _ = at
    return DIMENSIONS[0][policy] == "cuda" or share == (policy + accumulate + 2 * has_checkpoints) % 4


PLACES = [
    at for at in itertools.product(*(range(len(values)) for values in DIMENSIONS)) if _case(*at).is_possible
]
GRID = [_case(*at) for at in PLACES]
SPREAD = [_case(*at) for at in PLACES if _takes_turn(*at)]
# an eighth of the model must be several chunks; a model that need not be deep costs ranks fewer messages
NETS = {share: partial(net, blocks=n) for share, n in ((None, 4), (1 / 2, 4), (1 / 4, 10), (1 / 8, 20))}
LONG = {1: GRID, 2: SPREAD, 4: SPREAD}  # cases of a hundred steps, by the number of ranks
PARTS = 32


def _train(rank: int, world_size: int, port: int, cases: list[Case], steps: int, backend: str) -> None:
    launch(rank, world_size, port, backend)
    for case in cases:
        compare(case, steps, build=NETS[case.share])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_grid(ranks: int) -> None:
    cases = sample_cases(GRID[ranks % 7 :], 4 if ranks < 4 else 3)
    spawn(_train, ranks, cases=cases, steps=3, backend="gloo", timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_whole_grid(ranks: int, part: int) -> None:
    size = -(-len(LONG[ranks]) // PARTS)  # neighbours: they have one serial training
    cases = LONG[ranks][part * size : (part + 1) * size]
    spawn(_train, ranks, cases=cases, steps=100, backend=shared_memory.NAME, timeout=3600)


def _speculative(*at: int) -> Case:
    """Speculative updates in the backward pass; with this norm about a quarter of the steps are clipped."""
    return replace(_case(*at), clip=0.3, early=True)


ON_TRIAL = {
    is_whole: [
        _speculative(*at)
        for at in PLACES
        if DIMENSIONS[0][at[0]] != "cuda"
        and (at[4], at[6]) == (0, 0)  # clipping has its own norm, nothing is on the disk
        and (is_whole or _takes_turn(*at))
    ]
    for is_whole in (False, True)
}


def _try(rank: int, world_size: int, port: int, cases: list[Case], steps: int, backend: str) -> None:
    launch(rank, world_size, port, backend)
    for case in cases:
        if world_size == 1:
            compare(case, steps, build=NETS[case.share])
        else:
            equal_courses(case, replace(case, undo=0.0), steps, build=NETS[case.share])


@pytest.mark.parametrize("ranks", [1, 2])
def test_speculative_updates(ranks: int) -> None:
    cases = sample_cases(ON_TRIAL[True], 4 if ranks == 1 else 2)
    spawn(_try, ranks, cases=cases, steps=6, backend="gloo", timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_speculative_updates(ranks: int, part: int) -> None:
    cases = ON_TRIAL[ranks == 1][part::4]
    spawn(_try, ranks, cases=cases, steps=100, backend=shared_memory.NAME, timeout=3600)


@pytest.mark.parametrize("share", [1 / 2, 1 / 4, 1 / 8])
def test_auto_leaves_room_for_chunks_with_states_on_the_disk(share: float) -> None:
    compare(Case("auto", share=share, nvme=1.0), 3, build=NETS[share])


def _gradients(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    for case in (
        Case(),
        Case("auto", share=0.5),
        Case("cuda", reentrant=True),
        Case(accumulate=2, share=0.25),
    ):
        run, serial = Training(case), Serial(case)
        for step in range(3):
            words = batch(step)
            serial.backward(words)
            expected = {n: p.grad for n, p in serial.model.named_parameters() if p.grad is not None}
            own = words.chunk(run.ranks)[run.rank]
            for part, last in zip(own.chunk(case.accumulate), range(1 - case.accumulate, 1), strict=True):
                run.model.gradients.sync = last == 0
                run.optimizer.backward(_loss(run.model, part) / case.accumulate)
            got = run.gradients()
            assert got.keys() == expected.keys()
            for name, grad in expected.items():
                assert torch.allclose(got[name], grad, rtol=1e-4, atol=1e-6), name
            norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in expected.values()]))
            assert torch.allclose(run.optimizer.clip_grad_by_norm(float("inf")), norm, rtol=1e-4)
            run.optimizer.step()
            run.optimizer.zero_grad()
            serial.optimizer.step()
            serial.optimizer.zero_grad()


def _loss(model: torch.nn.Module, words: torch.Tensor) -> torch.Tensor:
    from tests.zero.gemini.runs import loss_of

    return loss_of(model, words)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients(ranks: int) -> None:
    spawn(_gradients, ranks)
