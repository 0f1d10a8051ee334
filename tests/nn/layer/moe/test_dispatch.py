"""What travels between ranks with experts, and tokens that find no expert, no rank or no place."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.core import global_context as gpc
from colossalai.mesh import count_communication
from colossalai.nn.layer.moe import (
    Experts,
    FFNExperts,
    MoeExperts,
    MoeLayer,
    MoeModule,
    MoeRouter,
    Top1Router,
    Top2Router,
    build_ffn_experts,
)
from colossalai.nn.layer.moe.dispatch import plan_dispatch, run_experts
from colossalai.nn.layer.moe.products import RowsPerExpert, by_row, grouped_product
from colossalai.testing import spawn
from tests.nn.layer.moe.cases import FFN, INNER, SAMPLES, WIDTH, Case, batch, launched

# ---- Bytes ----


def _bytes(parallel: dict[str, Any], case: Case, **place: Any) -> None:
    samples = launched(parallel)
    layer = case.build()
    x = batch(7)[0][samples].requires_grad_()
    routings: list[Any] = []
    layer.router.register_forward_hook(lambda module, args, routing: routings.append(routing))
    with count_communication() as log:
        layer(x).square().sum().backward()
    chosen, kept = routings[0].chosen, routings[0].kept
    local = case.number // gpc.mesh.group_size(*layer.experts.axes)
    here = gpc.mesh.ranks(*layer.experts.axes).index(gpc.mesh.rank)
    elsewhere = int(((chosen // local != here) & kept).sum())
    comes = _from_others(chosen, kept, local, layer)
    # to the experts, and the gradients of what came back; what came for these experts goes the other two ways
    assert log.sent("all_to_all") == 2 * (elsewhere + comes) * WIDTH * 8
    assert elsewhere + comes > 0


def _from_others(chosen: Tensor, kept: Tensor, local: int, layer: MoeLayer) -> int:
    """How many rows the other ranks send to the experts of this one."""
    axes, mesh = layer.experts.axes, gpc.mesh
    group, size = mesh.group(*axes), mesh.group_size(*axes)
    counts = torch.stack([((chosen // local == rank) & kept).sum() for rank in range(size)])
    every = [torch.empty_like(counts) for _ in range(size)]
    torch.distributed.all_gather(every, counts, group=group)
    here = mesh.ranks(*axes).index(mesh.rank)
    return sum(int(theirs[here]) for rank, theirs in enumerate(every) if rank != here)


@pytest.mark.parametrize(
    ("parallel", "ranks", "case"),
    [
        ({"moe": 2}, 2, Case()),
        ({"moe": 4}, 4, Case(k=1, number=8, capacity=0.7)),
        ({"moe": 2, "tensor": {"size": 2, "mode": "1d"}}, 4, Case("gated")),
    ],
    ids=["ep2", "ep4", "ep2-tp2"],
)
def test_only_tokens_for_experts_elsewhere_travel(parallel: dict[str, Any], ranks: int, case: Case) -> None:
    spawn(partial(_bytes, parallel, case), ranks)


# ---- Tokens without an expert, experts without tokens ----


class Fixed(MoeRouter):
    """A router that sends all tokens to one expert."""

    def __init__(self, expert: int, **options: Any) -> None:
        super().__init__(1, **options)
        self.expert = expert

    def forward(self, logits: Tensor, *args: Any) -> Any:
        wanted = torch.full_like(logits, -1e4)
        wanted[:, self.expert] = 0
        return super().forward(logits * 0 + wanted, *args)


def _one_expert(expert: int, **place: Any) -> None:
    samples = launched({"moe": 2})
    torch.manual_seed(0)
    router = Fixed(expert, drop_tks=False)
    layer = MoeLayer(WIDTH, 4, router, Experts(expert=FFN, num_experts=4, width=WIDTH, inner=INNER)).double()
    x = batch(7)[0][samples].requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    assert x.grad is not None
    assert y.abs().sum() > 0
    held = gpc.mesh.rank == expert // 2
    for name, p in layer.experts.named_parameters():
        assert p.grad is not None, name  # also where no token came: zeros, as the serial model has them
        assert bool(p.grad[expert % 2].any()) is held, name
        assert not p.grad[1 - expert % 2].any(), name


@pytest.mark.parametrize("expert", [0, 3])
def test_all_tokens_go_to_one_expert(expert: int) -> None:
    spawn(partial(_one_expert, expert), 2)


def _autocast(**place: Any) -> None:
    """Each rank sends in the dtype of the products, also one without any row."""
    samples = launched({"moe": 2})
    layer = MoeLayer(
        WIDTH, 2, Fixed(0, drop_tks=False), Experts(FFN, num_experts=2, width=WIDTH, inner=INNER)
    )
    x = batch(7)[0][samples].float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    y.sum().backward()
    assert y.dtype is torch.float32
    assert y.abs().sum() > 0
    assert all(p.grad is not None for p in layer.parameters())
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


def test_a_rank_without_rows_under_autocast() -> None:
    spawn(_autocast, 2)


def test_a_token_without_a_place_gives_zero() -> None:
    torch.manual_seed(0)
    layer = MoeLayer(
        WIDTH, 4, Fixed(1, capacity_factor_train=0.5, min_capacity=0), FFNExperts(4, WIDTH, INNER)
    )
    x = torch.randn(2, 8, WIDTH, requires_grad=True)
    y = layer(x).flatten(0, 1)
    assert y[:2].abs().sum(-1).gt(0).all()  # 0.5 * 16 / 4 places
    assert not y[2:].any()
    assert layer.loads is not None
    assert layer.loads.tokens.tolist() == [0, 16, 0, 0]
    assert int(layer.loads.dropped) == 14
    assert float(layer.loads.entropy) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int) -> None:
    layer = MoeLayer(WIDTH, 4, Top2Router(), FFNExperts(4, WIDTH, INNER))
    x = torch.randn(tokens, WIDTH, requires_grad=True)
    y = layer(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_products_are_those_of_each_expert() -> None:
    x, w, v = torch.randn(6, 3), torch.randn(4, 3, 5), torch.randn(4, 5)
    rows = RowsPerExpert(torch.tensor([2, 0, 1, 3]))
    expert = [0, 0, 2, 3, 3, 3]
    expected = torch.stack([x[i] @ w[e] for i, e in enumerate(expert)])
    torch.testing.assert_close(grouped_product(x, w, rows), expected)
    assert torch.equal(by_row(v, rows), v[expert])


def test_rows_and_their_gradients() -> None:
    """Against a loop over tokens, in float64, also of the gradient's gradient."""
    torch.manual_seed(0)
    x, weights = torch.randn(5, 3).double().requires_grad_(), torch.rand(5, 2).double().requires_grad_()
    chosen = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [1, 2]])
    kept = torch.rand(5, 2) > 0.3
    scale = torch.tensor([1.0, 2.0, 3.0]).double()

    def experts(rows: Tensor, numbers: RowsPerExpert, some: slice) -> Tensor:
        return rows * by_row(scale[:, None], numbers)

    def run(x: Tensor, weights: Tensor) -> Tensor:
        plan = plan_dispatch(chosen, kept, 3, None, ())
        return run_experts(x, weights * kept, plan, experts, None, ())

    expected = sum(x * (weights * kept * scale[chosen])[:, j, None] for j in range(2))
    torch.testing.assert_close(run(x, weights), expected)
    assert torch.autograd.gradcheck(run, (x, weights))


