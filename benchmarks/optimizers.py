"""One step of an optimizer over the parameters of a GPT: GPT-2 XL on a GPU, a small one on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.table import Row, milliseconds
from colossalai.nn.optimizer import HybridAdam, Lamb, Lars

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, WIDTH, VOCABULARY, POSITIONS = (48, 1600, 50257, 1024) if DEVICE == "cuda" else (6, 256, 8192, 256)


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    """Weights and gradients in the shapes of a GPT, in the order of its layers."""
    w = WIDTH
    block = [
        (w,),
        (w,),
        (3 * w, w),
        (3 * w,),
        (w, w),
        (w,),
        (w,),
        (w,),
        (4 * w, w),
        (4 * w,),
        (w, 4 * w),
        (w,),
    ]
    shapes = [(VOCABULARY, w), (POSITIONS, w), *(block * LAYERS), (w,), (w,)]
    made = [nn.Parameter(torch.full(shape, 0.02, device=DEVICE, dtype=dtype)) for shape in shapes]
    for p in made:
        p.grad = torch.full_like(p, 1e-3)
    return made


def time_of(step: Callable[[], object]) -> float:
    def work() -> None:
        step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    return milliseconds(work, repeat=9)


@torch.no_grad()
def cast_and_step(weights: list[nn.Parameter]) -> Callable[[], object]:
    """Half-precision weights the usual way: float32 copies, torch's fused AdamW, and casts of whole
    tensors.
    """
    masters = [nn.Parameter(p.detach().float()) for p in weights]
    optimizer = torch.optim.AdamW(masters, fused=True)

    def step() -> None:
        for master, p in zip(masters, weights, strict=True):
            master.grad = p.grad.float()  # type: ignore[union-attr]
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, weights, strict=True):
                p.copy_(master)
        optimizer.zero_grad()

    return step


def lamb_loop(weights: list[nn.Parameter]) -> Callable[[], object]:
    """LAMB one tensor after the other, as it is usually written."""
    lr, beta1, beta2, eps, decay = 1e-3, 0.9, 0.999, 1e-6, 0.01
    state: list[tuple[Tensor, Tensor]] = [(torch.zeros_like(p), torch.zeros_like(p)) for p in weights]

    @torch.no_grad()
    def step() -> None:
        for p, (m, v) in zip(weights, state, strict=True):
            assert p.grad is not None
            m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
            v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
            update = m / v.sqrt().add_(eps)
            update.add_(p, alpha=decay)
            w_norm, u_norm = p.norm(), update.norm()
            ratio = torch.where((w_norm > 0) & (u_norm > 0), w_norm / u_norm, 1.0)
            p.sub_(update.mul_(ratio * lr))

    return step


def lars_loop(weights: list[nn.Parameter]) -> Callable[[], object]:
    """LARS one tensor after the other."""
    lr, momentum, eeta, decay = 1e-3, 0.9, 1e-3, 0.01
    buffers = [torch.zeros_like(p) for p in weights]

    @torch.no_grad()
    def step() -> None:
        for p, b in zip(weights, buffers, strict=True):
            assert p.grad is not None
            w_norm, g_norm = p.norm(), p.grad.norm()
            ratio = torch.where((w_norm > 0) & (g_norm > 0), eeta * w_norm / (g_norm + decay * w_norm), 1.0)
            b.mul_(momentum).add_(p.grad.add(p, alpha=decay).mul_(ratio * lr))
            p.sub_(b)

    return step


def rows() -> list[Row]:
    weights, halves = parameters(torch.float32), parameters(torch.bfloat16)
    millions = sum(p.numel() for p in weights) / 1e6
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
    ours = time_of(HybridAdam(weights, **options).step)
    found = [
        Row(f"AdamW, {millions:.0f}M float32 on {DEVICE}", ours, time_of(peer), name)
        for name, peer in {
            "torch.optim.AdamW(fused=True)": torch.optim.AdamW(weights, fused=True, **options).step,
            "torch.optim.AdamW(foreach=True)": torch.optim.AdamW(weights, foreach=True, **options).step,
        }.items()
    ]
    for what, mine, peer, name in (
        (
            "AdamW, bfloat16 weights, float32 masters",
            HybridAdam(halves, **options),
            cast_and_step(halves),
            "fused AdamW and casts",
        ),
        ("LAMB, float32", Lamb(weights, **options), lamb_loop(weights), "a loop over tensors"),
        ("LARS, float32", Lars(weights, momentum=0.9, **options), lars_loop(weights), "a loop over tensors"),
    ):
        found.append(Row(what, time_of(mine.step), time_of(peer), name))
    return found
