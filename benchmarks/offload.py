"""One training step of a GPT that is larger than the GPU memory it may use: Gemini beside FSDP2 with CPU
offload and beside everything on the GPU.

    python -m benchmarks.offload                      # GPT 4.24 B, batch 8 x 1024, bf16, on a GPU
    python -m benchmarks.offload --small              # the same code with a toy, also on a CPU
    python -m benchmarks.offload --sides gemini-cpu   # some of the sides
    python -m benchmarks.offload --capacity-search    # the largest GPT that trains, see benchmarks.capacity

Each side runs in a process of its own, so that its memory is its own.  Seconds are the mean over ``--steps``
steps that follow three others, from the first forward pass to the end of the last update.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

BIG: dict[str, Any] = {"hidden_size": 3072, "depth": 36, "num_heads": 24, "vocab_size": 50304}
TOY: dict[str, Any] = {"hidden_size": 64, "depth": 3, "num_heads": 2, "vocab_size": 512}
ADAM: dict[str, Any] = {"lr": 1e-5, "weight_decay": 0.01}
WARM = 3
Step = Callable[[Tensor], Tensor]
Finish = Callable[[], None]
Side = tuple[Step, Finish, int, Callable[[], str]]  # and the number of parameters, and notes


@dataclass(frozen=True)
class Result:
    side: str
    parameters: int
    seconds: float
    middle: float
    start: float
    first: float
    gpu_gib: float
    host_gib: float
    losses: list[float]
    notes: str = ""


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build(args: argparse.Namespace, where: str) -> nn.Module:
    from titans.model.gpt import GPT

    sizes = (
        TOY
        if args.small
        else {**BIG, "depth": args.depth, "hidden_size": args.width, "num_heads": args.heads}
    )
    quiet = {"dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0}
    with torch.device(where):
        return GPT(**sizes, **quiet, max_position_embeddings=args.length, checkpoint=True)


def step_of(
    model: nn.Module,
    optimizer: Optimizer,
    backward: Callable[[Tensor], None] = Tensor.backward,
    autocast: bool = False,
) -> Step:
    """One step of training: the same for every side."""
    from titans.loss.lm_loss import GPTLMLoss

    criterion = GPTLMLoss()

    def step(ids: Tensor) -> Tensor:
        with torch.autocast(device().type, torch.bfloat16, enabled=autocast):
            loss = criterion(model(ids), ids)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def gemini(policy: str, args: argparse.Namespace, disk: bool = False) -> Side:
    from colossalai.zero.gemini import GeminiAdamOptimizer, GeminiDDP

    model = build(args, "meta")
    chunk = 0.05 if args.small else args.chunk_mb
    wrapped = GeminiDDP(
        model,
        device(),
        policy,
        dtype=torch.bfloat16,
        min_chunk_size_mb=chunk,
        search_range_mb=chunk / 2,
        hidden_dim=64 if args.small else args.width,
        prefetch=args.prefetch,
        host_buffers=args.host_buffers,
        compute_capacity=int(args.capacity_gib * 2**30) if args.capacity_gib else None,
        host_capacity=int(args.host_gib * 2**30) if disk else None,
        disk_dir=args.disk_dir if disk else None,
        disk_capacity=int(args.disk_gib * 2**30) if disk else None,
        verbose=True,
    )
    early = args.clip == 0 or not disk
    optimizer = GeminiAdamOptimizer(
        wrapped, update_in_backward=early, clipping_norm=args.clip, undo_ratio=args.undo_ratio, **ADAM
    )

    def notes() -> str:
        tiers = wrapped.chunk_manager
        on = sum(c.home is tiers.compute for c in tiers.chunks)
        table = wrapped.gemini_manager.timeline.table()
        return f"{on} of {len(tiers.chunks)} chunks rest on the compute device\n{table}"

    step = step_of(wrapped, optimizer, optimizer.backward)
    return step, wrapped.settle, sum(p.numel() for p in model.parameters()), notes


def gemini_defaults(args: argparse.Namespace) -> Side:
    """Gemini as a script gets it that sets nothing but the policy and the precision."""
    from colossalai.booster import Booster
    from colossalai.booster.plugin import GeminiPlugin
    from colossalai.launchers import launch
    from colossalai.nn.optimizer import HybridAdam
    from colossalai.testing import free_port

    launch({}, rank=0, world_size=1, host="127.0.0.1", port=free_port(), verbose=False)
    model = build(args, "meta")
    booster = Booster(plugin=GeminiPlugin(placement_policy="cpu", precision="bf16"))
    boosted, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), **ADAM))

    def backward(loss: Tensor) -> None:
        booster.backward(loss, optimizer)

    parameters = sum(p.numel() for p in model.parameters())
    return step_of(boosted, optimizer, backward), boosted.settle, parameters, lambda: ""  # type: ignore[operator]


def everything(args: argparse.Namespace) -> Side:
    from colossalai.mesh import initialize
    from colossalai.nn.optimizer import HybridAdam

    model = build(args, "meta").to(torch.bfloat16)
    initialize(model, 1024, device=device())
    optimizer = HybridAdam(model.parameters(), **ADAM)
    return step_of(model, optimizer), lambda: None, sum(p.numel() for p in model.parameters()), lambda: ""


def plain(args: argparse.Namespace) -> Side:
    """What a script without any of this does: weights in fp32, autocast, torch's AdamW."""
    model = build(args, device().type)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)
    step = step_of(model, optimizer, autocast=True)
    return step, lambda: None, sum(p.numel() for p in model.parameters()), lambda: ""


