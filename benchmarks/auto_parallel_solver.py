"""How fast plans are found and proved: ``python benchmarks/auto_parallel_solver.py``.

Graphs of strategies with the shape of GPT-2 on 4 nodes of 8 GPUs.  Every operation is written with letters
(``bti,io->bto``); a strategy gives each axis of the mesh a letter, or none, and the rest follows: layouts,
the share of the work, sums of what lacks the letter, forward and backward.  Conversions between strategies
cost what the cheapest route of ``colossalai.mesh`` costs.

For 12, 24 and 48 layers under a tight, a medium and no budget: the time until a plan is proved to be within
0.1 % of the best, beside ``scipy.optimize.milp`` on the whole problem with the same gap.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.table import Row, show
from colossalai.auto_parallel.tensor_shard.solver import StrategyGraph, StrategyPlan, solve_strategies
from colossalai.mesh import AxisLink, Layout, price_tensor, route, route_seconds

MESH = {"node": AxisLink(4, 25e-6, 1 / 50e9), "gpu": AxisLink(8, 10e-6, 1 / 450e9)}
OPERATIONS, BANDWIDTH = 400e12, 2.5e12  # per second, of a GPU: products, and bytes of its memory
ITEM = 2  # bytes of bf16
STATES = 8  # bytes of weight, gradient, fp32 master and two moments, as a multiple of the weight's
GAP = 1e-3
BUDGETS = {"tight": 0.2, "medium": 0.6, "no": None}
"""How much of the way from the smallest plan to the fastest is allowed."""

Cuts = tuple[str, ...]
"""For each axis of the mesh the letter that it cuts, or nothing."""


@dataclass(frozen=True)
class Operation:
    """A node: letters of its inputs, of its weight and of its output."""

    name: str
    inputs: tuple[str, ...]
    output: str
    weight: str = ""
    product: bool = False
    whole: str = ""
    """Letters that no axis may cut: a softmax needs its row."""
    kept: float = 1.0
    """How many tensors of the output's size the backward pass needs."""


@dataclass(frozen=True)
class Shape:
    """Sizes of letters; GPT-2 medium with a batch of 32."""

    b: int = 32  # samples
    t: int = 1024  # tokens
    s: int = 1024  # tokens that are attended to
    i: int = 1024  # features
    j: int = 4096  # features within the MLP
    h: int = 16  # heads
    d: int = 64  # features of a head
    v: int = 50304  # words

    def of(self, letters: str) -> int:
        """How many elements a tensor has."""
        return prod(getattr(self, letter) for letter in letters)


BLOCK = (
    Operation("ln1", ("bti",), "bti", whole="i"),
    # a weight from features to heads: its output is cut by heads
    Operation("qkv", ("bti",), "bthd", "ihd", product=True, whole="d", kept=3),
    Operation("scores", ("bthd",), "bhts", product=True, whole="ds"),
    Operation("mask", ("bhts",), "bhts", whole=""),
    Operation("softmax", ("bhts",), "bhts", whole="s"),
    Operation("drop", ("bhts",), "bhts"),
    Operation("mix", ("bhts", "bthd"), "bthd", product=True, whole="ds"),
    Operation("proj", ("bthd",), "bti", "hdi", product=True, whole="d"),
    Operation("drop1", ("bti",), "bti"),
    Operation("add1", ("bti", "bti"), "bti"),
    Operation("ln2", ("bti",), "bti", whole="i"),
    Operation("fc1", ("bti",), "btj", "ij", product=True),
    Operation("gelu", ("btj",), "btj"),
    Operation("fc2", ("btj",), "bti", "ji", product=True),
    Operation("drop2", ("bti",), "bti"),
    Operation("add2", ("bti", "bti"), "bti"),
)
INPUTS_OF = {
    "ln1": ("stream",),
    "qkv": ("ln1",),
    "scores": ("qkv",),
    "mask": ("scores",),
    "softmax": ("mask",),
    "drop": ("softmax",),
    "mix": ("drop", "qkv"),
    "proj": ("mix",),
    "drop1": ("proj",),
    "add1": ("stream", "drop1"),
    "ln2": ("add1",),
    "fc1": ("ln2",),
    "gelu": ("fc1",),
    "fc2": ("gelu",),
    "drop2": ("fc2",),
    "add2": ("add1", "drop2"),
}


def layout(letters: str, cuts: Cuts) -> Layout:
    """Where a tensor of these letters lies."""
    return Layout(tuple(tuple(a for a, cut in zip(MESH, cuts, strict=True) if cut == x) for x in letters))


@cache
def conversion(src: Layout, dst: Layout, shape: tuple[int, ...]) -> float:
    """Seconds of a conversion and of its gradient's way back."""
    prices = price_tensor(MESH, shape, ITEM)
    ways = (src, dst), (dst, src)
    return sum(route_seconds(a, route(a, b, prices), prices) for a, b in ways)


def strategies(op: Operation, shape: Shape) -> list[Cuts]:
    """The letters that axes may cut, if their sizes divide."""
    letters = dict.fromkeys("".join((*op.inputs, op.weight, op.output)))
    found = []
    for cuts in product(("", *letters), repeat=len(MESH)):
        parts = {
            x: prod(link.ranks for link, c in zip(MESH.values(), cuts, strict=True) if c == x)
            for x in letters
        }
        if not any(c and c in op.whole for c in cuts) and all(
            getattr(shape, x) % n == 0 for x, n in parts.items()
        ):
            found.append(cuts)
    return found


