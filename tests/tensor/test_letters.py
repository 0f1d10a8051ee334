"""Letters are right if what pieces give is a piece of what the whole gives, or adds up to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from colossalai.tensor.letters import OpCall, OpLetters, call_of_node, letters_of, register_letters

aten = torch.ops.aten
PARTS = 2


def _t(*shape: int, kind: str = "float") -> Tensor:
    if kind == "ids":
        return torch.randint(0, 6, shape)
    return torch.randn(*shape, dtype=torch.float64)


QKV = _t(2, 4, 6, 8), _t(2, 4, 6, 8), _t(2, 4, 6, 8)
STATISTICS = _t(6), _t(6), _t(6), _t(6).abs()
# an operation, its arguments, and the letters that must be cuttable
CASES: list[tuple[Any, tuple[Any, ...], set[str]]] = [
    (aten.linear.default, (_t(4, 2, 6), _t(8, 6)), {"m0", "m1", "k", "n"}),
    (aten.addmm.default, (_t(4, 8), _t(4, 6), _t(6, 8)), {"m0", "n"}),
    (aten.matmul.default, (_t(2, 4, 6), _t(6, 8)), {"b0", "m0", "k", "n"}),
    (aten.bmm.default, (_t(2, 4, 6), _t(2, 6, 8)), {"b0", "m0", "k", "n"}),
    (aten.conv2d.default, (_t(2, 4, 6, 6), _t(8, 4, 3, 3), None, [1, 1], [1, 1]), {"m0", "k", "n"}),
    (aten.conv_transpose2d.input, (_t(2, 4, 6, 6), _t(4, 8, 3, 3)), {"m0", "k", "n"}),
    (aten.embedding.default, (_t(6, 8), _t(4, 2, kind="ids")), {"m0", "m1", "n"}),
    (aten.scaled_dot_product_attention.default, (*QKV, _t(2, 1, 6, 6)), {"b0", "b1"}),
    (aten.layer_norm.default, (_t(4, 2, 6), [6], _t(6), _t(6)), {"d0", "d1"}),
    (aten.group_norm.default, (_t(4, 6, 2), 3, _t(6), _t(6)), {"d0"}),
    (aten.softmax.int, (_t(4, 6), -1), {"d0"}),
    (aten.add.Tensor, (_t(4, 6), _t(6)), {"d0", "d1"}),
    (aten.where.self, (_t(4, 6) > 0, _t(4, 6), _t(4, 1)), {"d0", "d1"}),
    (aten.sum.dim_IntList, (_t(4, 2, 6), [1]), {"d0", "d1", "d2"}),
    (aten.amax.default, (_t(4, 6), [1], True), {"d0"}),
    (aten.cumsum.default, (_t(4, 6), 0), {"d1"}),
    (aten.gather.default, (_t(4, 6), 1, _t(4, 2, kind="ids")), {"d0"}),
    (aten.view.default, (_t(4, 6, 8), [24, 8]), {"d0", "d1"}),
    (aten.view.default, (_t(4, 8), [4, 4, 2]), {"d0", "d1"}),
    (aten.view.default, (_t(4, 24), [4, 3, 4, 2]), {"d0", "d1"}),
    (aten.permute.default, (_t(2, 4, 6), [2, 0, 1]), {"d0", "d1", "d2"}),
    (aten.expand.default, (_t(4, 1, 6), [4, 2, -1]), {"d0", "d1", "d2"}),
    (aten.unsqueeze.default, (_t(4, 6), 1), {"d0", "d1"}),
    (aten.split.Tensor, (_t(4, 12), 4, 1), {"d0", "piece"}),
    (aten.cat.default, ([_t(4, 2), _t(4, 6)], 1), {"d0"}),
    (aten.stack.default, ([_t(4, 2), _t(4, 2)], 1), {"d0", "d2"}),
    (aten.slice.Tensor, (_t(4, 6), 1, 2, 5), {"d0"}),
    (aten.select.int, (_t(4, 6), 1, 2), {"d0"}),
    (aten.pad.default, (_t(4, 6), [0, 1]), {"d0"}),
    (aten.max_pool2d.default, (_t(2, 4, 6, 6), [2, 2]), {"d0", "d1"}),
    (aten.mse_loss.default, (_t(4, 6), _t(4, 6), 2), {"d0", "d1"}),
    (aten.cross_entropy_loss.default, (_t(4, 6), _t(4, kind="ids"), None, 2), {"d0"}),
    (aten.batch_norm.default, (_t(4, 6, 2), *STATISTICS, False, 0.1, 1e-5, False), {"c", "n"}),
]  # fmt: skip


def _node(op: Any, args: tuple[Any, ...]) -> tuple[fx.Node, list[Tensor]]:
    graph, tensors = fx.Graph(), list[Tensor]()

    def placed(value: Any) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], Tensor):
            return [placed(inner) for inner in value]
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(f"x{len(tensors)}")
        node.meta["val"] = value
        tensors.append(value)
        return node

    node = graph.call_function(op, tuple(placed(a) for a in args))
    node.meta["val"] = op(*args)
    return node, tensors


def _piece(x: Tensor, dim: int, blocks: int, part: int) -> Tensor:
    return torch.cat([block.chunk(PARTS, dim)[part] for block in x.chunk(blocks, dim)], dim)


def _pieces(letters: OpLetters, tensors: list[Tensor], letter: str, part: int) -> Iterator[Tensor]:
    for number, x in enumerate(tensors):
        for where, dim in letters.places(letter):
            if where == number:
                x = _piece(x, dim, letters.blocks.get((number, dim), 1), part)
        yield x


def _local_arguments(
    op: Any, args: tuple[Any, ...], pieces: list[Tensor], shape: torch.Size
) -> tuple[Any, ...]:
    left = iter(pieces)

    def local(value: Any) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], Tensor):
            return [next(left) for _ in value]
        return next(left) if isinstance(value, Tensor) else value

    found = [local(a) for a in args]
    if op in (aten.view.default, aten.expand.default):
        found[1] = list(shape)
    if op is aten.split.Tensor:
        found[1] = shape[found[2]]
    return tuple(found)


@pytest.mark.parametrize(
    ("op", "args", "expected"),
    CASES,
    ids=lambda value: getattr(value, "_schema", None) and value._schema.name,
)
def test_pieces_give_pieces_or_sums(op: Any, args: tuple[Any, ...], expected: set[str]) -> None:
    node, tensors = _node(op, args)
    letters = letters_of(call_of_node(node))
    assert letters is not None
    assert expected <= set(letters.letters)
    whole = node.meta["val"] if isinstance(node.meta["val"], (list, tuple)) else [node.meta["val"]]
    for letter in expected:
        places = list(letters.places(letter))
        results = []
        for part in range(PARTS):
            cut = list(_pieces(letters, [*tensors, *whole], letter, part))
            pieces, target = cut[: len(tensors)], cut[len(tensors) :]
            found = op(*_local_arguments(op, args, pieces, target[0].shape))
            results.append((found if isinstance(found, (list, tuple)) else [found], target))
        for i, result in enumerate(whole):
            if letter in letters.summed:
                torch.testing.assert_close(sum(found[i] for found, _ in results), result)
            else:
                assert any(number == len(tensors) + i for number, _ in places)
                for found, target in results:
                    torch.testing.assert_close(found[i], target[i])


def test_what_looks_at_a_whole_dim_is_not_cut_there() -> None:
    for op, args, dim in (
        (aten.softmax.int, (_t(4, 6), -1), 1),
        (aten.layer_norm.default, (_t(4, 6), [6]), 1),
        (aten.slice.Tensor, (_t(4, 6), 1, 0, 3), 1),
        (aten.cat.default, ([_t(4, 2), _t(4, 2)], 0), 0),
        (aten.amax.default, (_t(4, 6), [1]), 1),
    ):
        letters = letters_of(call_of_node(_node(op, args)[0]))
        assert letters is not None
        assert letters.operands[0][dim] not in letters.letters


def test_a_rule_of_a_user_is_found_and_checked() -> None:
    @torch.library.custom_op("letters_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    node, _ = _node(torch.ops.letters_test.twice.default, (_t(4, 6),))
    assert letters_of(call_of_node(node)) is None

    @register_letters("letters_test::twice")
    def rule(call: OpCall) -> OpLetters:
        return OpLetters((("d0", "d1"),), (("d0", "d1"),))

    found = letters_of(call_of_node(node))
    assert found is not None
    assert found.letters == ("d0", "d1")
    node, _ = _node(torch.ops.letters_test.twice.default, (_t(4),))
    with pytest.raises(ValueError, match="letters of 'letters_test::twice'"):
        letters_of(call_of_node(node))
