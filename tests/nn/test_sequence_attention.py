"""Attention over a cut sequence equals torch's attention over the whole one, forward and backward, and sends
what the formulas say.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import colossalai.nn.attention as attention
from colossalai.mesh import Layout, Mesh, count_communication, shard
from colossalai.nn.attention import blocks, kernels, ring, sequence_attention
from colossalai.testing import RankError, fake_world, spawn
from tests.mesh.world import start

BATCH, WIDTH = 2, 8


@dataclass(frozen=True)
class Case:
    causal: bool
    documents: str = "none"
    heads: int = 4
    key_heads: int = 4
    length: int = 48
    dtype: torch.dtype = torch.float64


def cases(smallest: int) -> Iterator[Case]:
    """All masks, head counts and lengths that a world must get right."""
    for causal, documents in itertools.product(
        (True, False), ("none", "padded", "packed", "both", "one padded")
    ):
        yield Case(causal, documents)
    for causal, key_heads in itertools.product((True, False), (1, 2)):
        yield Case(causal, key_heads=key_heads)
    yield Case(True, "packed", key_heads=2)
    for causal, documents in itertools.product((True, False), ("none", "packed")):
        yield Case(causal, documents, length=smallest)  # one token for each chunk
    yield Case(True, dtype=torch.float32)
    yield Case(True, "both", dtype=torch.float32)


def documents_of(kind: str, length: int) -> Tensor | None:
    """Documents that cross the borders of chunks; in the second sample others than in the first."""
    if kind == "none":
        return None
    numbers = torch.ones(BATCH, length, dtype=torch.int64)
    position = torch.arange(length)
    if kind in ("packed", "both"):
        numbers[0] = 1 + position * 3 // length
        numbers[1] = 1 + position * 5 // length
    if kind in ("padded", "both"):
        numbers[1, length - length // 4 :] = -1  # looks at document 1, in its own sample
    if kind == "both":
        numbers[0, -1] = -9  # looks at nothing
    if kind == "one padded":
        numbers[:, length // 2 :] = -1  # whole chunks of padding
    return numbers


def visible(case: Case) -> Tensor | None:
    """(batch, 1, length, length), by the definition."""
    numbers = documents_of(case.documents, case.length)
    before = torch.ones(case.length, case.length, dtype=torch.bool)
    if case.causal:
        before = before.tril()
    if numbers is None:
        return before
    return (
        before & (numbers[:, None, :] == numbers[:, :, None].abs()) & (numbers[:, None, :] > 0)
    ).unsqueeze(1)


def inputs(case: Case) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (case.heads, case.key_heads, case.key_heads, case.heads)
    q, k, v, grad = (
        torch.randn(BATCH, h, case.length, WIDTH, dtype=case.dtype, generator=generator) for h in heads
    )
    return [q, k, v], grad


def serial(case: Case) -> tuple[Tensor, ...]:
    """Output and gradients of torch's attention; 0 where a token looks at nothing."""
    parts, grad = inputs(case)
    parts = [x.requires_grad_() for x in parts]
    mask = visible(case)
    out = scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True)
    return out.detach(), *torch.autograd.grad(out, parts, grad)


def layout_of(ring_axis: str | None, heads: str | None, mesh: Mesh) -> Layout:
    """Where q lies: in zig-zag order on a ring of several ranks."""
    axes = tuple(a for a in (ring_axis, heads) if a and mesh.size[a] > 1)
    return Layout(((), (), axes, ()), zigzag=frozenset(axes) & {ring_axis})


def check(case: Case, mesh: Mesh, ring_axis: str | None, heads: str | None) -> None:
    layout = layout_of(ring_axis, heads, mesh)
    parts, grad = inputs(case)
    local = [shard(x, layout, mesh).requires_grad_() for x in parts]
    out = sequence_attention(
        *local,
        mesh,
        ring=ring_axis,
        heads=heads,
        causal=case.causal,
        documents=documents_of(case.documents, case.length),
    )
    grads = torch.autograd.grad(out, local, shard(grad, layout, mesh))
    tolerance = 1e-10 if case.dtype == torch.float64 else 1e-5
    for name, mine, whole in zip(("out", "dq", "dk", "dv"), (out, *grads), serial(case), strict=True):
        torch.testing.assert_close(
            mine,
            shard(whole, layout, mesh),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name} of {case} on {mesh}: {text}",
        )


