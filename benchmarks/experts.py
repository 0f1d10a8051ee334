"""A layer with experts beside its bare products, one-hot einsums and transformers' block:
``python -m benchmarks.experts`` on a machine with a GPU (``--small`` runs a toy anywhere).

8 x 2048 tokens, top-2, width 2048, inner 4096, gated, bfloat16, both passes, dropless.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.table import Row, show
from colossalai.nn.layer.moe import FFNExperts, MoeLayer, MoeRouter
from colossalai.nn.layer.moe.products import RowsPerExpert, grouped_product
from colossalai.nn.loss import MoeLoss
from titans.loss.lm_loss import GPTLMLoss
from titans.model.gpt import GPT
from titans.model.moe import MOEGPT


@dataclass(frozen=True)
class Sizes:
    tokens: int = 8 * 2048
    width: int = 2048
    inner: int = 4096
    k: int = 2


STEPS = 5
SMALL = Sizes(tokens=64, width=16, inner=32)


def milliseconds(work: Callable[[], None], device: torch.device, repeat: int = 20) -> float:
    """Median time of one call, with the device waited for."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeat):
        _wait(device)
        start = perf_counter()
        work()
        _wait(device)
        times.append((perf_counter() - start) * 1000)
    return median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def both_passes(
    module: Callable[[Tensor], Tensor], x: Tensor, parameters: list[Tensor]
) -> Callable[[], None]:
    grad = torch.randn_like(x)

    def work() -> None:
        y = module(x)
        torch.autograd.grad(y, [x, *parameters], grad)

    return work


def ours(sizes: Sizes, experts: int) -> MoeLayer:
    router = MoeRouter(sizes.k, drop_tks=False, normalize=True)
    weights = FFNExperts(experts, sizes.width, sizes.inner, F.silu, gated=True, bias=False)
    return MoeLayer(sizes.width, experts, router, weights)


def bare_products(layer: MoeLayer, rows: Tensor, counts: Tensor) -> Callable[[], None]:
    """The products of the layer's experts alone, both passes, for rows that are sorted already."""
    experts = layer.experts
    assert isinstance(experts, FFNExperts)
    per_expert = RowsPerExpert(counts)
    wide = torch.randn(len(rows), experts.d_ff, dtype=rows.dtype, device=rows.device, requires_grad=True)
    grads = [
        torch.randn(len(rows), n, dtype=rows.dtype, device=rows.device)
        for n in (2 * experts.d_ff, rows.size(1))
    ]

    def work() -> None:
        first = grouped_product(rows, experts.w1, per_expert)
        second = grouped_product(wide, experts.w2, per_expert)
        torch.autograd.grad([first, second], [rows, experts.w1, wide, experts.w2], grads)

    return work


class OneHot(nn.Module):
    """The same layer by one-hot einsums over places of experts, with room for twice the mean load."""

    def __init__(self, layer: MoeLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, tokens: Tensor) -> Tensor:
        layer, x = self.layer, tokens.flatten(0, -2)
        experts, k = layer.num_experts, layer.router.k_value
        scores = F.linear(x.float(), layer.gate_weight.float()).softmax(-1)
        top, chosen = scores.topk(k, -1)
        mask = F.one_hot(chosen, experts)  # (tokens, k, experts)
        place = (mask.transpose(0, 1).flatten(0, 1).cumsum(0) - 1).view(k, -1, experts).transpose(0, 1) * mask
        room = 2 * k * len(x) // experts
        place = place.sum(-1)
        where = F.one_hot(place.clamp(max=room - 1), room) * (place < room)[..., None]
        combine = torch.einsum(
            "tk,tke,tkc->tec", top / top.sum(-1, keepdim=True), mask.to(top), where.to(top)
        )
        inputs = torch.einsum("tec,td->ecd", (combine > 0).to(x.dtype), x)
        weights = layer.experts
        assert isinstance(weights, FFNExperts)
        gate, up = torch.bmm(inputs, weights.w1).chunk(2, -1)
        outputs = torch.bmm(F.silu(gate) * up, weights.w2)
        return torch.einsum("tec,ecd->td", combine.to(x.dtype), outputs).view_as(tokens)


