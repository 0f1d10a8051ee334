"""Activation checkpointing under a budget, on a GPU: peaks and times of ``auto_checkpoint`` beside those that
it predicted, and beside plain training, one mode for all blocks, and torch's ``activation_memory_budget``.

    python benchmarks/activation_checkpointing.py --models gpt2 vit --batches 1 --budgets 4
    python benchmarks/activation_checkpointing.py --compile --models gpt2-xl

A step is a forward and a backward pass.  Every line is printed when it is known, and a case that fails does
not end the others.  ``--small`` runs toys on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from colossalai.auto_parallel.checkpoint import (
    CheckpointPlanner,
    CheckpointSolverChen,
    CheckpointSolverRotor,
)
from colossalai.auto_parallel.checkpoint.blocks import block_modes
from colossalai.nn import chunk_causal_loss, skip_causal_mask
from colossalai.utils.live_bytes import LiveBytes
from titans.model import resnet

GIB = 2**30
TORCH_BUDGETS = (0.2, 0.5, 0.8)


class Case(NamedTuple):
    """How a model is built, its batch of so many samples, its criterion, and the sizes of batches."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    criterion: nn.Module | None
    batches: tuple[int, ...]


def _tokens(length: int, words: int) -> Callable[[int], Any]:
    def make(samples: int) -> Any:
        ids = torch.randint(words, (samples, length))
        return {"input_ids": ids, "labels": ids}

    return make


def _images(pixels: int, classes: int) -> Callable[[int], Any]:
    return lambda n: (torch.rand(n, 3, pixels, pixels), torch.randint(classes, (n,)))


def _resnet(name: str) -> nn.Module:
    try:
        from torchvision import models
    except ImportError:
        return getattr(resnet, name)()  # type: ignore[no-any-return]
    return getattr(models, name)()  # type: ignore[no-any-return]


def _gpt2(**sizes: int) -> nn.Module:
    import transformers as hf

    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def _bert(**sizes: int) -> nn.Module:
    import transformers as hf

    return hf.BertForMaskedLM(hf.BertConfig(**sizes))


def _llama(**sizes: int) -> nn.Module:
    import transformers as hf

    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes))


def _vit(**sizes: int) -> nn.Module:
    import transformers as hf

    return hf.ViTForImageClassification(hf.ViTConfig(num_labels=1000, **sizes))


LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 50304,
    "max_position_embeddings": 2048,
}
XL = {"n_embd": 1600, "n_layer": 48, "n_head": 25}


def _pixels(n: int) -> Any:
    return {"pixel_values": torch.rand(n, 3, 224, 224), "labels": torch.randint(1000, (n,))}


CASES = {
    "resnet50": Case(lambda: _resnet("resnet50"), _images(224, 1000), nn.CrossEntropyLoss(), (64, 128, 256)),
    "resnet152": Case(
        lambda: _resnet("resnet152"), _images(224, 1000), nn.CrossEntropyLoss(), (64, 128, 256)
    ),
    "gpt2": Case(lambda: _gpt2(), _tokens(1024, 50257), None, (4, 8, 16)),
    "gpt2-xl": Case(lambda: _gpt2(**XL), _tokens(1024, 50257), None, (2, 4, 8)),
    "bert": Case(lambda: _bert(), _tokens(512, 30522), None, (16, 32, 64)),
    "vit": Case(lambda: _vit(), _pixels, None, (64, 128, 256)),
    "llama": Case(lambda: _llama(**LLAMA), _tokens(1024, 50304), None, (2, 4, 8)),
}
_TOY = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
SMALL = {
    "gpt2": Case(lambda: _gpt2(n_embd=64, n_layer=4, n_head=2, vocab_size=64), _tokens(64, 64), None, (4, 8)),
    "resnet": Case(
        lambda: resnet.resnet18(10, small_images=True), _images(16, 10), nn.CrossEntropyLoss(), (8,)
    ),
    "llama": Case(lambda: _llama(**_TOY, intermediate_size=128, vocab_size=64), _tokens(64, 64), None, (4,)),
}


