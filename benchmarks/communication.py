"""What tensor parallelism costs on one rank, measured next to closed formulas: ``python
benchmarks/communication.py``.

A rank of a world that does not exist runs a layer forward and backward: its tensors have the real shapes, its
collectives are counted and move nothing, so 27 ranks cost as little as 2.  ``--write`` puts the tables into
tensor_parallel_costs.md, and a test compares that page with a new measurement, and each measurement with
its formula, exactly.

Everything is counted in elements: a fraction of the matrices X (rows x in), A (in x out) and Y (rows x out)
of a layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import colossalai.nn as col_nn
from colossalai.mesh import Mesh, count_communication, local_shape
from colossalai.nn.modes import TensorParallel, mode_1d, mode_2d, mode_2p5d, mode_3d
from colossalai.testing import fake_world
from docs.translated_tables import write_tables

PAGE = Path(__file__).resolve().parent.parent / "docs/source/en" / "tensor_parallel_costs.md"
WORD = 4  # bytes of a float
BATCH, SEQUENCE, WIDTH = (
    36,
    6,
    216,
)  # divisible by every plan below; X and A of the square layer are equally large
MATRIX = WIDTH * WIDTH
assert BATCH * SEQUENCE == WIDTH


@dataclass(frozen=True)
class Cost:
    """Of one rank, in elements."""

    parameters: Fraction
    kept: Fraction
    """What autograd keeps for the backward pass besides parameters."""
    sent: Fraction
    """Forward and backward, with ring algorithms."""
    collectives: int = 0


@dataclass(frozen=True)
class Plan:
    name: str
    tp: TensorParallel
    linear: Callable[[], Cost]
    """The closed formulas for a square layer that expands."""
    mlp: Callable[[], Cost]
    """The closed formulas for the MLP, biases included."""
    page: str = ""
    """What the documents of this mode say the bandwidth is."""


@contextmanager
def kept(parameters: Iterator[nn.Parameter]) -> Iterator[dict[int, int]]:
    """The storages that autograd keeps, with their numbers of elements; parameters live anyway."""
    found: dict[int, int] = {}
    own = {p.untyped_storage()._cdata for p in parameters}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage.nbytes() // WORD
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield found


def measured(tp: TensorParallel, build: Callable[[TensorParallel, Mesh], nn.Module]) -> Cost:
    """One rank's share, as the last rank of ``tp.size``."""
    with fake_world(tp.size - 1, tp.size):
        mesh = Mesh(tp.axes)
        model = build(tp, mesh)
        x = torch.zeros(local_shape((BATCH, SEQUENCE, WIDTH), tp.hidden, mesh), requires_grad=True)
        with count_communication() as log:
            with kept(model.parameters()) as found:
                y = model(x)
            total = sum(found.values())  # before the backward pass frees them
            y.sum().backward()
        return Cost(
            Fraction(sum(p.numel() for p in model.parameters())),
            Fraction(total),
            Fraction(log.sent()) / WORD,
            log.calls(),
        )


def square_linear(tp: TensorParallel, mesh: Mesh) -> nn.Module:
    return col_nn.Linear(WIDTH, WIDTH, bias=False, role="expand", tp=tp, mesh=mesh)


class MLP(nn.Module):
    """The walk-through of the documents, with biases: width -> 4 width -> width."""

    def __init__(self, tp: TensorParallel, mesh: Mesh) -> None:
        super().__init__()
        self.dense_1 = col_nn.Linear(WIDTH, 4 * WIDTH, role="expand", tp=tp, mesh=mesh)
        self.dense_2 = col_nn.Linear(4 * WIDTH, WIDTH, role="contract", tp=tp, mesh=mesh)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_2(F.gelu(self.dense_1(x)))


# ---- closed formulas.  The sizes of the whole: x and h are activations, w either weight of the MLP, b both
# its biases.

X, H, W, B = MATRIX, 4 * MATRIX, 4 * MATRIX, 5 * WIDTH


def _ring(p: int) -> Fraction:
    """What a rank sends of a tensor that it gathers or reduces and scatters; an all-reduce is both."""
    return Fraction(p - 1, p)


def one_dim(p: int) -> Plan:
    def linear() -> Cost:
        return Cost(Fraction(MATRIX, p), Fraction(MATRIX), 2 * _ring(p) * MATRIX)

    def mlp() -> Cost:
        # X is whole; before and after the activation function 1 / p; an all-reduce of Y forward and of dX
        # backward
        parameters = Fraction(2 * W + 4 * WIDTH, p) + WIDTH
        return Cost(parameters, X + Fraction(2 * H, p), 2 * 2 * _ring(p) * X)

    return Plan(f"1D, {p}", mode_1d(p), linear, mlp, "2(P-1)/P")