def price(op: Operation, cuts: Cuts, shape: Shape) -> tuple[float, float]:
    """Seconds and bytes of an operation on one GPU, forward and backward."""
    work = prod(link.ranks for link, c in zip(MESH.values(), cuts, strict=True) if c)
    letters = "".join(dict.fromkeys("".join((*op.inputs, op.weight, op.output))))
    tensors = [t for t in (*op.inputs, op.weight, op.output) if t]

    def local(tensor: str) -> float:
        cut = prod(link.ranks for link, c in zip(MESH.values(), cuts, strict=True) if c and c in tensor)
        return shape.of(tensor) * ITEM / cut

    if op.product:
        seconds = 3 * 2 * shape.of(letters) / work / OPERATIONS
    else:
        seconds = 3 * sum(local(t) for t in tensors) / BANDWIDTH
    for axis, cut in zip(MESH, cuts, strict=True):
        # the output is a sum over ranks where it lacks the letter, and so is the gradient of a factor
        summed = [t for t in tensors if cut and cut not in t]
        seconds += sum(MESH[axis].seconds("all_reduce", int(local(t))) for t in summed)
    weight = local(op.weight) * STATES if op.weight else 0.0
    return seconds, op.kept * local(op.output) + weight


def gpt_graph(layers: int, most: int = 10, jitter: float = 0.0, shape: Shape | None = None) -> StrategyGraph:
    """A GPT of so many layers; every operation has its ``most`` cheapest strategies."""
    shape = shape or Shape()
    graph, rng = StrategyGraph(), np.random.default_rng(0)
    chosen: dict[int, tuple[Operation, list[Cuts]]] = {}

    def add(op: Operation, name: str, sources: Sequence[int]) -> int:
        priced = sorted((price(op, cuts, shape), cuts) for cuts in strategies(op, shape))[:most]
        cost = np.array([p[0] for p, _ in priced]) * (1 + jitter * rng.random(len(priced)))
        names = [" x ".join(str(layout(t, c)) for t in (op.output, *op.inputs)) for _, c in priced]
        node = graph.add_node(name, cost, np.round([p[1] for p, _ in priced]), names)
        chosen[node] = op, [c for _, c in priced]
        for source, letters in zip(sources, op.inputs, strict=True):
            of, theirs = chosen[source]
            sizes = tuple(getattr(shape, x) for x in letters)
            table = [
                [conversion(layout(of.output, a), layout(letters, b), sizes) for b in chosen[node][1]]
                for a in theirs
            ]
            graph.add_edge(source, node, table)
        return node

    stream = add(Operation("embed", (), "bti", "vi"), "embed", ())
    for layer in range(layers):
        here = {"stream": stream}
        for op in BLOCK:
            here[op.name] = add(op, f"{layer}.{op.name}", [here[x] for x in INPUTS_OF[op.name]])
        stream = here["add2"]
    norm = add(Operation("norm", ("bti",), "bti", whole="i"), "norm", [stream])
    head = add(Operation("head", ("bti",), "btv", "iv", product=True), "head", [norm])
    add(Operation("loss", ("btv",), "bt", whole="v"), "loss", [head])
    return graph


def seconds_of(graph: StrategyGraph, repeat: int, **options: object) -> tuple[float, StrategyPlan]:
    """The fastest of a few runs, and its plan."""
    best, plan = np.inf, None
    for _ in range(repeat):
        start = time.perf_counter()
        plan = solve_strategies(graph, gap=GAP, **options)  # type: ignore[arg-type]
        best = min(best, time.perf_counter() - start)
    assert plan is not None
    return best, plan


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48])
    parser.add_argument("--strategies", type=int, default=10, help="of each operation, the cheapest")
    parser.add_argument(
        "--jitter", type=float, default=0.0, help="make layers differ by this part of their costs"
    )
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds for each run of HiGHS")
    parser.add_argument("--repeat", type=int, default=3, help="runs of ours; the peer runs once")
    args = parser.parse_args()
    rows: dict[bool, list[Row]] = {False: [], True: []}
    for layers in args.layers:
        graph = gpt_graph(layers, args.strategies, args.jitter)
        free = solve_strategies(graph, gap=0.0)
        least = sum(float(n.memory.min()) for n in graph.nodes)
        sizes = len(graph.nodes), sum(len(n) for n in graph.nodes), sum(e.cost.size for e in graph.edges)
        print(f"{layers} layers: {sizes[0]} nodes, {sizes[1]} strategies, {sizes[2]} pairs", flush=True)
        for name, part in BUDGETS.items():
            limited = graph.with_budget(None if part is None else least + part * (free.memory - least))
            ours, plan = seconds_of(limited, args.repeat)
            tied, alike = seconds_of(limited, args.repeat, tie=True)
            peer, whole = seconds_of(limited, 1, backend="milp", time_limit=args.time_limit)
            phases = ", ".join(f"{k} {v * 1e3:.0f}" for k, v in plan.seconds.items())
            print(
                f"  {name} budget: {plan.cost * 1e3:.3f} ms (gap {plan.gap:.1e}; {phases} ms), tied "
                f"{alike.cost * 1e3:.3f} ms (gap {alike.gap:.1e}), "
                f"HiGHS {whole.cost * 1e3:.3f} ms (gap {whole.gap:.1e})",
                flush=True,
            )
            what = f"{layers} layers, {name} budget"
            rows[False].append(Row(what, ours * 1e3, peer * 1e3, "scipy.optimize.milp"))
            rows[True].append(Row(what + ", tied", tied * 1e3, peer * 1e3, "scipy.optimize.milp"))
    print(show(rows[False] + rows[True]))
    for tied, name in ((False, "every layer by itself"), (True, "equal layers tied")):
        speed = np.exp(np.mean([-np.log(row.ratio) for row in rows[tied]]))
        print(f"{name}: {speed:.1f} x as fast as scipy.optimize.milp (geometric mean)")


if __name__ == "__main__":
    main()
