"""A training step on a GPU: GPT-2 XL in bf16, a wide GPT in fp8, and unedited models of transformers.

Each side runs in a process of its own, so that its memory is its own, and all sides of a comparison train the
same weights on the same tokens: beside times and memory, the losses of every step are compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.table import Row
from colossalai.booster import Booster
from colossalai.booster.mixed_precision import BF16MixedPrecision, FP8MixedPrecision, MixedPrecision
from colossalai.nn import chunk_causal_loss, skip_causal_mask
from colossalai.nn.optimizer import HybridAdam
from colossalai.utils import checkpoint_blocks
from titans.loss.lm_loss import GPTLMLoss
from titans.model.gpt import GPT

XL = {"hidden_size": 1600, "depth": 48, "num_heads": 25}
WIDE = {"hidden_size": 4096, "depth": 8, "num_heads": 32}
BATCH, LENGTH, STEPS, TIMED = 8, 1024, 24, 10
ADAM: dict[str, Any] = {"lr": 2e-5, "weight_decay": 0.01}
Step = Callable[[Tensor], Tensor]
FULL = {
    "gpt2-xl": [f"transformer.h.{i}" for i in range(5)],
    "llama": [f"model.layers.{i}" for i in range(3)],
}
"""The blocks of each model that are recomputed whole; the others keep their products."""


@dataclass(frozen=True)
class Result:
    milliseconds: float
    gib: float
    losses: list[float]


def build(sizes: dict[str, int], **changes: Any) -> GPT:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return GPT(**sizes, dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0, **changes)


def hugging_face(name: str, layers: int | None = None) -> nn.Module:
    """GPT-2 XL, with so many or all layers, or a LLaMA of 1.2 B parameters, as transformers builds them."""
    import transformers as hf

    torch.manual_seed(0)
    with torch.device("cuda"):
        if name == "gpt2-xl":
            sizes = {
                "n_embd": 1600,
                "n_layer": layers or 48,
                "n_head": 25,
                "vocab_size": 50304,
                "n_positions": LENGTH,
            }
            return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
        return hf.LlamaForCausalLM(
            hf.LlamaConfig(
                hidden_size=2048,
                intermediate_size=8192,
                num_hidden_layers=16,
                num_attention_heads=32,
                num_key_value_heads=8,
                vocab_size=50304,
                max_position_embeddings=LENGTH,
                tie_word_embeddings=True,
            )
        )


def own_loss(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The loss that a model of transformers computes itself."""
    return lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss


def zoo_loss(model: nn.Module) -> Callable[[Tensor], Tensor]:
    criterion = GPTLMLoss()
    return lambda ids: criterion(model(ids), ids)


def plain(model: nn.Module, loss: Callable[[nn.Module], Callable[[Tensor], Tensor]] = zoo_loss) -> Step:
    """PyTorch as its documents say: autocast, torch.compile, fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)
    whole = loss(model)

    @torch.compile
    def loss_of(ids: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return whole(ids)

    def step(ids: Tensor) -> Tensor:
        loss = loss_of(ids)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def boosted(
    model: nn.Module,
    precision: MixedPrecision,
    loss: Callable[[nn.Module], Callable[[Tensor], Tensor]] = zoo_loss,
    *,
    compiled: bool = True,
) -> Step:
    booster = Booster(mixed_precision=precision)
    model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), **ADAM))
    loss_of = torch.compile(loss(model)) if compiled else loss(model)

    def step(ids: Tensor) -> Tensor:
        value = loss_of(ids)
        booster.backward(value, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def unedited(name: str) -> Step:
    """A model of transformers with a few calls of ours."""
    model = checkpoint_blocks(hugging_face(name), "selective")
    # the first blocks are recomputed last, when the memory of the others is free
    checkpoint_blocks(model, "full", blocks=FULL[name])
    model = skip_causal_mask(chunk_causal_loss(model, whole_scores=False))
    return boosted(model, BF16MixedPrecision(half_weights=True), own_loss)


def zoo(
    sizes: dict[str, int], precision: type[MixedPrecision] = BF16MixedPrecision, *, compiled: bool = True
) -> Step:
    half = precision(half_weights=True)  # type: ignore[call-arg]
    return boosted(build(sizes, checkpoint="selective"), half, compiled=compiled)


SIDES: dict[str, Callable[[], Step]] = {
    "plain": lambda: plain(build(XL)),
    "bf16": lambda: zoo(XL),
    "wide bf16": lambda: zoo(WIDE),
    "wide fp8": lambda: zoo(WIDE, FP8MixedPrecision),
    "plain gpt2-xl": lambda: plain(hugging_face("gpt2-xl"), own_loss),
    "gpt2-xl": lambda: unedited("gpt2-xl"),
    "plain llama": lambda: plain(hugging_face("llama"), own_loss),
    "llama": lambda: unedited("llama"),
}


def measure(step: Step) -> Result:
    generator = torch.Generator().manual_seed(0)
    # new tokens in every step: what is learnt by heart in a few steps, without a warm-up, makes every
    # training unstable
    batches = [torch.randint(50304, (BATCH, LENGTH), generator=generator).cuda() for _ in range(STEPS)]
    losses = []
    for i in range(STEPS):
        if i == STEPS - TIMED:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            start = time.perf_counter()
        losses.append(step(batches[i]))
    torch.cuda.synchronize()
    elapsed = (time.perf_counter() - start) * 1000 / TIMED
    return Result(elapsed, torch.cuda.max_memory_allocated() / 2**30, torch.stack(losses).tolist())


def run(side: str) -> Result:
    """``side`` in a process of its own."""
    root = Path(__file__).resolve().parent.parent
    print(f"training: {side} ...", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.training", side], cwd=root, stdout=subprocess.PIPE, check=True
    )
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def rows() -> list[Row]:
    if not torch.cuda.is_available():
        print("training: left out, it needs a GPU", file=sys.stderr)
        return []
    found = []
    for what, ours, peer, peer_name in (
        ("GPT-2 XL, 8 x 1024, bf16", "bf16", "plain", "PyTorch: autocast, compile, fused AdamW"),
        ("GPT, 4096 wide, 8 layers, fp8", "wide fp8", "wide bf16", "our bf16"),
        ("GPT-2 XL of transformers", "gpt2-xl", "plain gpt2-xl", "PyTorch: autocast, compile, fused AdamW"),
        ("LLaMA 1.2 B of transformers", "llama", "plain llama", "PyTorch: autocast, compile, fused AdamW"),
    ):
        a, b = run(ours), run(peer)
        gap = max(abs(x - y) for x, y in zip(a.losses, b.losses, strict=True))
        print(f"{what}: losses {[round(x, 3) for x in a.losses]}", file=sys.stderr)
        print(f"{peer_name}: losses {[round(x, 3) for x in b.losses]}", file=sys.stderr)
        found += [
            Row(f"{what}: step", a.milliseconds, b.milliseconds, peer_name),
            Row(f"{what}: memory", a.gib, b.gib, peer_name, "GiB"),
            Row(f"{what}: last loss, largest gap {gap:.3f}", a.losses[-1], b.losses[-1], peer_name, ""),
        ]
    return found


if __name__ == "__main__":
    print(json.dumps(asdict(measure(SIDES[sys.argv[1]]()))))