@dataclass
class Verdict:
    """What all budgets together showed."""

    budgets: int = 0
    over: int = 0
    peak_error: float = 0.0
    time_error: float = 0.0

    def add(self, measured: Measured, budget: int, told: Any) -> None:
        self.budgets += 1
        self.over += measured.peak > budget
        self.peak_error = max(self.peak_error, abs(told.peak / measured.peak - 1))
        self.time_error = max(self.time_error, abs(told.seconds / measured.seconds - 1))


VERDICT = Verdict()


class Measured(NamedTuple):
    """The bytes at the worst moment of a step, and its seconds."""

    peak: int
    seconds: float


@dataclass
class Bench:
    """One model with one batch on one device."""

    model: nn.Module
    planner: CheckpointPlanner
    autocast: torch.dtype | None
    repeat: int

    @property
    def device(self) -> torch.device:
        return self.planner.place

    def measure(self, model: nn.Module | None = None) -> Measured:
        """A step of the model as it is, or of what was compiled of it."""
        step = self.planner.step
        counts = self.device.type == "cpu" and model is None  # what is compiled is not seen
        model = self.model if model is None else model
        times, peak = [], 0
        for number in range(3 + self.repeat):
            self.model.zero_grad(set_to_none=True)
            if number == 3:
                self._restart()
            with LiveBytes(block=512) if counts else nullcontext() as memory:
                if memory is not None:
                    memory.hold((*self.model.parameters(), *self.model.buffers()))
                self._wait()
                start = time.perf_counter()
                with step.autocasts(self.device.type):
                    loss = step.loss(model, step.batch)
                loss.backward()  # type: ignore[no-untyped-call]
                del loss
                self._wait()
            times += [time.perf_counter() - start] if number >= 3 else []
            peak = max(peak, memory.peak) if memory is not None else peak
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated()
        self.model.zero_grad(set_to_none=True)
        return Measured(peak, median(times))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _restart(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def alike(self, mode: str) -> Measured:
        with block_modes(self.model, dict.fromkeys(self.planner.blocks, mode)):
            return self.measure()


def line(case: str, side: str, measured: Measured | None, budget: int = 0, told: Any = None) -> None:
    """One row of the table."""
    cells = [f"{case:18}", f"{side:26}", f"{budget / GIB:9.3f}" if budget else " " * 9]
    cells += [f"{measured.peak / GIB:9.3f}", f"{measured.seconds * 1e3:9.2f}"] if measured else [" " * 19]
    if told is not None:
        cells += [f"{told.peak / GIB:9.3f}", f"{told.seconds * 1e3:9.2f}"]
    if told is not None and measured is not None and measured.peak:
        cells += [f"{told.peak / measured.peak - 1:+8.1%}", f"{told.seconds / measured.seconds - 1:+8.1%}"]
    if budget and measured is not None and measured.peak > budget:
        cells.append("OVER THE BUDGET")
    print(" ".join(cells), flush=True)


def run(name: str, case: Case, samples: int, args: argparse.Namespace) -> None:
    """All sides of one model with one batch."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = case.build().to(device)
    if args.chunked and hasattr(model, "lm_head"):
        model = skip_causal_mask(chunk_causal_loss(model, whole_scores=False))
    batch = _to(case.batch(samples), device, torch.bfloat16 if args.precision == "bf16" else torch.float32)
    if args.precision == "bf16":
        model = model.to(torch.bfloat16)
    autocast = torch.bfloat16 if args.precision == "autocast" else None
    start = time.perf_counter()
    planner = CheckpointPlanner(model, batch, criterion=case.criterion, autocast=autocast)
    bench = Bench(model.train(), planner, autocast, args.repeat)
    least = planner.least[2]
    label = f"{name} x {samples}"
    print(
        f"{label:18} profiled in {time.perf_counter() - start:.1f} s, {len(planner.blocks)} blocks",
        flush=True,
    )
    for mode in planner.played:
        modes = [mode] * len(planner.problem.stages)
        told = planner.predicted(modes)
        _guard(
            label, mode, lambda mode=mode, told=told: line(label, f"all {mode}", bench.alike(mode), 0, told)
        )
    most = planner.whole
    for number in range(args.budgets):
        budget = least + (most - least) * number // max(1, args.budgets - 1)
        _guard(label, "ours", lambda budget=budget: _ours(label, bench, budget))
    _guard(label, "chains", lambda: _chains(label, planner))
    if args.compile:
        for share in TORCH_BUDGETS:
            _guard(label, "compile", lambda share=share: _compiled(label, bench, share))


def _ours(label: str, bench: Bench, budget: int) -> None:
    plan = bench.planner.plan(budget)
    with block_modes(bench.model, plan.modes):
        measured = bench.measure()
    line(label, "auto_checkpoint", measured, budget, plan)
    VERDICT.add(measured, budget, plan)


def _chains(label: str, planner: CheckpointPlanner) -> None:
    """What solvers of chains would reach with the same blocks, as predicted."""
    chain, rest = planner.chain(), planner.problem.seconds
    chen = CheckpointSolverChen(chain).solve()
    print(f"{label:18} Chen, predicted time {1e3 * (rest + chen.cost(chain)):.2f} ms", flush=True)
    for bytes_, seconds in CheckpointSolverRotor(chain).curve()[::60]:
        text = f"{bytes_ / GIB:.3f} GiB of activations {1e3 * (rest + seconds):.2f} ms"
        print(f"{label:18} Rotor, predicted {text}", flush=True)


def _compiled(label: str, bench: Bench, share: float) -> None:
    """torch's own budget, and ours with the bytes that it needed, both compiled."""
    from torch._functorch import config

    before = config.activation_memory_budget
    torch._dynamo.reset()
    try:
        config.activation_memory_budget = share
        theirs = bench.measure(torch.compile(bench.model))  # type: ignore[arg-type]
    finally:
        config.activation_memory_budget = before
    line(label, f"torch.compile, budget {share}", theirs)
    torch._dynamo.reset()
    least = bench.planner.least[2]
    plan = bench.planner.plan(max(theirs.peak, least))
    with block_modes(bench.model, plan.modes):
        ours = bench.measure(torch.compile(bench.model))  # type: ignore[arg-type]
    line(label, "auto_checkpoint, compiled", ours, plan.budget, plan)
    torch._dynamo.reset()


def _guard(label: str, side: str, work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:
        print(f"{label:18} {side}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        if not isinstance(error, torch.OutOfMemoryError):
            traceback.print_exc(limit=-4)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _to(nest: Any, device: torch.device, dtype: torch.dtype) -> Any:
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, lambda t: t.to(device, dtype if t.is_floating_point() else None), nest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=None, help=f"of {', '.join(CASES)}")
    parser.add_argument("--batches", type=int, default=3, help="how many sizes of batches")
    parser.add_argument("--batch", type=int, default=None, help="this size only")
    parser.add_argument("--budgets", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--precision", choices=("bf16", "autocast", "fp32"), default="bf16")
    parser.add_argument("--compile", action="store_true", help="also torch.compile and its memory budget")
    parser.add_argument(
        "--chunked", action="store_true", help="language models: chunk_causal_loss and skip_causal_mask first"
    )
    parser.add_argument("--small", action="store_true", help="toys, for a CPU")
    args = parser.parse_args()
    cases = SMALL if args.small else CASES
    if args.small:
        args.precision = "fp32"
    names = args.models or [name for name in cases if name != "gpt2-xl"]
    if unknown := [name for name in names if name not in cases]:
        parser.error(f"unknown model {unknown[0]!r}; choose from {', '.join(cases)}")
    head = ("case", "side", "budget", "peak GiB", "ms", "predicted", "ms", "peak err", "time err")
    print(f"{head[0]:18} {head[1]:26} " + " ".join(f"{cell:>9}" for cell in head[2:]), flush=True)
    for name in names:
        sizes = [args.batch] if args.batch else cases[name].batches[: args.batches]
        for samples in sizes:
            _guard(name, "case", lambda name=name, samples=samples: run(name, cases[name], samples, args))
    print(
        f"{VERDICT.budgets} budgets, {VERDICT.over} measured above; largest error of a predicted peak"
        f" {VERDICT.peak_error:.1%}, of a time {VERDICT.time_error:.1%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