def _seeds(**place: Any) -> None:
    samples = launched({"moe": 2})
    case = Case(k=1, options=(("select_policy", "random"),))
    layer, x = case.build(), batch(7)[0][samples]
    routings: list[Any] = []
    layer.router.register_forward_hook(lambda module, args, routing: routings.append(routing))
    for seed in range(6):
        torch.manual_seed(2 * seed + gpc.mesh.rank)
        layer(x)
        routing = routings.pop()
        kept = torch.zeros(4, dtype=torch.int64)
        kept.scatter_add_(0, routing.chosen.flatten(), routing.kept.long().flatten())
        torch.distributed.all_reduce(kept)
        assert torch.equal(kept, routing.loads.tokens.clamp(max=7 * SAMPLES // 4))
        assert int(routing.loads.dropped) > 0


def test_ranks_of_other_seeds_agree_on_random_places() -> None:
    spawn(_seeds, 2)


# ---- Bad input ----


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Top1Router(0.0), "capacity_factor_train must be more than 0, got 0.0"),
        (lambda: Top2Router(1.0, -1.0), "capacity_factor_eval must be more than 0"),
        (lambda: MoeRouter(0), "k_value is the number of experts of a token, at least 1"),
        (lambda: Top1Router(select_policy="last"), "select_policy is 'first' or 'random', got 'last'"),
        (
            lambda: MoeLayer(WIDTH, 1, Top2Router(), FFNExperts(1, WIDTH, INNER)),
            "Top2Router chooses 2 experts for each token, but there are 1",
        ),
        (
            lambda: MoeLayer(WIDTH, 4, Top1Router(), FFNExperts(2, WIDTH, INNER)),
            "num_experts=4, but its experts are 2",
        ),
        (
            lambda: MoeLayer(WIDTH, 4, Top1Router(), FFNExperts(4, 2 * WIDTH, INNER)),
            f"dim_model={WIDTH}, but its FFNExperts were built for d_model={2 * WIDTH}",
        ),
        (lambda: MoeExperts("broadcast", 4), "comm_name is one of all_to_all, all_gather, got 'broadcast'"),
        (lambda: FFNExperts(0, WIDTH, INNER), "num_experts is a positive integer, got 0"),
        (lambda: Experts(nn.BatchNorm1d, 2, num_features=4), "BatchNorm1d has buffers"),
        (lambda: MoeModule(WIDTH, 4, noisy_policy="loud", expert_cls=FFN), "noisy_policy is one of"),
        (lambda: MoeModule(WIDTH, 4), "needs its experts"),
        (
            lambda: Experts(iter([nn.Linear(WIDTH, WIDTH), nn.Identity()]).__next__, 2),
            r"differ in their weights alone, but the first is\nLinear.*\nand number 1 is\nIdentity",
        ),
        (
            lambda: MoeRouter(1, noisy_func=lambda logits: logits[:, :1])(torch.zeros(5, 3)),
            r"noisy_func must keep the shape of the logits, \(5, 3\) .* it gave \(5, 1\)",
        ),
    ],
)
def test_bad_input(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


class Pair(nn.Linear):
    """An expert that gives two results."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


@pytest.mark.parametrize(
    ("kind", "width", "what"), [(nn.Linear, 5, r"shape \(.*, 5\)"), (Pair, WIDTH, "a tuple")]
)
@pytest.mark.parametrize("tokens", [0, 4])
def test_experts_that_do_not_map_rows_to_rows_are_refused(
    kind: type[nn.Module], width: int, what: str, tokens: int
) -> None:
    experts = Experts(kind, 2, in_features=WIDTH, out_features=width)
    layer = MoeLayer(WIDTH, 2, Top1Router(), experts)
    with pytest.raises(ValueError, match=f"{kind.__name__}, must map rows to rows: .* it gave {what}"):
        layer(torch.randn(tokens, WIDTH))


@pytest.mark.parametrize("shape", [(2, 3, WIDTH + 1), (WIDTH,)])
def test_inputs_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    layer = MoeLayer(WIDTH, 4, Top1Router(), FFNExperts(4, WIDTH, INNER))
    with pytest.raises(ValueError, match=r"needs an input \(batch, tokens, 8\)"):
        layer(torch.zeros(shape))


def _nan(**place: Any) -> None:
    samples = launched({"moe": 2})
    layer = MoeLayer(WIDTH, 4, Top2Router(), FFNExperts(4, WIDTH, INNER)).double()
    x = batch(7)[0][samples]
    if gpc.mesh.rank == 1:
        x[0, :3] = torch.nan
    with pytest.raises(
        FloatingPointError, match="Top2Router: the scores of 3 tokens of this micro-batch are nan"
    ):
        layer(x)


def test_nan_scores_are_refused_on_every_rank() -> None:
    spawn(_nan, 2)


def _do_not_divide(**place: Any) -> None:
    colossalai.launch_from_torch({"parallel": {"moe": 4}}, verbose=False)
    with pytest.raises(ValueError, match="6 experts and 4 ranks that share them"):
        FFNExperts(6, WIDTH, INNER)
    with pytest.raises(ValueError, match="share neither num_experts=6 nor d_ff=18 evenly"):
        build_ffn_experts(6, WIDTH, 18)
    assert build_ffn_experts(6, WIDTH, 16).comm_name == "all_gather"
    assert build_ffn_experts(8, WIDTH, 18).comm_name == "all_to_all"


def test_experts_that_do_not_divide_are_refused_on_every_rank() -> None:
    spawn(_do_not_divide, 4)