def fsdp2(args: argparse.Namespace) -> Side:
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    on_gpu = torch.cuda.is_available()
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    model: Any = build(args, "meta")
    options = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy() if on_gpu else OffloadPolicy(),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, p in model.named_parameters():
            local = p.to_local()
            if getattr(args, "quick", False):  # any values will do
                local.fill_(0.01)
            elif p.ndim > 1:
                local.copy_(torch.randn(local.shape, device=device()) * 0.02)
            else:
                local.fill_(0.0 if name.endswith("bias") else 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)
    return (
        step_of(model, optimizer),
        dist.destroy_process_group,
        sum(p.numel() for p in model.parameters()),
        lambda: "",
    )


SIDES: dict[str, Callable[[argparse.Namespace], Side]] = {
    "gemini-cpu": lambda args: gemini("cpu", args),
    "gemini-auto": lambda args: gemini("auto", args),
    "gemini-defaults": gemini_defaults,
    "gemini-disk": lambda args: gemini("cpu", args, disk=True),
    "fsdp2-offload": fsdp2,
    "all-on-gpu": everything,
    "plain-pytorch": plain,
}
COMPARED = ("gemini-cpu", "gemini-auto", "fsdp2-offload", "all-on-gpu")


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_side(side: str, args: argparse.Namespace) -> Result:
    import titans.model.gpt  # noqa: F401  (neither is a part of the start)

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
    begin = time.perf_counter()
    step, finish, parameters, notes = SIDES[side](args)
    wait()
    start = time.perf_counter() - begin
    words = TOY["vocab_size"] if args.small else BIG["vocab_size"]
    ids = torch.randint(words, (args.batch, args.length), generator=torch.Generator().manual_seed(0)).to(
        device()
    )
    losses = []
    begin = time.perf_counter()
    losses.append(step(ids))
    wait()
    first = time.perf_counter() - begin
    losses += [step(ids) for _ in range(WARM - 1)]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    moments = [time.perf_counter()]
    for _ in range(args.steps):
        losses.append(step(ids))
        moments.append(time.perf_counter())
    if side.startswith("gemini"):
        finish()
    wait()
    seconds = (time.perf_counter() - moments[0]) / args.steps
    if not side.startswith("gemini"):
        finish()
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    between = [b - a for a, b in pairwise(moments)]
    return Result(
        side,
        parameters,
        seconds,
        median(between),
        start,
        first,
        peak,
        host,
        [float(x) for x in losses],
        notes(),
    )


def show(results: list[Result]) -> str:
    head = (
        f"{'side':16}{'params':>10}{'s/step':>9}{'median':>9}{'start s':>9}{'first s':>9}"
        f"{'GPU GiB':>9}{'host GiB':>10}{'last loss':>11}"
    )
    lines = [head]
    for r in results:
        lines.append(
            f"{r.side:16}{r.parameters / 1e9:8.2f}"
            f" B{r.seconds:9.3f}{r.middle:9.3f}{r.start:9.1f}{r.first:9.1f}{r.gpu_gib:9.2f}"
            f"{r.host_gib:10.1f}{r.losses[-1]:11.4f}"
        )
    lines += [f"\n{r.side}: {r.notes}" for r in results if r.notes]
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sides", nargs="+", choices=SIDES)
    parser.add_argument("--small", action="store_true", help="a toy, to try the code on a CPU")
    parser.add_argument("--depth", type=int, default=BIG["depth"])
    parser.add_argument("--width", type=int, default=BIG["hidden_size"])
    parser.add_argument("--heads", type=int, default=BIG["num_heads"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--chunk-mb", type=float, default=128)
    parser.add_argument("--prefetch", type=int, default=3)
    parser.add_argument("--host-buffers", type=int, default=None)
    parser.add_argument(
        "--capacity-gib", type=float, default=0.0, help="of model data on the GPU; 0: no limit"
    )
    parser.add_argument(
        "--clip", type=float, default=0.0, help="the largest norm of gradients; 0: do not clip"
    )
    parser.add_argument(
        "--undo-ratio",
        type=float,
        default=0.25,
        help="with --clip: the share of weights and states on the host held twice, to update before the"
        " norm is known",
    )
    parser.add_argument(
        "--host-gib", type=float, default=110.0, help="of the host, for gemini-disk and the search"
    )
    parser.add_argument("--disk-dir", default=None, help="for gemini-disk: a directory on a disk")
    parser.add_argument("--disk-gib", type=float, default=48.0, help="what gemini-disk may take of it")
    parser.add_argument("--capacity-search", action="store_true", help="the largest GPT that trains one step")
    parser.add_argument(
        "--confirm",
        nargs="+",
        metavar="SIDE=DEPTH",
        help="with --capacity-search: try these alone, once each",
    )
    parser.add_argument(
        "--limit-s", type=float, default=150.0, help="with --capacity-search: seconds for a try"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.small:
        args.batch, args.length, args.steps = 2, 16, min(args.steps, 4)
    return args


def main() -> None:
    args = arguments()
    if args.capacity_search:
        from benchmarks.capacity import search

        search(args)
        return
    if args.one:
        print(json.dumps(asdict(run_side(args.one, args))), flush=True)
        return
    results = []
    for side in args.sides or COMPARED:
        command = [sys.executable, "-m", "benchmarks.offload", *sys.argv[1:], "--one", side]
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        found = subprocess.run(
            command, stdout=subprocess.PIPE, cwd=Path(__file__).resolve().parent.parent, env=environment
        )
        if found.returncode:
            print(f"{side} failed with exit code {found.returncode}", flush=True)
            continue
        results.append(Result(**json.loads(found.stdout.decode().strip().splitlines()[-1])))
        print(show(results[-1:]), flush=True)
    if len(results) > 1:
        print(show(results))


if __name__ == "__main__":
    main()