def mixtral(sizes: Sizes, experts: int, how: str) -> nn.Module | None:
    try:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    except ImportError:
        return None
    config = MixtralConfig(
        hidden_size=sizes.width,
        intermediate_size=sizes.inner,
        num_local_experts=experts,
        num_experts_per_tok=sizes.k,
        experts_implementation=how,
    )
    block: nn.Module = MixtralSparseMoeBlock(config)
    for p in block.parameters():
        nn.init.normal_(p, std=0.02)
    return block


def rows(sizes: Sizes, numbers: tuple[int, ...], device: torch.device, one_hot: bool = True) -> list[Row]:
    dtype = torch.bfloat16
    found = []
    for experts in numbers:
        with device:
            layer = ours(sizes, experts).to(dtype)
        x = torch.randn(1, sizes.tokens, sizes.width, device=device, dtype=dtype, requires_grad=True)
        parameters = list(layer.parameters())
        time = milliseconds(both_passes(layer, x, parameters), device)
        assert layer.loads is not None
        flat = torch.randn(
            sizes.tokens * sizes.k, sizes.width, device=device, dtype=dtype, requires_grad=True
        )
        bare = milliseconds(bare_products(layer, flat, layer.loads.tokens), device)
        found.append(Row(f"layer, {experts} experts", time, bare, "its bare products (at most 1.3)"))
        if one_hot:
            peer = milliseconds(both_passes(OneHot(layer), x, parameters), device, repeat=5)
            found.append(Row(f"layer, {experts} experts", time, peer, "one-hot einsums (at most 0.33)"))
        for how in ("grouped_mm", "eager"):
            with device:
                block = mixtral(sizes, experts, how)
            if block is not None:
                block = block.to(dtype)
                peer = milliseconds(both_passes(block, x, list(block.parameters())), device, repeat=5)
                bar = " (at most 0.8)" if how == "grouped_mm" else ""
                name = f"MixtralSparseMoeBlock, {how}{bar}"
                found.append(Row(f"layer, {experts} experts", time, peer, name))
    return found


def gpt_rows(device: torch.device, hidden_size: int, length: int, depth: int) -> list[Row]:
    """A step of a GPT with 8 experts in every block beside the GPT without, by the number of weights that a
    token uses.
    """
    sizes = {"hidden_size": hidden_size, "num_heads": max(hidden_size // 64, 1), "depth": depth}
    sizes |= {"vocab_size": 1024, "dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0}
    sizes |= {"max_position_embeddings": length}
    ids = torch.randint(1024, (8, length), device=device)
    times = []
    for k in (0, 2):
        with device:
            model: GPT = MOEGPT(num_experts=[8] * depth, top_k=k, **sizes) if k else GPT(**sizes)
        model = model.to(torch.bfloat16)
        criterion = MoeLoss(0.01, GPTLMLoss) if k else GPTLMLoss()
        experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
        active = sum(p.numel() for p in model.parameters()) - experts + experts * k // 8

        def steps(model: GPT = model, criterion: nn.Module = criterion) -> None:
            for _ in range(STEPS):  # a training does not wait for the device after each
                criterion(model(ids), ids).backward()
                model.zero_grad(set_to_none=True)

        times.append(milliseconds(steps, device, repeat=5) / STEPS / active * 1e6)
    what = f"GPT {hidden_size} wide, 8 x {length}, 8 experts, top-2, per 10^6 active"
    return [Row(what, times[1], times[0], "without experts (at most 1.33)")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a toy, on any device")
    parser.add_argument("--only", choices=["layer", "gpt"], help="one of the two parts")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.small:
        parser.error("the sizes of this benchmark need a GPU; --small runs a toy")
    found: list[Row] = []
    if args.only != "gpt":
        found += rows(SMALL if args.small else Sizes(), (8,) if args.small else (8, 64), device)
    if args.only != "layer":
        # the narrow one is bound by the host, which launches its kernels
        for width, length, depth in [(64, 32, 2)] if args.small else [(1024, 1024, 12), (2048, 2048, 12)]:
            found += gpt_rows(device, width, length, depth)
    print(show(found))


if __name__ == "__main__":
    main()
