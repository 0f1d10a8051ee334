"""Functions of torch on ColoTensors that are cut along every dim: they equal those of plain tensors, value
and gradients, or say what they need; none gives another number.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from colossalai.mesh import unshard
from colossalai.tensor import ColoTensor, DistSpecManager, ProcessGroup
from colossalai.testing import spawn
from tests.tensor.functions import FUNCTIONS, Function, Shape
from tests.tensor.world import cut, start

REFUSALS = re.compile(
    r"needs the whole of a tensor of shape|writes into a (tensor|view)|to_replicate_\(\) first"
)


def _seeds(result: list[Any]) -> Tensor | None:
    """A number with a gradient for every element of the result."""
    numbers = [t for t in result if isinstance(t, Tensor) and t.requires_grad]
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in numbers]
    return sum(((t * w).sum() for t, w in zip(numbers, weights, strict=True)), torch.zeros(()))


def _arguments(shapes: tuple[Shape, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def _together(result: Any) -> list[Any]:
    return [t.to_replicate() if isinstance(t, ColoTensor) else t for t in tree_leaves(result)]


def _compare(function: Function, shapes: tuple[Shape, ...], dims: tuple[Any, ...], pg: ProcessGroup) -> None:
    serial = _arguments(shapes)
    parallel = [
        t.detach().clone().requires_grad_() if dim == "plain" else cut(t, dim, pg)
        for t, dim in zip(serial, dims, strict=True)
    ]
    expected, result = tree_leaves(function(*serial)), _together(function(*parallel))
    assert len(expected) == len(result)
    for a, b in zip(expected, result, strict=True):
        if isinstance(a, Tensor):
            assert (a.shape, a.dtype, a.requires_grad) == (tuple(b.shape), b.dtype, b.requires_grad)
            torch.testing.assert_close(b.data, a.data, equal_nan=True)
        else:
            assert a == (pytest.approx(b) if isinstance(b, float) else b)
    for results in (expected, result):
        total = _seeds(results)
        if total.requires_grad:
            total.backward()
    for a, b in zip(serial, parallel, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            found = unshard(b.grad, b.placement, pg.mesh) if isinstance(b, ColoTensor) else b.grad
            torch.testing.assert_close(found, a.grad, equal_nan=True)


def _cuts(shapes: tuple[Shape, ...], parts: int) -> list[tuple[Any, ...]]:
    """One tensor cut along each dim beside plain ones; and all cut along the same dim."""
    found: list[tuple[Any, ...]] = []
    for i, shape in enumerate(shapes):
        for dim, size in enumerate(shape):
            if size % parts == 0:
                found.append(tuple(dim if j == i else "plain" for j in range(len(shapes))))
    for dim in (0, 1, -1) if len(shapes) > 1 else ():
        found.append(tuple(dim % len(s) if dim < len(s) and s[dim] % parts == 0 else None for s in shapes))
    return found


def _all_functions(rank: int, world_size: int, port: int, only: str = "") -> tuple[list[str], set[str]]:
    """What differs from plain tensors, and what is refused inside ``implicit_gathers``."""
    start(rank, world_size, port)
    torch.set_num_threads(1)
    pg = ProcessGroup(tp_degree=world_size)
    wrong, refused = list[str](), set[str]()
    cases = [(shapes, *case) for shapes, functions in FUNCTIONS for case in functions.items()]
    if world_size > 2 and not only:
        cases = cases[::3]  # pieces of one element are found by any third
    for shapes, name, function in cases:
        for dims in _cuts(shapes, world_size) if only in name else ():
            for gathers in (False, True):
                try:
                    with DistSpecManager.implicit_gathers() if gathers else nullcontext():
                        _compare(function, shapes, dims, pg)
                except (AssertionError, Exception) as error:
                    if not REFUSALS.search(str(error)):
                        wrong.append(f"{name} {dims} {gathers}: {type(error).__name__}: {error}"[:400])
                    elif gathers:
                        refused.add(name)
    return wrong, refused


WRITES = {
    "cumsum out", "cumsum_", "fill_diagonal_", "index_fill_", "scatter_", "set column", "set mask", "set row",
    "squeeze_", "t_", "through a view", "through reshape", "transpose_", "unsqueeze_",
}  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 4])
def test_functions_equal_those_of_plain_tensors(world_size: int) -> None:
    wrong, refused = spawn(_all_functions, world_size)[0]
    assert not wrong, "\n".join(wrong)
    assert refused <= WRITES
