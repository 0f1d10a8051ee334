"""Memory and traffic of one linear layer per rank, in every tensor-parallel mode: counted, beside the papers' formulas.

``python benchmarks/linear_formulas.py`` prints the table of docs/tensor_parallel.md.  No processes are needed: a rank of a
world that does not exist holds real pieces, and its collectives are counted although they move nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import colossalai.nn as col_nn
from colossalai.mesh import Mesh, count_communication, local_shape
from colossalai.nn.modes import TensorParallel, mode_1d, mode_2d, mode_2p5d, mode_3d
from colossalai.testing import fake_world

ROWS = WIDTH = 432  # X (rows, width), A (width, width) and Y are of one size, which all modes below divide
WORD = 4
MATRIX = ROWS * WIDTH * WORD


@dataclass(frozen=True)
class Row:
    """A mode with what the documents say: the share of a weight, of an activation, and the matrices moved."""

    name: str
    tp: TensorParallel
    weight: float
    activation: float
    moved: float


def rows() -> list[Row]:
    table = [Row(f"1D, P={p}", mode_1d(p), 1 / p, 1, 2 * (p - 1) / p) for p in (2, 4, 8)]
    table += [Row(f"2D, q={q}", mode_2d(q), 1 / q**2, 1 / q**2, 6 * (q - 1) / q / q) for q in (2, 3, 4)]
    for q, d in ((2, 2), (2, 3), (3, 2)):
        # the last term, the sum of dA over the layers of the grid, is not in the paper
        moved = 3 * (q - 1) * (d + 1) / (d * q) / q + 2 * (d - 1) / d / q**2
        table.append(Row(f"2.5D, q={q}, d={d}", mode_2p5d(q, d), 1 / q**2, 1 / (d * q**2), moved))
    return table + [Row(f"3D, q={q}", mode_3d(q), 1 / q**3, 1 / q**3, 6 * (q - 1) / q**3) for q in (2, 3)]


def measure(tp: TensorParallel) -> tuple[int, int, float]:
    """Bytes of the weight, of the input, and sent, of one rank, forward and backward."""
    with fake_world(0, tp.size):
        mesh = Mesh(tp.axes)
        layer = col_nn.Linear(WIDTH, WIDTH, bias=False, role="expand", tp=tp, mesh=mesh)
        x = torch.ones(local_shape((ROWS // 4, 4, WIDTH), tp.hidden, mesh), requires_grad=True)
        with count_communication() as log:
            layer(x).sum().backward()
        return layer.weight.numel() * WORD, x.numel() * WORD, log.sent()


def table() -> str:
    lines = [
        "| mode | ranks | weight | formula | activation | formula | sent per rank | formula |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows():
        weight, activation, sent = (n / MATRIX for n in measure(row.tp))
        lines.append(
            f"| {row.name} | {row.tp.size} | {weight:.4f} | {row.weight:.4f} | {activation:.4f} | {row.activation:.4f} "
            f"| {sent:.4f} | {row.moved:.4f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
