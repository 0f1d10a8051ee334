"""Bytes that a Linear moves, counted, equal the closed formulas of pages 28 to 31; also for worlds that do
not exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import colossalai.nn as col_nn
from colossalai.mesh import CommunicationLog, Mesh, count_communication, local_shape
from colossalai.nn.modes import TensorParallel, mode_1d, mode_2d, mode_2p5d, mode_3d
from colossalai.testing import fake_world

ROWS, WIDTH, WORD = 144, 144, 4
MATRIX = ROWS * WIDTH * WORD  # X, A and Y are all of this size
ROLES = ("expand", "contract")


def moved(tp: TensorParallel, role: str) -> CommunicationLog:
    """One Linear, forward and backward, as one rank of a world that does not exist."""
    with fake_world(tp.size - 1, tp.size):
        mesh = Mesh(tp.axes)
        layer = col_nn.Linear(WIDTH, WIDTH, bias=False, role=role, tp=tp, mesh=mesh)
        rest = tp.hidden if role == "expand" else tp.inner
        x = torch.ones(local_shape((ROWS // 4, 4, WIDTH), rest, mesh), requires_grad=True)
        with count_communication() as log:
            layer(x).sum().backward()
        assert layer.weight.numel() * tp.size == WIDTH * WIDTH * (tp.axes.get("dep", 1))
        return log


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("p", [2, 4, 8])
def test_1d(p: int, role: str) -> None:
    # 2 (P - 1) / P: the all-reduce of Y forward (row), or of dX backward (column)
    log = moved(mode_1d(p), role)
    assert (log.sent(), log.calls()) == (2 * (p - 1) / p * MATRIX, 1)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_tables_and_heads_of_1d(p: int) -> None:
    """Each rank has 1/p of the weight; features of entries meet by the cheaper of two all-gathers."""
    share, batch, sequence = (p - 1) / p * WIDTH * WORD, 4, 6
    tp = mode_1d(p)
    for entries, shape, moves in (
        (10, (batch, sequence), 10),  # the table is smaller than what is looked up
        (100, (batch, sequence), batch * sequence),
        (100, (sequence,), sequence),  # positions, once for all rows
    ):
        log = moved_by(tp, lambda entries=entries, **at: col_nn.Embedding1D(entries, WIDTH, **at), shape)
        assert (log.sent(), log.calls("all_gather"), log.calls()) == (moves * share, 1, 1)
    log = moved_by(tp, lambda **at: col_nn.VocabParallelEmbedding1D(104, WIDTH, **at), (batch, sequence))
    assert (log.sent(), log.calls()) == (2 * batch * sequence * share, 1)
    # the sum of the scores forward, the gradient of the features backward
    log = moved_by(tp, lambda **at: col_nn.Classifier1D(WIDTH, 10, **at), (batch, sequence, WIDTH))
    tokens = batch * sequence * (p - 1) / p * WORD
    assert (log.sent(), log.calls()) == (2 * tokens * 10 + tokens * WIDTH, 2)


def moved_by(tp: TensorParallel, build: Callable[..., nn.Module], shape: tuple[int, ...]) -> CommunicationLog:
    """What a table sends for ids of ``shape``, or a head for features, forward and backward."""
    with fake_world(tp.size - 1, tp.size):
        layer = build(tp=tp, mesh=Mesh(tp.axes))
        assert layer.weight.numel() * tp.size == math.prod(layer.weight.full_shape)
        head = shape[-1] == WIDTH
        x = torch.zeros(shape, dtype=torch.float if head else torch.long, requires_grad=head)
        with count_communication() as log:
            layer(x).sum().backward()
        return log


def test_1d_with_sequence_parallelism() -> None:
    # the all-reduce in two halves; the gathered input of an expanding layer is fetched again for its dA
    tp = mode_1d(4, sequence_parallel=True)
    assert moved(tp, "contract").sent() == 2 * 3 / 4 * MATRIX
    assert moved(tp, "expand").sent() == 3 * 3 / 4 * MATRIX


@pytest.mark.parametrize("q", [2, 3, 4])
def test_2d(q: int) -> None:
    # 6 (q - 1) / q of the q-th part of a matrix
    log = moved(mode_2d(q), "expand")
    assert log.sent() == pytest.approx(6 * (q - 1) / q * (MATRIX / q), rel=1e-12)
    # panels only: never a whole row of X or a whole column of A
    assert {t.bytes for t in log.transfers} == {MATRIX // q**2}
    assert (log.calls("broadcast"), log.calls("reduce"), log.calls()) == (4 * q, 2 * q, 6 * q)


@pytest.mark.parametrize(("q", "d"), [(2, 2), (2, 3), (3, 2)])
def test_2p5d(q: int, d: int) -> None:
    # 3 (q - 1) (d + 1) / (d q) of the q-th part of a matrix; and dA, which every layer of the grid has, is
    # summed
    log = moved(mode_2p5d(q, d), "expand")
    grid = log.sent() - log.sent(axis="dep")
    assert grid == pytest.approx(3 * (q - 1) * (d + 1) / (d * q) * (MATRIX / q), rel=1e-12)
    assert log.sent(axis="dep") == pytest.approx(2 * (d - 1) / d * MATRIX / q**2)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("q", [2, 3])
def test_3d(q: int, role: str) -> None:
    # 6 (q - 1) / q^3; without keeping the gathered operands, they are fetched a second time
    assert moved(mode_3d(q), role).sent() == pytest.approx(6 * (q - 1) / q**3 * MATRIX, rel=1e-12)
    refetched = moved(mode_3d(q, keep_operands=False), role).sent()
    assert refetched == pytest.approx(8 * (q - 1) / q**3 * MATRIX, rel=1e-12)


def test_one_rank_moves_nothing() -> None:
    for tp in (mode_1d(1), mode_2d(1), mode_2p5d(1, 1), mode_3d(1)):
        assert moved(tp, "expand").calls() == 0
