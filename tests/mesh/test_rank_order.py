"""Sums over ranks that are added in the order of the ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from colossalai.mesh import Mesh
from colossalai.mesh.collectives import all_reduce, reduce_scatter, sums_in_rank_order
from colossalai.testing import spawn
from tests.mesh.world import start

RANKS = 3


def term(rank: int) -> Tensor:
    """Numbers of which every order of additions makes another sum."""
    numbers = torch.Generator().manual_seed(rank)
    return torch.randn(6, 1000, generator=numbers) * torch.tensor([1.0, 1e4, 1e-3])[rank]


def work(rank: int, world_size: int, port: int) -> tuple[Tensor, Tensor, Tensor]:
    start(rank, world_size, port)
    mesh = Mesh({"tp": world_size})
    with sums_in_rank_order():
        whole = all_reduce(term(rank), mesh, "tp")
        piece = reduce_scatter(term(rank), mesh, "tp", 0)
        half = all_reduce(term(rank).bfloat16(), mesh, "tp")
    return whole, piece, half


@pytest.fixture(scope="module")
def found() -> list[tuple[Tensor, Tensor, Tensor]]:
    return spawn(work, RANKS)


def test_terms_are_added_in_the_order_of_the_ranks(found: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    expected = (term(0) + term(1)) + term(2)
    assert not torch.equal(expected, term(0) + (term(1) + term(2))), "these terms have no order"
    for rank, (whole, piece, _) in enumerate(found):
        assert torch.equal(whole, expected)
        assert torch.equal(piece, expected[2 * rank : 2 * rank + 2])


def test_sixteen_bits_are_rounded_once(found: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    terms = [term(rank).bfloat16().float() for rank in range(RANKS)]
    expected = ((terms[0] + terms[1]) + terms[2]).bfloat16()
    assert all(torch.equal(half, expected) for _, _, half in found)