WORLDS = {
    "ring 2": ({"sp": 2}, "sp", None),
    "ring 3": ({"sp": 3}, "sp", None),
    "ring 4": ({"dp": 1, "sp": 4}, "sp", None),
    "ring 8": ({"sp": 8}, "sp", None),
    "ulysses 2": ({"sp": 2}, None, "sp"),
    "ulysses 4": ({"sp": 4}, None, "sp"),
    "both": ({"sp": 2, "su": 2}, "sp", "su"),
    "ring 1 of both": ({"sp": 1, "su": 2}, "sp", "su"),
    "alone": ({"sp": 1, "su": 1}, "sp", "su"),
}


def _equal_to_torch(rank: int, world_size: int, port: int, names: list[str]) -> None:
    start(rank, world_size, port)
    for name in names:
        axes, ring_axis, heads = WORLDS[name]
        mesh = Mesh(axes)
        smallest = 2 * world_size
        for case in cases(smallest):
            check(case, mesh, ring_axis, heads)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_equal_to_torch_on_the_whole_sequence(world_size: int) -> None:
    names = [name for name, (axes, *_) in WORLDS.items() if math.prod(axes.values()) == world_size]
    spawn(_equal_to_torch, world_size, names=names)


def _broken(rank: int, world_size: int, port: int, what: str) -> None:
    start(rank, world_size, port)
    if what == "out":
        attend = ring.attend

        def forget(q: Tensor, k: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
            out, lse = attend(q, k, *rest)
            return out, lse if q.size(2) == k.size(2) else torch.full_like(lse, -math.inf)

        ring.attend = forget
    else:
        shift = attention.start_ring_shift
        sent = itertools.count(-2 * (world_size - 1))  # k and v forward, then backward, where their gradients
        gradients = (4, 5, 8, 9, 10, 11)  # follow them from the second step on

        def stay(x: Tensor, mesh: Mesh, axis: str) -> object:
            keys = next(sent) not in gradients
            return shift(x, mesh, axis) if keys else lambda: x

        attention.start_ring_shift = stay
    check(Case(True), Mesh({"sp": 4}), "sp", None)


@pytest.mark.parametrize("what", ["out", "dk"])
def test_the_check_fails_without_a_block_or_a_shift(what: str) -> None:
    with pytest.raises(RankError, match=f"{what} of Case"):
        spawn(_broken, 4, what=what)


def _bytes(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    n = world_size
    for name, dtype, key_heads in itertools.product(
        ("ring 4", "ulysses 4", "both"), (torch.float32, torch.bfloat16), (4, 2, 1)
    ):
        axes, ring_axis, heads = WORLDS[name]
        mesh = Mesh(axes)
        case = Case(True, key_heads=key_heads, dtype=dtype)
        layout = layout_of(ring_axis, heads, mesh)
        q, k, v = (shard(x, layout, mesh).requires_grad_() for x in inputs(case)[0])
        with count_communication() as forward:
            out = sequence_attention(q, k, v, mesh, ring=ring_axis, heads=heads, causal=True)
        with count_communication() as backward:
            out.sum().backward()
        queries, keys = (x.numel() * x.element_size() for x in (q, k))
        sums = k.numel() * 4
        if heads is not None:
            u = mesh.size[heads]
            shared = keys * math.lcm(key_heads, u) // key_heads
            exchanged = (u - 1) / u * (2 * queries + 2 * shared)
            assert forward.sent(axis=heads) == backward.sent(axis=heads) == exchanged
            assert (forward.calls(axis=heads), backward.calls(axis=heads)) == (2, 2)
            keys, sums = shared, shared // k.element_size() * 4
        if ring_axis is not None:
            n = mesh.size[ring_axis]
            assert forward.sent(axis=ring_axis) == forward.sent("shift") == (n - 1) * 2 * keys
            assert backward.sent(axis=ring_axis) == (n - 1) * (2 * keys + 2 * sums)
        assert forward.sent() + backward.sent() == sum(
            log.sent(axis=a) for log in (forward, backward) for a in mesh.axes
        )


def test_bytes_follow_the_formulas() -> None:
    spawn(_bytes, 4)


def _in_slabs(rank: int, world_size: int, port: int) -> None:
    """The same cases with masks of a few rows, and without any kernel."""
    start(rank, world_size, port)
    mesh = Mesh({"sp": 2})
    blocks._SLAB_CPU = 400
    for case in cases(4):
        check(case, mesh, "sp", None)
    kernels.KERNELS, blocks.find_kernel = (), lambda *_: None
    for case in cases(4):
        check(case, mesh, "sp", None)


def test_masks_and_scores_in_slabs() -> None:
    spawn(_in_slabs, 2)


def _dropout(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    mesh = Mesh({"sp": 2, "su": 2})
    layout = layout_of("sp", "su", mesh)
    case = Case(True, "both", length=16)
    q, k, v = (shard(x, layout, mesh).requires_grad_() for x in inputs(case)[0])
    numbers = documents_of("both", 16)

    def attend(p: float) -> Tensor:
        return sequence_attention(
            q, k, v, mesh, ring="sp", heads="su", causal=True, documents=numbers, dropout_p=p
        )

    torch.manual_seed(0)
    grad = shard(inputs(case)[1], layout, mesh)
    exact = (attend(0.0), *torch.autograd.grad(attend(0.0), (q, k, v), grad))
    draws = []
    for _ in range(100):
        out = attend(0.2)
        draws.append((out.detach(), *torch.autograd.grad(out, (q, k, v), grad)))
    for mean, std, true in (
        (torch.stack(x).mean(0), torch.stack(x).std(0), t) for *x, t in zip(*draws, exact, strict=True)
    ):
        # five standard errors of the mean
        assert ((mean - true).abs() <= 5 * std / math.sqrt(len(draws)) + 1e-9).all()
    out = draws[0][0]
    assert not torch.allclose(out, draws[1][0])
    # the mask of the backward pass is that of the forward pass: with the mask held, the output is linear in v
    torch.manual_seed(1)
    out = attend(0.5)
    (dv,) = torch.autograd.grad(out, v, grad)
    both = torch.stack([(out * grad).sum(), (v * dv).sum()])
    torch.distributed.all_reduce(both)
    torch.testing.assert_close(both[0], both[1])


def test_dropout_has_the_mean_of_no_dropout() -> None:
    spawn(_dropout, 4)


def _masks_differ(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    mesh = Mesh({"sp": 2})
    torch.manual_seed(0)  # alike on all ranks
    length = 64  # not causal, all scores equal: the output shows how many of the keys were kept
    q = k = torch.zeros(1, 1, length, 8)
    v = torch.eye(8).repeat(length // 8, 1)[None, None]
    out = sequence_attention(q, k, v, mesh, ring="sp", heads=None, causal=False, dropout_p=0.5)
    other = [torch.empty_like(out) for _ in range(2)]
    torch.distributed.all_gather(other, out)
    assert not torch.equal(*other)
    dropout = blocks.BlockDropout(0.5, 1)
    assert len({dropout.of_block(i, j).seed for i in range(4) for j in range(4)}) == 16


def test_ranks_with_the_same_seed_draw_different_masks() -> None:
    spawn(_masks_differ, 2)


def _kept_and_recomputed(rank: int, world_size: int, port: int) -> None:
    """What is kept is local; recomputation, compilation and autocast give the same."""
    start(rank, world_size, port)
    mesh = Mesh({"sp": 2})
    case = Case(True, length=64, dtype=torch.float32)
    local = [shard(x, layout_of("sp", None, mesh), mesh).requires_grad_() for x in inputs(case)[0]]

    def attend(*parts: Tensor, p: float = 0.0) -> Tensor:
        return sequence_attention(*parts, mesh, ring="sp", heads=None, causal=True, dropout_p=p)

    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = attend(*local)
    local_size = local[0].numel()
    assert sorted(t.numel() for t in kept) == sorted([local_size] * 4 + [local_size // WIDTH])
    grads = torch.autograd.grad(out.sum(), local)
    for p in (0.0, 0.5):
        torch.manual_seed(3)
        out = attend(*local, p=p)
        grads = torch.autograd.grad(out.square().sum(), local)
        torch.manual_seed(3)
        again = checkpoint(attend, *local, p=p, use_reentrant=False)
        torch.testing.assert_close(again, out, rtol=0, atol=0)
        for a, b in zip(torch.autograd.grad(again.square().sum(), local), grads, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    compiled = torch.compile(lambda *parts: attend(*parts) * 2, backend="eager")
    torch.testing.assert_close(compiled(*local), attend(*local) * 2)
    with torch.autocast("cpu", torch.bfloat16):
        half = attend(*local)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), attend(*local), rtol=0.02, atol=0.02)
    with pytest.raises(RuntimeError, match="create_graph=True goes through attention"):
        torch.autograd.grad(attend(*local).sum(), local, create_graph=True)


def test_kept_for_backward_and_recomputed() -> None:
    spawn(_kept_and_recomputed, 2)


def test_on_the_meta_device() -> None:
    with fake_world(3, 8):
        mesh = Mesh({"sp": 4, "su": 2})
        for documents in (None, torch.empty(2, 64, dtype=torch.int64, device="meta")):
            q, k, v = (torch.empty(2, heads, 8, 16, device="meta", requires_grad=True) for heads in (4, 2, 2))
            with count_communication() as log:
                out = sequence_attention(
                    q, k, v, mesh, ring="sp", heads="su", causal=True, documents=documents, dropout_p=0.1
                )
                out.sum().backward()
            assert (out.shape, k.grad.shape) == (q.shape, k.shape)
            assert log.calls("shift") == 2 * (3 + 3 + 3)


def test_other_widths_of_values_and_padding_of_nothing() -> None:
    """Values may be wider than keys, by plain products; a document mask on one rank needs no mesh."""
    q, k, v = (torch.randn(1, 2, 6, w, dtype=torch.float64, requires_grad=True) for w in (4, 4, 7))
    numbers = torch.tensor([[1, 1, 2, 2, 2, -3]])
    out = sequence_attention(q, k, v, None, ring=None, heads=None, causal=True, documents=numbers)
    seen = ((numbers[:, :, None].abs() == numbers[:, None]) & (numbers[:, None] > 0)).tril()
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v, seen.unsqueeze(1)))
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    expected = scaled_dot_product_attention(q, k, v, seen.unsqueeze(1))
    for a, b in zip(grads, torch.autograd.grad(expected.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)
    numbers[:] = -1
    out = sequence_attention(q, k, v, None, ring=None, heads=None, causal=True, documents=numbers)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(bool((x == 0).all()) for x in (out, *grads))


def test_what_cannot_be_is_refused() -> None:
    def attend(*shapes: tuple[int, ...], **options: object) -> None:
        parts = [torch.empty(shape, device="meta") for shape in (*shapes, *(shapes[-1:] * (3 - len(shapes))))]
        sequence_attention(*parts, mesh, **{"ring": None, "heads": None, "causal": True, **options})  # type: ignore[arg-type]

    with fake_world(1, 4):
        mesh = Mesh({"sp": 4})
        with pytest.raises(ValueError, match=r"cannot share 6 query heads among 4 ranks.*attention='ring'"):
            attend((1, 6, 8, 4), heads="sp")
        with pytest.raises(ValueError, match=r"length 7 is odd; pad the sequence to a multiple of 8"):
            attend((1, 4, 7, 4), ring="sp")
        with pytest.raises(ValueError, match=r"whole sequence, \(1, 32\), got \(1, 8\)"):
            attend((1, 4, 8, 4), ring="sp", documents=torch.ones(1, 8))
        with pytest.raises(ValueError, match="4 query heads cannot share 3 key heads"):
            attend((1, 4, 8, 4), (1, 3, 8, 4))
        with pytest.raises(ValueError, match="equal batches and lengths"):
            attend((1, 4, 8, 4), (1, 4, 9, 4))
        with pytest.raises(ValueError, match="dropout probability must lie in"):
            attend((1, 4, 8, 4), dropout_p=1.0)
        with pytest.raises(KeyError, match="xx"):
            attend((1, 4, 8, 4), ring="xx")


def test_documents_tell_what_a_block_sees() -> None:
    numbers = torch.tensor([[1, 1, 1, 2, 2, 2, 2, -2], [1, 1, 1, 1, 2, 2, 2, 2]])
    documents = blocks.documents_in(numbers, 4)
    assert documents.sight((0,), (0,)) == "all"
    assert documents.sight((0,), (2,)) == documents.sight((2,), (0,)) == "none"
    assert documents.sight((0,), (1,)) == documents.sight((2,), (3,)) == "some"
    assert documents.sight((3,), (2,)) == "all"  # padding looks at its document, which does not look at it
    assert blocks.documents_in(numbers, 4).bounds is documents.bounds  # asked for once
    numbers[:, :2] = 7
    assert blocks.documents_in(numbers, 4).sight((0,), (1,)) == "none"
