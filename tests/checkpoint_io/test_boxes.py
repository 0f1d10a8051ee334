"""Rectangles: what two have in common, ranges of flat tensors as rectangles, and pieces of tensors under
layouts.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from colossalai.checkpoint_io.boxes import Box, boxes_of_flat, boxes_of_ranges, whole
from colossalai.checkpoint_io.held_tensors import HeldBox, pieces_of, pieces_of_holding
from colossalai.checkpoint_io.write_plan import TensorOutline, make_write_plan
from colossalai.interface import Holding
from colossalai.mesh import Layout, place, shard


def test_common_part_is_that_of_the_elements() -> None:
    generator = random.Random(0)
    for _ in range(300):
        dims = generator.randint(1, 3)
        boxes = [
            Box(
                tuple(generator.randint(0, 4) for _ in range(dims)),
                tuple(generator.randint(1, 4) for _ in range(dims)),
            )
            for _ in range(2)
        ]
        masks = []
        for box in boxes:
            mask = torch.zeros((8,) * dims, dtype=torch.bool)
            mask[box.within(whole((8,) * dims))] = True
            masks.append(mask)
        common = boxes[0].common(boxes[1])
        expected = masks[0] & masks[1]
        if common is None:
            assert not expected.any()
            continue
        found = torch.zeros_like(expected)
        found[common.within(whole((8,) * dims))] = True
        assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (1, 5, 1), (2, 2, 2, 3), (0, 3)])
def test_flat_ranges_become_few_boxes(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    for start, end in itertools.combinations_with_replacement(range(tensor.numel() + 1), 2):
        boxes = list(boxes_of_flat(shape, start, end))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        for box, at in boxes:
            expected = torch.arange(start + at, start + at + box.numel)
            assert torch.equal(tensor[box.within(whole(shape))].flatten(), expected)
        assert sum(box.numel for box, _ in boxes) == end - start


def test_flat_range_outside_of_the_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"range 3 to 9 is not within the 6 elements of shape \(2, 3\)"):
        list(boxes_of_flat((2, 3), 3, 9))


def test_fused_ranges_are_several_boxes() -> None:
    (first, at), (second, then) = boxes_of_ranges([[(2, 2)], [(0, 3), (6, 3)]])
    assert (first, at) == (Box((2, 0), (2, 3)), Box((0, 0), (2, 3)))
    assert (second, then) == (Box((2, 6), (2, 3)), Box((0, 3), (2, 3)))


class _Mesh:
    """The place of one rank, without a process group."""

    def __init__(self, size: dict[str, int], coord: dict[str, int]) -> None:
        self.size, self.coord = size, coord

    def group_size(self, *axes: str) -> int:
        return int(torch.tensor([self.size[a] for a in axes] or [1]).prod())


LAYOUTS = {
    "rows": (Layout((("a",), ())), False),
    "both": (Layout((("a",), ("b",))), False),
    "fused": (Layout((("b",), ("a",)), fused=(1, 3)), False),
    "turned": (Layout((("a", "b"), ())), True),
    "turned and fused": (Layout(((), ("a",)), fused=(1, 3)), True),
}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_pieces_of_all_ranks_join_to_the_serial_tensor(name: str, flat: bool) -> None:
    layout, transposed = LAYOUTS[name]
    shape = (7, 12)  # as stored; 7 does not divide
    stored = torch.arange(84.0).view(shape)
    serial = stored.t() if transposed else stored
    joined = torch.full(serial.shape, -1.0)
    for a, b in itertools.product(range(2), range(2)):
        mesh = _Mesh({"a": 2, "b": 2}, {"a": a, "b": b})
        local = shard(stored, layout, mesh, uneven=True)  # type: ignore[arg-type]
        param = place(torch.nn.Parameter(local), layout, shape, transposed=transposed)
        pieces: list[HeldBox] = []
        if flat:  # as ZeRO holds it: every rank has a range of the flattened piece
            cuts = [0, 5, local.numel() // 2, local.numel()]
            for start, end in itertools.pairwise(cuts):
                value = local.flatten()[start:end].clone()
                pieces += pieces_of_holding(Holding(param, value, start, end), value, mesh, name)  # type: ignore[arg-type]
        else:
            pieces = pieces_of(param, param, mesh, name)  # type: ignore[arg-type]
        for piece in pieces:
            joined[piece.box.within(whole(joined.shape))] = piece.view()
    assert torch.equal(joined, serial)


def test_pieces_are_views_that_can_be_loaded_into() -> None:
    layout = Layout(((), ("a",)), fused=(1, 3))
    mesh = _Mesh({"a": 2}, {"a": 1})
    param = place(torch.nn.Parameter(torch.zeros(4, 6)), layout, (4, 12), transposed=True)
    serial = torch.arange(48.0).view(12, 4)
    for piece in pieces_of(param, param, mesh, "w"):  # type: ignore[arg-type]
        piece.view().copy_(serial[piece.box.within(whole((12, 4)))])
    assert torch.equal(param.detach(), shard(serial.t(), layout, mesh))  # type: ignore[arg-type]


def test_a_mark_without_a_layout_is_refused() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    param.is_tensor_parallel = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="old is marked as one of several pieces"):
        pieces_of(param, param, None, "old")


def _described(
    name: str, boxes: list[Box], shape: tuple[int, ...] = (4,), **options: object
) -> TensorOutline:
    fields = {
        "dtype": torch.float32,
        "shared": None,
        "stage": None,
        "aliases": (),
        "by_first": False,
    } | options
    return TensorOutline(name=name, shape=shape, boxes=tuple(boxes), **fields)  # type: ignore[arg-type]


def test_copies_are_written_once_and_by_the_least_busy() -> None:
    copy = _described("model/a", [whole((4,))])
    plan = make_write_plan([[copy, _described("model/b", [whole((4,))])]] * 2)
    assert plan.tensors["model/a"].writers == {whole((4,)): 0}
    assert plan.tensors["model/b"].writers == {whole((4,)): 1}


def test_ranks_may_cut_what_they_all_hold_at_different_places() -> None:
    shape = (3, 4)
    held = [[box for box, _ in boxes_of_flat(shape, *ends)] for ends in ((0, 5), (0, 8), (5, 12), (8, 12))]
    plan = make_write_plan([[_described("w", boxes, shape)] for boxes in held]).tensors["w"]
    seen = torch.zeros(shape)
    for box, holders in plan.holders.items():
        seen[box.within(whole(shape))] += 1
        assert plan.writers[box] in holders
        assert holders == [r for r, own in enumerate(held) if any(b.holds(box) for b in own)]
    assert torch.equal(seen, torch.ones(shape))


def test_stages_that_share_a_tensor_write_it_once_with_its_states() -> None:
    mark = (3, 0)
    first = [_described(n, [whole((4,))], shared=mark, stage=0) for n in ("model/in", "optimizer/in/exp_avg")]
    last = [
        _described(n, [whole((4,))], shared=mark, stage=1) for n in ("model/out", "optimizer/out/exp_avg")
    ]
    plan = make_write_plan([first, last])
    assert set(plan.tensors) == {"model/in", "optimizer/in/exp_avg"}
    assert plan.ties == {"model/out": "model/in", "optimizer/out/exp_avg": "optimizer/in/exp_avg"}


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (
            [[_described("w", [Box((0,), (2,))])]],
            r"hold 2 of the 4 elements of w \(shape \(4,\)\) in 1 boxes",
        ),
        (
            [[_described("w", [Box((0,), (3,)), Box((1,), (3,))])]],
            r"rank 0 holds elements of w twice: in Box\(.*\) and in Box",
        ),
        ([[_described("w", [Box((1,), (4,))])]], r"and Box\(.*\) is outside"),
        (
            [[_described("w", [whole((4,))])], [_described("w", [whole((5,))], (5,))]],
            r"w is torch.float32 of shape \(4,\) on rank 0 and torch.float32 of shape \(5,\) on rank 1",
        ),
        (
            [[_described("0.w", [whole((4,))], stage=0)], [_described("0.w", [whole((4,))], stage=1)]],
            r"stages 0 and 1 \(ranks 0 and 1\) both have a parameter 0\.w, and do not share it",
        ),
    ],
)
def test_what_would_make_a_wrong_checkpoint_is_refused(held: list[list[TensorOutline]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_write_plan(held)