def grid(q: int, d: int | None = None) -> Plan:
    deep = d or 1

    def product(x: int, w: int) -> Fraction:
        """Y, dX and dA each move panels of two matrices, X's shape and A's; then dA is summed over the
        depth.
        """
        return 3 * _ring(q) * (Fraction(x, deep * q) + Fraction(w, q)) + 2 * _ring(deep) * Fraction(w, q * q)

    def linear() -> Cost:
        return Cost(Fraction(MATRIX, q * q), Fraction(MATRIX, deep * q * q), product(MATRIX, MATRIX))

    def mlp() -> Cost:
        parameters, kept = Fraction(2 * W, q * q) + Fraction(B, q), Fraction(X + 2 * H, deep * q * q)
        biases = 2 * (_ring(q) + _ring(deep)) * Fraction(B, q)
        return Cost(parameters, kept, product(X, W) + product(H, W) + biases)

    if d is None:
        return Plan(f"2D, {q}x{q}", mode_2d(q), linear, mlp, "6(q-1)/q of 1/q")
    return Plan(f"2.5D, {d} deep {q}x{q}", mode_2p5d(q, d), linear, mlp, "3(q-1)(d+1)/(dq) of 1/q")


def cube(q: int, keep: bool = True) -> Plan:
    again = 0 if keep else 1  # whether X and A are fetched a second time

    def product(x: int, w: int, y: int) -> Fraction:
        return 2 * _ring(q) * Fraction(x + w + y, q**2) + again * _ring(q) * Fraction(x + w, q**2)

    def linear() -> Cost:
        kept = Fraction(2 * MATRIX, q**2) if keep else Fraction(MATRIX, q**3)
        return Cost(Fraction(MATRIX, q**3), kept, product(MATRIX, MATRIX, MATRIX))

    def mlp() -> Cost:
        # the gathered X, H and both A, and H before the activation function; or these at rest, without the
        # weights
        kept = Fraction(X + H + 2 * W, q**2) + Fraction(H, q**3) if keep else Fraction(X + 2 * H, q**3)
        biases = 2 * 2 * _ring(q) * Fraction(B, q)
        parameters = Fraction(2 * W, q**3) + Fraction(B, q)
        return Cost(parameters, kept, product(X, W, H) + product(H, W, X) + biases)

    name = f"3D, {q}x{q}x{q}" + ("" if keep else ", operands fetched again")
    return Plan(name, mode_3d(q, keep_operands=keep), linear, mlp, "6(q-1)/q^3" if keep else "")


PLANS = (
    *map(one_dim, (2, 4, 8, 9, 12, 27)),
    *map(grid, (2, 3)),
    grid(2, 2),
    grid(2, 3),
    *(cube(q, keep) for q in (2, 3) for keep in (True, False)),
)


# ---- tables


def _linear_row(plan: Plan) -> list[str]:
    found, formula = measured(plan.tp, square_linear), plan.linear()
    cells = [
        f"{getattr(found, name) / MATRIX} | {getattr(formula, name) / MATRIX}"
        for name in ("parameters", "kept", "sent")
    ]
    return [plan.name, str(plan.tp.size), *cells, plan.page or "-", str(found.collectives)]


def _mlp_row(plan: Plan) -> list[str]:
    found, formula = measured(plan.tp, MLP), plan.mlp()
    cells = [
        f"{int(getattr(found, name) * WORD):,} | {int(getattr(formula, name) * WORD):,}"
        for name in ("parameters", "kept", "sent")
    ]
    return [plan.name, str(plan.tp.size), *cells]


def _markdown(header: str, rows: list[list[str]]) -> str:
    columns = header.count("|") + 1
    lines = [f"| {header} |", "|" + "---|" * columns, *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


_PAIRS = "parameters | formula | kept for backward | formula | sent | formula"


def tables() -> dict[str, str]:
    """The tables of the page by the names of the comments that stand around them."""
    return {
        "linear": _markdown(
            f"plan | ranks | {_PAIRS} | bandwidth in the papers | collectives", [*map(_linear_row, PLANS)]
        ),
        "mlp": _markdown(f"plan | ranks | {_PAIRS}", [*map(_mlp_row, PLANS)]),
    }


def with_tables(page: str) -> str:
    """``page`` with its tables measured anew."""
    for name, table in tables().items():
        begin, end = f"<!-- {name}: measured -->\n", f"<!-- {name}: end -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n{table}\n\n{end}{after}"
    return page


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(with_tables(PAGE.read_text()))
        write_tables(PAGE.stem)
        print(f"wrote {PAGE}")
    else:
        print("\n\n".join(tables().values()))
