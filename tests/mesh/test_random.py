"""Numbers that depend on key and index only, and are as random as they should be."""

from __future__ import annotations

import math

import pytest
import torch

from colossalai.mesh import (
    Layout,
    Mesh,
    Normal,
    RandomStream,
    Uniform,
    ZeroRow,
    draw,
    random_key,
    shard,
    unshard,
)
from colossalai.mesh.random import fill_from, normal_numbers, random_bits, uniform_numbers
from colossalai.testing import spawn
from tests.mesh.world import start


def _splitmix64(state: int) -> int:
    """The generator in plain Python integers, as its authors define it."""
    mask = (1 << 64) - 1
    z = state & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_bits_are_those_of_splitmix64() -> None:
    index = torch.tensor([0, 1, 2, 1000, 2**40 + 3, 2**62])
    for key in (0, 1, 2**63 + 5, 2**64 - 1):
        expected = [_splitmix64(key + i * 0x9E3779B97F4A7C15) for i in index.tolist()]
        assert [b % 2**64 for b in random_bits(key, index).tolist()] == expected


def test_keys_tell_names_seeds_and_types_apart() -> None:
    keys = [
        random_key(*a) for a in [(0, "w"), (1, "w"), (0, "b"), (0, "w", 1), (0, "w", "1"), (0, "w1"), (0,)]
    ]
    assert len(set(keys)) == len(keys)
    assert random_key(7, "layer.weight") == random_key(7, "layer.weight")


@pytest.mark.parametrize("key", [random_key(0, "a"), random_key(1, "b")])
def test_distribution_of_uniform_and_normal_numbers(key: int) -> None:
    n = 1 << 20
    index = torch.arange(n)
    u = uniform_numbers(key, index).double()
    assert 0.0 <= u.min() < u.max() < 1.0
    z = normal_numbers(key, index).double()
    limit = 1.95 / math.sqrt(n)  # Kolmogorov-Smirnov: exceeded with probability 0.001
    steps = torch.arange(1, n + 1) / n
    assert (u.sort().values - steps).abs().max() < limit
    assert (torch.special.ndtr(z.sort().values) - steps).abs().max() < limit
    assert z.abs().max() > 4.5
    for lag in (1, 2, 64, 1024):
        assert abs((z[lag:] * z[:-lag]).mean()) < 4.5 / math.sqrt(n)
        assert abs(((u[lag:] - 0.5) * (u[:-lag] - 0.5)).mean() * 12) < 4.5 / math.sqrt(n)


def test_streams_of_different_names_are_independent() -> None:
    index = torch.arange(1 << 18)
    a, b = (normal_numbers(random_key(0, name), index) for name in ("layers.0.weight", "layers.1.weight"))
    assert abs((a * b).mean()) < 4.5 / math.sqrt(len(index))


def _pieces(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    mesh = Mesh({"a": 2, "b": 3})
    key = random_key(3, "w")
    cases = [
        ((12, 6), Layout((("a",), ("b",)))),
        ((12, 6), Layout((("b", "a"), ()))),
        ((12, 6), Layout(((), ("b", "a")))),
        ((4, 6, 3, 2), Layout((("a",), (), ("b",), ()))),
        ((6, 36), Layout((("a",), ("b",)), fused=(1, 3))),
        ((12,), Layout((("a", "b"),))),
        ((4, 40000), Layout(((), ("a",)))),  # rows longer than a slab
        ((3, 5), Layout(((), ()))),
    ]
    for distribution in (Uniform(-1.0, 3.0), Normal(0.5, 0.02), ZeroRow(Normal(), 2, 6)):
        for shape, layout in cases:
            full = draw(distribution, key, shape)
            piece = draw(distribution, key, shape, layout, mesh)
            assert torch.equal(piece, shard(full, layout, mesh)), (shape, str(layout))
            half = draw(distribution, key, shape, layout, mesh, dtype=torch.bfloat16)
            assert torch.equal(half, shard(full.bfloat16(), layout, mesh))
    full = draw(Normal(), key, (7, 5))
    layout = Layout((("a", "b"), ()))
    assert torch.equal(
        draw(Normal(), key, (7, 5), layout, mesh, uneven=True), shard(full, layout, mesh, uneven=True)
    )
    transposed = torch.empty(6, 12).t()  # a strided piece is filled like any other
    fill_from(lambda i: normal_numbers(key, i), transposed, (12, 6))
    assert torch.equal(transposed, draw(Normal(), key, (12, 6)))


def test_pieces_join_to_the_tensor_of_the_serial_model() -> None:
    spawn(_pieces, 6)


def _dropout(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    mesh = Mesh({"dp": 2, "tp": 2})
    x = torch.rand(8, 6, generator=torch.Generator().manual_seed(0)) + 1.0
    serial = RandomStream(11, "dropout")
    expected = [serial.dropout(x, 0.25) for _ in range(3)]
    assert not torch.equal(expected[0], expected[1])
    for layout in (
        Layout((("dp",), ())),
        Layout((("dp",), ("tp",))),
        Layout((("tp", "dp"), ())),
        Layout(((), ())),
    ):
        stream = RandomStream(11, "dropout")
        for full in expected:
            local = stream.dropout(shard(x, layout, mesh), 0.25, mesh, layout)
            assert torch.equal(unshard(local, layout, mesh), full)


def test_dropout_masks_do_not_depend_on_the_plan() -> None:
    spawn(_dropout, 4)


def test_dropout_keeps_the_expectation_and_replays() -> None:
    stream = RandomStream(0, "x")
    x = torch.ones(1 << 16, requires_grad=True)
    state = stream.state_dict()
    y = stream.dropout(x, 0.1)
    assert abs(y.mean() - 1.0) < 4.5 * math.sqrt(0.1 / 0.9 / len(x))
    y.sum().backward()
    assert torch.equal(x.grad, y)
    stream.load_state_dict(state)
    assert torch.equal(stream.dropout(x, 0.1), y)
    assert stream.dropout(x, 0.1, training=False) is x
    assert stream.dropout(x, 0.0) is x
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\), got 1.0"):
        stream.dropout(x, 1.0)


@pytest.mark.gpu
def test_cpu_and_gpu_draw_the_same_bits() -> None:
    for distribution in (Uniform(-0.3, 0.7), Normal(0.0, 0.02)):
        cpu = draw(distribution, random_key(5, "w"), (1000, 1003))
        gpu = draw(distribution, random_key(5, "w"), (1000, 1003), device="cuda")
        assert torch.equal(cpu, gpu.cpu())
