"""Every element of every parameter is owned by exactly one rank, whatever the sizes."""

from itertools import pairwise

import pytest
import torch

from colossalai.mesh import Layout, place, placement
from colossalai.nn.optimizer import FusedLAMB, HybridAdam
from colossalai.zero.pieces import (
    FlatLayout,
    balanced_owners,
    even_layout,
    is_elementwise,
    make_piece,
    owned_layout,
    piece_of,
)

SIZES = [(5,), (1, 1, 1), (7, 3, 129), (1000, 1, 64), (4096 * 5, 3)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_an_even_cut_covers_everything_once(sizes: tuple[int, ...], parts: int) -> None:
    layout = even_layout(sizes, parts)
    assert layout.total == layout.parts * layout.shard >= sum(sizes)
    for index, size in enumerate(sizes):
        ends = [(start, end) for _, start, end in layout.owners(index)]
        assert ends[0][0] == 0
        assert ends[-1][1] == size
        assert all(a[1] == b[0] for a, b in pairwise(ends))
    owned = [sum(b - a for a, b in (layout.piece(i, r) for i in range(len(sizes)))) for r in range(parts)]
    assert sum(owned) == sum(sizes)
    assert max(owned) <= layout.shard
    assert all(offset % 8 == 0 for offset in layout.offsets)


def test_shards_of_large_buffers_are_aligned() -> None:
    assert even_layout([100_003], 3).shard % 64 == 0
    assert even_layout([10], 3).shard == 4


def test_an_owner_has_whole_parameters() -> None:
    layout = owned_layout([6, 4], 3, owner=1)
    assert layout.total == 12  # the second one is aligned
    assert layout.owners(0) == [(1, 0, 6)]
    assert layout.owners(1) == [(1, 0, 4)]
    assert layout.piece(1, 2) == (0, 0)


def test_owners_are_balanced() -> None:
    owners = balanced_owners([100, 1, 60, 40, 1, 2], 2)
    load = [sum(n for n, o in zip([100, 1, 60, 40, 1, 2], owners, strict=True) if o == r) for r in range(2)]
    assert sorted(load) == [102, 102]


def test_which_optimizers_take_slices() -> None:
    p = [torch.nn.Parameter(torch.zeros(2))]

    class Mine(torch.optim.AdamW):
        pass

    assert is_elementwise(torch.optim.AdamW(p))
    assert is_elementwise(HybridAdam(p))
    assert not is_elementwise(FusedLAMB(p))
    assert not is_elementwise(torch.optim.Adafactor(p))
    assert not is_elementwise(Mine(p))  # nobody knows what it does


def test_a_piece_is_a_view_of_the_buffer() -> None:
    layout = FlatLayout(sizes=(6, 4), offsets=(0, 6), parts=2, shard=5)
    buffer = torch.arange(10.0)
    params = [torch.nn.Parameter(buffer[:6].view(2, 3)), torch.nn.Parameter(buffer[6:].view(4))]
    first, second = (make_piece(p, layout, i, 1, buffer) for i, p in enumerate(params))
    assert first.value.tolist() == [5.0]
    assert second.value.tolist() == [6.0, 7.0, 8.0, 9.0]
    assert first.is_shared
    with torch.no_grad():
        second.value.add_(1)
    assert params[1].tolist() == [7.0, 8.0, 9.0, 10.0]
    assert second.in_shard(torch.arange(5)).tolist() == [1, 2, 3, 4]
    assert first.in_shard(torch.arange(5)).tolist() == [0]
    assert first.cut(torch.arange(6).view(2, 3)).tolist() == [5]
    assert make_piece(params[1], layout, 1, 0, buffer).is_empty


def test_a_master_is_a_copy_in_float32() -> None:
    layout = owned_layout([6], 2, owner=0)
    buffer = torch.arange(6.0).bfloat16()
    param = torch.nn.Parameter(buffer.view(2, 3))
    piece = make_piece(param, layout, 0, 0, buffer, dtype=torch.float32)
    assert piece.value.dtype == torch.float32
    assert piece.value.shape == (2, 3)
    assert not piece.is_shared
    assert make_piece(param, layout, 0, 1, buffer, dtype=torch.float32).is_empty


def test_a_piece_lies_on_the_tensor_axes_of_its_parameter() -> None:
    param = torch.nn.Parameter(torch.zeros(2, 3))
    place(param, Layout((("tp",), ())), (4, 3))
    piece = piece_of(param, even_layout([6], 2), 0, 0, param.detach().view(-1)[:3])
    assert placement(piece.value) == Layout((("tp",),))
