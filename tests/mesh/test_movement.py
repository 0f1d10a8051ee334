"""Every allowed move between every two layouts of a tensor on two axes, forward and backward, even and
uneven.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch

from colossalai.mesh import (
    Layout,
    Mesh,
    collectives,
    local_slices,
    movement,
    redistribute,
    route,
    shard,
    unshard,
)
from colossalai.testing import RankError, sample_cases, spawn
from tests.mesh.world import lay_out, represents, start

AXES = {"a": 2, "b": 3}


def all_layouts(fused: tuple[int, ...] = ()) -> list[Layout]:
    layouts = []
    for states in itertools.product(("I", "R", "P", 0, 1), repeat=len(AXES)):
        for order in itertools.permutations(AXES):
            named = dict(zip(AXES, states, strict=True))
            dims = tuple(tuple(a for a in order if named[a] == d) for d in (0, 1))
            layouts.append(
                Layout(
                    dims,
                    partial=frozenset(a for a in AXES if named[a] == "P"),
                    spread=frozenset(a for a in AXES if named[a] == "R"),
                    fused=fused,
                )
            )
    return list(dict.fromkeys(layouts))


def allowed(src: Layout, dst: Layout) -> bool:
    try:
        route(src, dst)
    except ValueError:
        return False
    return True


def zigzag_layouts() -> list[Layout]:
    """All layouts whose dims are dealt in zig-zag order or not, less what others show as well."""
    layouts = [x for x in all_layouts() if not x.spread and len(x.partial) < 2]
    firsts = [[axes[0] for axes in x.dims if axes] for x in layouts]
    zigzags = [
        replace(x, zigzag=frozenset(chosen))
        for x, first in zip(layouts, firsts, strict=True)
        for chosen in [first[:1], first[1:]]
        if chosen
    ]
    return layouts + zigzags


def check_moves(
    mesh: Mesh,
    shape: tuple[int, int],
    fused: tuple[int, ...] = (),
    uneven: bool = False,
    layouts: list[Layout] | None = None,
    most: int | None = None,
) -> int:
    x_full = torch.arange(1.0, 1 + shape[0] * shape[1]).reshape(shape)
    g_full = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    layouts = layouts or all_layouts(fused)
    pairs = [pair for pair in itertools.product(layouts, layouts) if allowed(*pair)]
    for src, dst in pairs if most is None else sample_cases(pairs, most):
        x = lay_out(x_full, src, mesh, uneven).requires_grad_()
        y = redistribute(x, src, dst, mesh, shape if uneven else None)
        represents(y, dst, x_full, mesh, uneven)
        (grad,) = torch.autograd.grad(y, x, lay_out(g_full, dst.dual(), mesh, uneven))
        represents(grad, src.dual(), g_full, mesh, uneven)
    return len(pairs)


def _all_moves(rank: int, world_size: int, port: int, most: int | None) -> None:
    """Every move of an even tensor, and ``most`` of those of the others."""
    start(rank, world_size, port)
    mesh = Mesh(AXES)
    expected = sum(allowed(s, d) for s, d in itertools.product(all_layouts(), repeat=2))
    assert expected > 250
    assert check_moves(mesh, (12, 6)) == expected
    assert check_moves(mesh, (7, 5), uneven=True, most=most) == expected
    assert check_moves(mesh, (6, 36), fused=(1, 3), most=most) == expected
    assert check_moves(mesh, (24, 12), fused=(2, 2), most=most) == expected
    zigzag = zigzag_layouts()
    expected = sum(allowed(s, d) for s, d in itertools.product(zigzag, repeat=2))
    assert expected > 400
    assert check_moves(mesh, (12, 24), layouts=zigzag, most=most) == expected


def test_all_moves_represent_the_tensor_and_its_gradient(pytestconfig: pytest.Config) -> None:
    spawn(_all_moves, 6, most=None if pytestconfig.getoption("--all-cases") else 150)


def _named_moves(rank: int, world_size: int, port: int) -> None:
    """Forward and backward of each named move, against what its definition says about the serial value."""
    start(rank, world_size, port)
    mesh = Mesh({"tp": 3})
    full = torch.arange(18.0).reshape(3, 6)
    mine, weight = full[rank : rank + 1], torch.tensor([1.0, 10.0, 100.0])[rank]
    x = mine.clone().requires_grad_()
    y = movement.gather(x, "tp", mesh)
    assert torch.equal(y, full)
    (y * weight).sum().backward()  # each rank uses the whole differently: the gradients add up
    assert torch.equal(x.grad, torch.full_like(mine, 111.0))

    x = (full * weight).requires_grad_()
    y = movement.scatter(x, "tp", mesh, dim=1)
    assert torch.equal(y, 111.0 * full[:, 2 * rank : 2 * rank + 2])
    (y * weight).sum().backward()
    assert torch.equal(x.grad, torch.tensor([1.0, 1.0, 10.0, 10.0, 100.0, 100.0]).expand(3, 6))

    x = full.clone().requires_grad_()
    y = movement.spread(x, "tp", mesh)
    assert torch.equal(y, full)
    (y * weight).sum().backward()
    assert torch.equal(x.grad, torch.full_like(full, 111.0))

    x = (full * weight).requires_grad_()
    y = movement.reduce(x, "tp", mesh)
    assert torch.equal(y, 111.0 * full)
    (y * 2).sum().backward()  # all ranks do the same: no sum over ranks
    assert torch.equal(x.grad, torch.full_like(full, 2.0))

    x = full.clone().requires_grad_()
    y = movement.split(x, "tp", mesh, dim=-1)
    assert torch.equal(y, full[:, 2 * rank : 2 * rank + 2])
    (y * weight).sum().backward()
    assert torch.equal(x.grad, torch.tensor([1.0, 1.0, 10.0, 10.0, 100.0, 100.0]).expand(3, 6))

    x = mine.clone().requires_grad_()
    y = movement.collect(x, "tp", mesh)
    assert torch.equal(y, full)
    (y * torch.tensor([1.0, 2.0, 3.0])[:, None]).sum().backward()
    assert torch.equal(x.grad, torch.full_like(mine, rank + 1.0))

    x = (full * weight).requires_grad_()
    y = movement.total(x, "tp", mesh)
    assert torch.equal(y, 111.0 * full)
    (y * weight).sum().backward()
    assert torch.equal(x.grad, torch.full_like(full, 111.0))

    x = mine.clone().requires_grad_()
    y = movement.all_to_all(x, "tp", mesh, uncut=0, cut=1)
    assert torch.equal(y, full[:, 2 * rank : 2 * rank + 2])
    (y * weight).sum().backward()
    assert torch.equal(x.grad, torch.tensor([[1.0, 1.0, 10.0, 10.0, 100.0, 100.0]]))


def _second_order(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    mesh = Mesh(AXES)
    full = torch.arange(1.0, 37).reshape(6, 6)
    for src, dst in itertools.product(all_layouts()[::3], all_layouts()[::3]):
        if allowed(src, dst):
            x, grad = lay_out(full, src, mesh, False), lay_out(full, dst.dual(), mesh, False)
            y = redistribute(x.requires_grad_(), src, dst, mesh)
            (first,) = torch.autograd.grad(y, x, grad.requires_grad_(), create_graph=True)
            (second,) = torch.autograd.grad(first, grad, lay_out(full, src, mesh, False))
            represents(second, dst, full, mesh, False)


def test_the_gradient_of_a_move_has_a_gradient() -> None:
    spawn(_second_order, 6)


def test_named_moves() -> None:
    spawn(_named_moves, 3)


def _without_one_collective(rank: int, world_size: int, port: int, missing: str) -> None:
    start(rank, world_size, port)
    broken = {
        "all_reduce": lambda x, mesh, axis, *_: x,
        "reduce_scatter": lambda x, mesh, axis, dim, uneven=False: collectives.cut(
            x, mesh, axis, dim, uneven=uneven
        ),
    }
    setattr(collectives, missing, broken[missing])
    check_moves(Mesh(AXES), (12, 6))


@pytest.mark.parametrize("missing", ["all_reduce", "reduce_scatter"])
def test_the_check_fails_when_a_collective_is_dropped(missing: str) -> None:
    with pytest.raises(RankError, match="Tensor-likes are not close"):
        spawn(_without_one_collective, 6, missing=missing)


def _a_wrong_dual(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    Layout.dual = lambda self: self  # type: ignore[method-assign]
    check_moves(Mesh(AXES), (12, 6))


def test_the_check_fails_when_identical_and_spread_are_confused() -> None:
    with pytest.raises(RankError):
        spawn(_a_wrong_dual, 6)


A, B, C = ("a",), ("b",), ("c",)


@pytest.mark.parametrize(
    ("src", "dst", "steps"),
    [
        (Layout((A, ())), Layout(((), A)), ["all_to_all a"]),
        (Layout((A, B)), Layout((B, A)), ["all_gather a", "all_to_all b", "cut a"]),
        (Layout(((), ()), partial=frozenset("ab")), Layout((A, ())), ["reduce_scatter a", "all_reduce b"]),
        (Layout((A, ()), partial=frozenset("b")), Layout(((), ())), ["all_reduce b", "all_gather a"]),
        (Layout((("a", "b"), ())), Layout((A, ())), ["all_gather b"]),
        (Layout((("a", "b"), ())), Layout((A, B)), ["all_to_all b"]),
        (Layout((("a", "b"), ())), Layout((B, ())), ["all_gather b", "all_gather a", "cut b"]),
        (Layout(((), ())), Layout(((), ()), spread=frozenset("a")), []),
        (
            Layout((("a", "b"), ()), zigzag=frozenset("a")),
            Layout((A, B), zigzag=frozenset("a")),
            ["all_to_all b"],
        ),
        (Layout((A, ()), zigzag=frozenset("a")), Layout((A, ())), ["all_gather a", "cut a"]),
        (Layout((A, ()), fused=(3, 1)), Layout(((), A)), ["all_to_all a"]),
        (Layout((A, ()), fused=(3, 1)), Layout((A, ())), ["all_gather a", "cut a"]),
    ],
)
def test_routes(src: Layout, dst: Layout, steps: list[str]) -> None:
    assert [f"{s.do} {s.axis}" for s in route(src, dst)] == steps


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        (Layout(((),), spread=frozenset("a")), Layout(((),)), "axis 'a' cannot go from state R to I"),
        (Layout(((),)), Layout(((),), partial=frozenset("a")), "axis 'a' cannot go from state I to P"),
        (Layout((A,)), Layout(((),), partial=frozenset("a")), "axis 'a' cannot go from state S to P"),
        (Layout((A,)), Layout((A, ())), "cannot move a tensor of 1 dims"),
    ],
)
def test_moves_without_meaning_are_refused(src: Layout, dst: Layout, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        route(src, dst)


def _sizes(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    mesh = Mesh({"dp": 1, "tp": 2})
    layout = Layout((("dp", "tp"),))
    with pytest.raises(ValueError, match=r"size 5 cannot be cut into 2 equal parts.*nearest are 4 and 6"):
        shard(torch.zeros(5), layout, mesh)
    with pytest.raises(ValueError, match="dim 0 of size 3 cannot be cut into 2 equal parts by axis 'tp'"):
        movement.split(torch.zeros(3), "tp", mesh)
    with pytest.raises(ValueError, match="describes 1 dims, the tensor has shape"):
        shard(torch.zeros(4, 4), layout, mesh)
    with pytest.raises(KeyError, match=r"no axis 'pp'; its axes are dp, tp"):
        mesh.group("pp")
    with pytest.raises(ValueError, match=r"dp=2 x tp=2 has 4 places, but the job has 2 ranks"):
        Mesh({"dp": 2, "tp": 2})
    with pytest.raises(ValueError, match="needs a size of at least 1"):
        Mesh({"dp": -1, "tp": -2})
    full = torch.arange(5.0)
    assert torch.equal(unshard(shard(full, layout, mesh, uneven=True), layout, mesh, (5,)), full)
    one = torch.arange(1.0)  # fewer elements than ranks: one rank holds nothing
    assert torch.equal(unshard(shard(one, layout, mesh, uneven=True), layout, mesh, (1,)), one)


def _zigzag(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    mesh = Mesh({"sp": 2, "su": 2})
    layout = Layout(((), ("sp", "su")), zigzag=frozenset({"sp"}))
    chunks = {(0, 0): (0, 12), (0, 1): (2, 14), (1, 0): (4, 8), (1, 1): (6, 10)}
    first, second = chunks[mesh.coord["sp"], mesh.coord["su"]]
    assert local_slices((3, 16), layout, mesh) == (((0, 3),), ((first, 2), (second, 2)))
    full = torch.arange(48.0).reshape(3, 16)
    mine = shard(full, layout, mesh)
    assert torch.equal(mine, full[:, [first, first + 1, second, second + 1]])
    assert torch.equal(unshard(mine, layout, mesh), full)
    assert torch.equal(unshard(mine, layout, mesh, (3, 16)), full)
    for act in (lambda x: shard(x, layout, mesh), lambda x: shard(x, layout, mesh, uneven=True)):
        with pytest.raises(
            ValueError, match="size 12 cannot be dealt as two chunks to each of 4 ranks; pad it to"
        ):
            act(torch.zeros(3, 12))


def test_zigzag_ranges() -> None:
    spawn(_zigzag, 4)


def _any_order_in_memory(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    mesh = Mesh({"a": 2})
    cut = [Layout(tuple(A if d == dim else () for d in range(4))) for dim in (0, 1)]
    summed = Layout(((),) * 4, partial=frozenset("a"))
    full = torch.arange(64.0).reshape(2, 4, 4, 2) * (rank + 1)
    for src, dst in (*itertools.permutations(cut), *((summed, one) for one in cut), (summed, summed.whole())):
        x = full if src == summed else shard(full, src, mesh)
        expected = movement.move(x, src, dst, mesh)
        turned = x.transpose(1, 3).contiguous().transpose(1, 3)
        for same in (x.to(memory_format=torch.channels_last), turned):
            assert torch.equal(movement.move(same, src, dst, mesh), expected), (src, dst)


def test_dims_may_lie_in_any_order_in_memory() -> None:
    spawn(_any_order_in_memory, 2)


def test_sizes_that_do_not_divide() -> None:
    spawn(_sizes, 2)


def test_a_layout_names_each_axis_once() -> None:
    with pytest.raises(ValueError, match="axis 'a' is mentioned twice"):
        Layout((A, A))
    with pytest.raises(ValueError, match="axis 'a' is mentioned twice"):
        Layout((A,), partial=frozenset("a"))
    with pytest.raises(ValueError, match="one number of blocks for each of 2 dims"):
        Layout((A, ()), fused=(3,))
    with pytest.raises(ValueError, match="has 1 block"):
        Layout((A, ()), fused=(0, 3))
    for dims, fused in (((("b", "a"),), ()), ((A,), (2,)), (((),), ())):
        with pytest.raises(
            ValueError, match="zigzag axis 'a' must be the first axis of a dim that is not fused"
        ):
            Layout(dims, fused=fused, zigzag=frozenset("a"))


def test_axes_are_not_letters() -> None:
    for wrong in (lambda: Layout(("tp", ())), lambda: Layout(((), ()), partial="tp")):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"write \('tp',\), not 'tp'"):
            wrong()


def test_a_layout_in_words() -> None:
    assert str(Layout((("a", "b"), ()), partial=frozenset("c"), fused=(1, 3))) == "[a+b, -] P(c) fused(1, 3)"
    assert str(Layout(((), ("sp", "su")), zigzag=frozenset({"sp"}))) == "[-, zigzag(sp)+su]"
