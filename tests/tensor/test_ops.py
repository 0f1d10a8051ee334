"""Functions of ColoTensors: values and gradients are those of the serial function, and cuts are kept where
promised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from colossalai.mesh import count_communication
from colossalai.tensor import ColoTensor, DistSpecManager, ProcessGroup, colo_op_impl
from colossalai.tensor.op_wrapper import IMPLEMENTATIONS
from colossalai.testing import RankError, spawn
from tests.tensor.world import assert_same, cut, start, whole

PLAIN = "plain"  # a plain tensor, which counts as whole
Arg = tuple[
    tuple[int, ...], Any
]  # shape; dim of the cut, None for a whole ColoTensor, PLAIN, or (dim, output_replicate)
NEW_GELU = lambda x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0))))  # noqa: E731

# name, function, arguments, the dim along which the result is cut (None: whole)
CASES: list[tuple[str, Callable[..., Any], list[Arg], int | None]] = [
    # products: role N
    ("linear column", F.linear, [((2, 3, 8), PLAIN), ((12, 8), (0, False))], 2),
    ("linear column gathered", F.linear, [((2, 3, 8), PLAIN), ((12, 8), (0, True))], None),
    ("linear column bias", F.linear, [((3, 8), PLAIN), ((12, 8), (0, False)), ((12,), (0, False))], 1),
    ("linear column whole bias", F.linear, [((3, 8), PLAIN), ((12, 8), (0, True)), ((12,), None)], None),
    ("linear column of cut features", F.linear, [((3, 8), 1), ((12, 8), (0, False))], 1),
    # role K
    ("linear row", F.linear, [((2, 3, 8), PLAIN), ((12, 8), (1, True)), ((12,), None)], None),
    ("linear row of cut features", F.linear, [((2, 3, 8), 2), ((12, 8), (1, False)), ((12,), PLAIN)], None),
    ("linear row of cut rows", F.linear, [((4, 8), 0), ((12, 8), (1, True)), ((12,), 0)], None),
    # role M
    ("linear of cut rows", F.linear, [((4, 8), 0), ((12, 8), None), ((12,), None)], 0),
    ("linear of cut rows, plain weight", F.linear, [((2, 4, 8), 1), ((12, 8), PLAIN), ((12,), PLAIN)], 1),
    # without a compute spec the weight is brought together
    ("linear without compute spec", F.linear, [((3, 8), PLAIN), ((12, 8), 0)], None),
    ("linear of a vector", F.linear, [((8,), PLAIN), ((12, 8), (0, False))], 0),
    ("addmm column", torch.addmm, [((12,), (0, False)), ((4, 8), PLAIN), ((8, 12), (1, False))], 1),
    ("addmm row", torch.addmm, [((12,), None), ((4, 8), 1), ((8, 12), (0, True))], None),
    (
        "addmm scaled",
        lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2.0),
        [((12,), PLAIN), ((4, 8), PLAIN), ((8, 12), (1, True))],
        None,
    ),
    ("matmul", torch.matmul, [((2, 4, 8), PLAIN), ((8, 12), (1, False))], 2),
    ("@ transposed", lambda x, w: x @ w.t(), [((4, 8), PLAIN), ((12, 8), (0, False))], 1),
    ("@ .T", lambda x, w: x @ w.T, [((4, 8), 1), ((12, 8), (1, True))], None),
    ("weight on the left", lambda x, w: w @ x, [((8, 3), PLAIN), ((12, 8), (0, False))], 0),
    ("weight on the left, summed over", lambda x, w: w @ x, [((8, 3), PLAIN), ((12, 8), (1, False))], None),
    ("bmm", torch.bmm, [((2, 3, 4), 0), ((2, 4, 5), None)], 0),
    # elementwise
    ("new gelu", NEW_GELU, [((3, 8), 1)], 1),
    ("gelu", F.gelu, [((4, 8), 0)], 0),
    ("neg", lambda x: -x, [((4, 8), 0)], 0),
    ("add bias", lambda x, b: x + b, [((3, 8), 1), ((8,), PLAIN)], 1),
    ("add cut bias", torch.add, [((2, 3, 8), 2), ((8,), 0)], 2),
    ("bias first", lambda x, b: b - x, [((3, 8), 1), ((8,), PLAIN)], 1),
    ("times a scalar tensor", torch.mul, [((3, 8), 1), ((), PLAIN)], 1),
    ("divided by a column", lambda x, s: x / (s * s + 1), [((3, 8), 1), ((3, 1), PLAIN)], 1),
    ("row-cut times features", torch.mul, [((4, 8), 0), ((8,), PLAIN)], 0),
    ("row-cut times whole ColoTensor", torch.mul, [((4, 8), 0), ((8,), None)], 0),
    ("two cuts", torch.mul, [((4, 8), 0), ((4, 8), 1)], 0),
    ("where", lambda x, y: torch.where(x > 0, x, y), [((3, 8), 1), ((3, 8), PLAIN)], 1),
    ("masked_fill", lambda x: x.masked_fill(x > 0, 2.0), [((3, 8), 1)], 1),
    ("clamp", lambda x: x.clamp(-0.5, 0.5), [((3, 8), 1)], 1),
    ("pow both ways", lambda x: (x * x) ** 2 + 2.0**x, [((3, 8), 1)], 1),
    ("to", lambda x: x.double().to(torch.float32).contiguous(), [((3, 8), 1)], 1),
    ("in place", lambda x: (x * 1).mul_(3).add_(1).relu_(), [((3, 8), 1)], 1),
    ("in place with a whole", lambda x, b: (x * 1).add_(b), [((3, 8), 1), ((8,), PLAIN)], 1),
    ("+= scalar tensor", lambda x, s: _iadd(x * 1, s), [((3, 8), 1), ((), PLAIN)], 1),
    ("relu in place", lambda x: F.relu(x * 1, inplace=True), [((3, 8), 1)], 1),
    ("ones_like", lambda x: x * torch.ones_like(x), [((3, 8), 1)], 1),
    # shapes
    ("view to rows", lambda x: x.view(-1, x.size(-1)), [((2, 3, 8), 2)], 1),
    ("view back", lambda x: x.view(-1, 8).view(2, 3, 8), [((2, 3, 8), 2)], 2),
    ("heads", lambda x: x.view(*x.shape[:-1], -1, 2).transpose(1, 2), [((2, 3, 8), 2)], 1),
    ("heads merged", lambda x: x.transpose(1, 2).reshape(2, 3, 8), [((2, 4, 3, 2), 1)], 2),
    ("flatten everything", lambda x: x.flatten(), [((2, 8), 1)], None),
    ("flatten from the cut", lambda x: x.flatten(1), [((2, 4, 3), 1)], 1),
    ("unflatten too small", lambda x: x.unflatten(1, (1, 8)), [((3, 8), 1)], 2),
    ("squeeze and unsqueeze", lambda x: x.unsqueeze(0).squeeze(2), [((3, 1, 8), 2)], 2),
    ("permute", lambda x: x.permute(2, 0, 1), [((2, 3, 8), 2)], 0),
    ("shift", lambda x: x[..., :-1, :].contiguous(), [((2, 3, 8), 2)], 2),
    ("choose a row", lambda x: x[1], [((3, 8), 1)], 0),
    ("choose from the cut", lambda x: x[:, 2:5], [((3, 8), 1)], None),
    ("choose with a tensor", lambda x: x[torch.tensor([0, 2])], [((3, 8), 1)], 1),
    ("new dim", lambda x: x[None, :, None], [((3, 8), 1)], 3),
    # of each row by itself
    ("softmax of rows", lambda x: F.softmax(x, 1), [((4, 8), 0)], 0),
    ("softmax of rows, float64", lambda x: x.softmax(dim=-1, dtype=torch.float64), [((4, 8), 0)], 0),
    ("log_softmax of columns", lambda x: torch.log_softmax(x, dim=0), [((3, 8), 1)], 1),
    ("log_softmax over the cut", lambda x: F.log_softmax(x, dim=1), [((3, 8), 1)], None),
    # everything else is computed on wholes
    ("softmax", lambda x: x.softmax(-1), [((3, 8), 1)], None),
    ("cumsum", lambda x: torch.cumsum(x, 0), [((4, 3), 0)], None),
    ("sum", lambda x: x.sum(), [((3, 8), 1)], None),
    ("cat", lambda x, y: torch.cat([x, y]), [((4, 8), 0), ((2, 8), PLAIN)], None),
    ("split", lambda x: x.split(4, dim=1)[1], [((3, 8), 1)], None),
    ("norm", lambda x: torch.linalg.vector_norm(x), [((3, 8), 1)], None),
    ("whole ColoTensor", lambda x: (x * 2).exp().sum(0), [((3, 8), None)], None),
    # normalization
    (
        "layer norm of rows",
        lambda x, w, b: F.layer_norm(x, (8,), w, b),
        [((4, 8), 0), ((8,), None), ((8,), PLAIN)],
        0,
    ),
    ("layer norm of cut features", lambda x, w: F.layer_norm(x, (8,), w), [((4, 8), 1), ((8,), None)], None),
    (
        "layer norm, cut weight",
        lambda x, w: F.layer_norm(x, (8,), w),
        [((4, 8), PLAIN), ((8,), (0, True))],
        None,
    ),
]


def _iadd(x: Tensor, y: Tensor) -> Tensor:
    x += y
    return x


def _argument(full: Tensor, how: Any, pg: ProcessGroup) -> Tensor:
    if how == PLAIN:
        return full.detach().clone().requires_grad_(full.requires_grad)
    dim, output_replicate = how if isinstance(how, tuple) else (how, None)
    return cut(full, dim, pg, output_replicate)


def _run_cases(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    pg = ProcessGroup(tp_degree=2)
    for name, function, arguments, dim in CASES:
        torch.manual_seed(3)
        serial = [torch.randn(shape).requires_grad_() for shape, _ in arguments]
        parallel = [_argument(t, how, pg) for t, (_, how) in zip(serial, arguments, strict=True)]
        with DistSpecManager.implicit_gathers():
            result = assert_same(function, serial, parallel, pg, name)
        assert isinstance(result, ColoTensor), name
        cut_along = result.placement.state("tp")
        assert cut_along == ("I" if dim is None else dim), f"{name}: cut along {cut_along}"


def test_values_gradients_and_cuts() -> None:
    spawn(_run_cases, 2)


def test_values_gradients_and_cuts_with_data_parallelism() -> None:
    spawn(_run_cases, 4)


def _lookups(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    pg = ProcessGroup(tp_degree=2)
    ids = torch.tensor([[0, 5, 3], [4, 4, 1]])
    for dim, padding, kept in [
        (1, None, True),
        (1, 4, True),
        (0, None, False),
        (0, 4, False),
        (0, -5, False),
    ]:
        table = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        result = assert_same(
            lambda t, p=padding: F.embedding(ids, t, p),
            [table],
            [cut(table, dim, pg, False)],
            pg,
            f"{dim} {padding}",
        )
        assert result.is_sharded() == kept
    assert F.embedding(ids, cut(table, 1, pg, True)).is_replicate()
    for dim in (0, 1):
        with pytest.raises(
            ValueError, match=r"shape \(6, 4\).* cannot be used with max_norm or scale_grad_by_freq"
        ):
            F.embedding(ids, cut(table, dim, pg, True), max_norm=1.0)
    for wrong in (6, -1):
        with pytest.raises(IndexError, match=rf"embedding: index {wrong} is not in a table of 6 rows"):
            F.embedding(torch.tensor([0, wrong]), cut(table, 0, pg, True))


def test_lookups() -> None:
    spawn(_lookups, 2)


def _losses(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    pg = ProcessGroup(tp_degree=2)
    target = torch.tensor([0, 5, -100, 3])
    for shape, labels in [((4, 6), target), ((2, 6, 2), target.view(2, 2)), ((6,), torch.tensor(4))]:
        for options in (
            {},
            {"reduction": "sum"},
            {"reduction": "none"},
            {"ignore_index": 3},
            {"label_smoothing": 0.1},
        ):
            if "ignore_index" in options:
                labels = labels.clamp(min=0)
            logits = (10 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).requires_grad_()
            dim = min(1, len(shape) - 1)
            with count_communication() as log:
                assert_same(
                    lambda x, o=options, t=labels: F.cross_entropy(x, t, **o),
                    [logits],
                    [cut(logits, dim, pg)],
                    pg,
                    f"{shape} {options}",
                )
            assert log.calls("all_gather") == 0
    with pytest.raises(IndexError, match="cross_entropy: target 6 is not one of 6 classes"):
        F.cross_entropy(cut(torch.randn(4, 6), 1, pg), torch.tensor([0, 6, 1, 1]))
    half = cut(torch.randn(4, 6).bfloat16(), 1, pg)
    assert F.cross_entropy(half, target).dtype == torch.bfloat16


def test_cross_entropy() -> None:
    spawn(_losses, 2)


def _random(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    pg = ProcessGroup(tp_degree=2)
    full = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    fills: list[Callable[[Tensor], Any]] = [
        lambda t: t.normal_(1.0, 2.0),
        lambda t: t.uniform_(-1, 1),
        lambda t: torch.nn.init.kaiming_uniform_(t, a=2.0),
        torch.nn.init.xavier_normal_,
        lambda t: torch.nn.init.constant_(t, 3.0),
        lambda t: torch.nn.init.normal_(t, std=0.1),
    ]
    for i, fill in enumerate(fills):
        for dim in (0, 1):
            serial, parallel = full.clone(), cut(full, dim, pg)
            for t in (serial, parallel):
                torch.manual_seed(9)
                with torch.no_grad():
                    fill(t)
            assert torch.equal(whole(parallel), serial), f"fill {i} along {dim}"
    for inplace in (False, True):
        torch.manual_seed(9)
        expected = F.dropout(full, 0.3)
        torch.manual_seed(9)
        result = F.dropout(cut(full, 1, pg), 0.3, inplace=inplace)
        assert isinstance(result, ColoTensor)
        assert torch.equal(whole(result), expected)
        after = torch.rand(())
        torch.manual_seed(9)
        F.dropout(full, 0.3)
        assert torch.rand(()) == after  # the generators stay in step
    assert torch.equal(whole(F.dropout(cut(full, 1, pg), 0.3, training=False)), full)


def test_random_numbers_are_those_of_the_whole_tensor() -> None:
    spawn(_random, 2)


def _communication(rank: int, world_size: int, port: int) -> None:
    """A Megatron pair of layers gathers nothing: one all-reduce forward, one backward."""
    start(rank, world_size, port)
    pg = ProcessGroup(tp_degree=2)
    x = torch.randn(3, 8).requires_grad_()
    up, down = cut(torch.randn(16, 8), 0, pg, False), cut(torch.randn(8, 16), 1, pg, True)
    with count_communication() as log:
        y = F.linear(F.gelu(F.linear(x, up.requires_grad_())), down.requires_grad_())
        forward = [t.kind for t in log.transfers]
        y.sum().backward()
    assert forward == ["all_reduce"]
    assert [t.kind for t in log.transfers] == ["all_reduce", "all_reduce"]


def test_a_megatron_pair_communicates_twice() -> None:
    spawn(_communication, 2)


def _autocast(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    pg = ProcessGroup(tp_degree=2)
    x, w, b = torch.randn(3, 8), torch.randn(12, 8), torch.randn(12)
    for dim in (0, 1):
        weight, bias = cut(w, dim, pg, True).requires_grad_(), cut(b, 0, pg).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            expected, result = F.linear(x, w, b), F.linear(x, weight, bias)
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result.data, expected, rtol=2e-2, atol=2e-2)
        result.float().sum().backward()
        for t in (weight, bias):
            assert t.grad is not None
            assert t.grad.dtype == torch.float32


def test_autocast() -> None:
    spawn(_autocast, 2)


def _refusals(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    pg, other = ProcessGroup(tp_degree=2), ProcessGroup(tp_degree=4)
    x = cut(torch.randn(4, 8), 1, pg)
    piece = torch.randn(4, 4)
    with pytest.raises(
        ValueError,
        match=r"an operand of shape \(4, 4\) does not fit a tensor of shape \(4, 8\).*count as whole",
    ):
        x + piece
    with pytest.raises(
        ValueError,
        match=r"one operand of add lies on ProcessGroup.*tp_degree=2.*another on ProcessGroup.*tp_degree=4",
    ):
        x + cut(torch.randn(4, 8), 1, other)
    with pytest.raises(
        ValueError, match=r"one operand of linear lies on .*tp_degree=2.*another on .*tp_degree=4"
    ):
        F.linear(x, cut(torch.randn(4, 8), 0, other, True))
    with pytest.raises(
        RuntimeError, match=r"__setitem__ writes into a tensor of shape \(4, 8\).*to_replicate_\(\) first"
    ):
        x[0] = 1.0
    with pytest.raises(RuntimeError, match="index_fill_ writes into a tensor"):
        x.index_fill_(0, torch.tensor([0]), 1.0)
    with pytest.raises(RuntimeError, match="cumsum writes into a tensor"):
        torch.cumsum(x, 1, out=x)


def test_refusals() -> None:
    spawn(_refusals, 4)


def _own_implementation(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    pg = ProcessGroup(tp_degree=2)
    x = cut(torch.randn(4, 8), 1, pg)
    with pytest.raises(RuntimeError, match="diff needs the whole"):
        torch.diff(x, dim=0)

    @colo_op_impl(torch.diff)
    def down(input: ColoTensor, dim: int) -> ColoTensor:
        return ColoTensor(torch.diff(input.data, dim=dim), input.spec())

    result = torch.diff(x, dim=0)
    assert isinstance(result, ColoTensor)
    assert torch.equal(whole(result), torch.diff(whole(x), dim=0))
    assert IMPLEMENTATIONS.pop(torch.diff) is down


def test_users_can_add_implementations() -> None:
    spawn(_own_implementation, 2)


def _forget(rank: int, world_size: int, port: int, what: str) -> None:
    """Break the package as a careless change would."""
    from colossalai.tensor.ops import dispatch

    if what == "spread":  # I where R is needed: the classic bug
        dispatch._used_differently = lambda layout: layout
    elif what == "sum":
        dispatch.reduce = lambda x, *_: x  # type: ignore[attr-defined]
    elif what == "cut":
        placed = dispatch.placed

        def first_piece(call: Any, number: int, dim: int | None) -> Tensor:
            x = call.tensors[number]
            if dim is None or isinstance(x, ColoTensor):
                return placed(call, number, dim)
            return x.narrow(dim, 0, x.size(dim) // 2)

        dispatch.placed = first_piece
    _run_cases(rank, world_size, port)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("spread", "linear of cut rows: gradient 2"),
        ("sum", "weight on the left, summed over"),
        ("cut", "add bias|linear|addmm"),
    ],
)
def test_the_cases_catch_a_broken_package(what: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        spawn(_forget, 2, what=what)
