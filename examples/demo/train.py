"""Train a small GPT on the source of Python's standard library, then let it write some Python.

    colossalai run --nproc_per_node 2 examples/demo/train.py

Every process holds the whole model and trains on its own part of the data (``TorchDDPPlugin``); gradients are
averaged between them.  The script is an ordinary PyTorch loop with four changes: ``launch_from_torch``,
``Booster``, ``plugin.prepare_dataloader`` and ``booster.backward``.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from options import OUT, SHAPE, TRAINING, parse_arguments
from progress import Progress, StopRequest
from report import Baselines, Metrics, plot, unigram_entropy
from schedule import Schedule
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Subset

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from titans.dataloader.text import TextSplit, TokenWindows, stdlib_text
from titans.dataloader.tokenizer import Tokenizer
from titans.model.gpt import GPT, GPTLMLoss
from titans.utils import generate

MB = 1_000_000
VOCAB_SIZE = 1024
VALIDATION_WINDOWS = 256
VALIDATIONS = 16  # per training
PROMPTS = ("    def __init__(self", "def read_lines(")
GRADIENT_CLIPPING = 1.0


class Demo:
    """A training: its parts are built in the order in which a script of yours would build them."""

    def __init__(self, args: argparse.Namespace, saved: dict[str, Any]) -> None:
        colossalai.launch_from_torch(config={}, seed=args.seed, verbose=False)
        self.args, self.out, self.step = args, Path(args.out), int(saved.get("step", 0))
        self.is_master = dist.get_rank() == 0
        self.metrics = Metrics(self.out / "metrics.jsonl", keep_until=self.step, active=self.is_master)
        text = stdlib_text(args.text_bytes)
        # every rank trains the tokenizer for itself: the same text gives the same tokens
        self.tokenizer = load_tokenizer(self.out) if saved else Tokenizer.train(text.train[:MB], VOCAB_SIZE)
        train, validation = (torch.tensor(self.tokenizer.encode(part)) for part in text)
        self.baselines = Baselines(
            uniform=math.log(self.tokenizer.vocab_size),
            unigram=unigram_entropy(train),
            bytes_per_token=len(text.validation) / len(validation),
        )
        self.prepare(TokenWindows(train, args.seq_len), TokenWindows(validation, args.seq_len))
        if saved:
            self.load()
        self.describe(text)

    def prepare(self, windows: TokenWindows, held_out: TokenWindows) -> None:
        args = self.args
        plugin = TorchDDPPlugin()
        self.booster = Booster(plugin=plugin)
        if len(windows) // dist.get_world_size() < args.batch_size:
            raise ValueError(
                f"{len(windows)} windows of text are too few for {dist.get_world_size()} x {args.batch_size} "
                "per step; lower --batch-size or --seq-len, or raise --text-bytes"
            )
        train_loader = plugin.prepare_dataloader(
            windows, batch_size=args.batch_size, shuffle=True, seed=args.seed, drop_last=True
        )
        # spread over all files held out, since one file may be much easier than another
        chosen = range(0, len(held_out), max(1, len(held_out) // VALIDATION_WINDOWS))[:VALIDATION_WINDOWS]
        self.validation_loader = plugin.prepare_dataloader(Subset(held_out, chosen), batch_size=32)
        model = build_model(args, self.tokenizer)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True
        )
        self.schedule = Schedule(args.steps, args.time_limit, self.step)
        scheduler = LambdaLR(optimizer, self.schedule.factor)
        self.model, self.optimizer, self.criterion, self.train_loader, self.scheduler = self.booster.boost(
            model, optimizer, GPTLMLoss(), train_loader, scheduler
        )
        self.device = next(self.model.parameters()).device

    def describe(self, text: TextSplit) -> None:
        args, world = self.args, dist.get_world_size()
        size = sum(p.numel() for p in self.model.parameters())
        self.say(
            f"text:  {len(text.train) / 1e6:.1f} MB of Python's standard library to train on,"
            f" {len(text.validation) / 1e6:.1f} MB held out; {self.baselines.bytes_per_token:.2f} bytes per"
            " token"
        )
        self.say(
            f"model: GPT with {size / 1e6:.2f} million parameters: {args.layers} layers, width {args.hidden},"
            f" {args.heads} heads, {args.seq_len} tokens of context, vocabulary {self.tokenizer.vocab_size}"
        )
        self.say(
            f"plan:  data parallel on {world} x {self.device.type} ({dist.get_backend()}), "
            f"{world} x {args.batch_size} windows per step, up to {args.steps} steps"
        )

    def say(self, message: str = "") -> None:
        if self.is_master:
            print(message, flush=True)

    def train(self, stop: StopRequest) -> bool:
        """Train until the schedule ends (True) or Ctrl-C is pressed (False)."""
        start, first = time.monotonic(), self.step
        batches = endless(self.train_loader)
        validate_every = math.ceil((self.args.steps - first) / VALIDATIONS)
        with Progress(first, self.args.steps, active=self.is_master) as progress:
            if first == 0:
                self.validate(progress)
            while self.step < self.schedule.end:
                loss = self.train_step(next(batches))
                loss, stopped, elapsed = self.agree(loss, stop.requested, time.monotonic() - start)
                self.schedule.update(self.step, elapsed)
                self.metrics.add(step=self.step, train_loss=loss, lr=self.scheduler.get_last_lr()[0])
                progress.update(self.step, self.schedule.end, loss)
                if stopped and self.step < self.schedule.end:
                    return False
                if self.step % validate_every == 0 or self.step == self.schedule.end:
                    self.validate(progress)
        return True

    def agree(self, loss: float, stop: bool, elapsed: float) -> tuple[float, bool, float]:
        """The mean loss, whether any rank wants to stop, and rank 0's clock: so all ranks decide alike."""
        news = torch.tensor([loss, stop, elapsed if self.is_master else 0.0], device=self.device)
        dist.all_reduce(news)
        losses, stops, elapsed = news.tolist()
        return losses / dist.get_world_size(), stops > 0, elapsed

    def train_step(self, input_ids: Tensor) -> float:
        input_ids = input_ids.to(self.device)  # (batch, seq)
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(input_ids), input_ids)
        self.booster.backward(loss, self.optimizer)
        self.optimizer.clip_grad_by_norm(GRADIENT_CLIPPING)
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        return loss.item()

    @torch.no_grad()
    def validate(self, progress: Progress) -> None:
        self.model.eval()
        total = torch.zeros(2, device=self.device)
        for input_ids in self.validation_loader:
            input_ids = input_ids.to(self.device)
            loss = self.criterion(self.model(input_ids), input_ids)
            total += torch.stack([loss, torch.ones_like(loss)]) * len(input_ids)
        self.model.train()
        dist.all_reduce(total)
        mean = (total[0] / total[1]).item()
        self.metrics.add(step=self.step, validation_loss=mean)
        progress.note(f"step {self.step:5d}   validation loss {mean:.3f}")

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint"

    def save(self) -> None:
        folder = self.checkpoint
        self.booster.save(folder, {"step": self.step})
        if self.is_master:
            self.tokenizer.save(folder / "tokenizer.json")
            options = {
                kind: {name: getattr(self.args, name) for name in names}
                for kind, names in (("shape", SHAPE), ("training", TRAINING))
            }
            (folder / "demo.json").write_text(json.dumps({"step": self.step, **options}))
        dist.barrier()

    def load(self) -> None:
        self.booster.load(self.checkpoint)
        self.say(f"going on from step {self.step} of {self.checkpoint}")

    def finish(self, finished: bool) -> None:
        """What rank 0 tells and draws; the others wait, since a process that leaves early breaks the
        group.
        """
        if self.is_master:
            if finished:
                self.show()
            print(f"\nloss curve   {self.draw()}")
            print(f"numbers      {self.metrics.path}")
            print(f"checkpoint   {self.checkpoint} (step {self.step})")
            print(self.advice(finished))
        dist.barrier()

    def draw(self) -> str:
        if find_spec("matplotlib") is None:
            return "not drawn, for want of matplotlib: pip install matplotlib"
        return str(plot(self.metrics.records, self.out / "loss.png", self.baselines))

    def advice(self, finished: bool) -> str:
        script = "examples/demo/train.py"
        if str(self.out) != OUT:
            script += f" --out {self.out}"
        resume = f"{tool('colossalai')} run --nproc_per_node {dist.get_world_size()} {script} --resume"
        if not finished:
            return f"\nStopped at step {self.step} of {self.args.steps}, as you asked. To go on:\n  {resume}"
        return (
            f"\nWhat to try next:\n  {resume} --steps {2 * self.step}\n"
            f'  {tool("python")} {script} --sample-only "class Parser"\n'
            "  examples/demo/README.md explains the options and the code, the page quickstart.md the rest"
        )

    def show(self) -> None:
        curve = [r["validation_loss"] for r in self.metrics.records if "validation_loss" in r]
        known = self.baselines
        bits = curve[-1] / known.bytes_per_token / math.log(2)
        print(
            "\n"
            f"validation loss from {curve[0]:.3f} to {curve[-1]:.3f} nats per token, {bits:.2f} bits per byte"
        )
        print(f"without context: {known.uniform:.3f} by guessing, {known.unigram:.3f} by token frequencies")
        for prompt in PROMPTS:
            print("\n" + sample(self.model.unwrap(), self.tokenizer, prompt, self.args.seed))


def tool(name: str) -> str:
    """A command as the user must type it: the environment that ``make`` creates is not on the PATH."""
    ours = Path(sys.executable).with_name(name)
    return name if not ours.exists() or shutil.which(name) == str(ours) else os.path.relpath(ours)


def build_model(args: argparse.Namespace, tokenizer: Tokenizer) -> GPT:
    torch.manual_seed(args.seed)
    return GPT(
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=args.seq_len,
        hidden_size=args.hidden,
        num_heads=args.heads,
        depth=args.layers,
        dropout=0.0,  # no text is seen twice in a short training, so there is nothing to overfit
        embedding_dropout=0.0,
        attention_dropout=0.0,
    )


def load_tokenizer(out: Path) -> Tokenizer:
    return Tokenizer.load(out / "checkpoint" / "tokenizer.json")


def endless(loader: DataLoader) -> Iterator[Tensor]:
    """Epoch after epoch, each in its own order; after ``booster.load`` from where the training stopped."""
    while True:
        yield from loader


def sample(model: GPT, tokenizer: Tokenizer, prompt: str, seed: int) -> str:
    device = next(model.parameters()).device
    prompt_ids = torch.tensor([tokenizer.encode(prompt)], device=device)
    ids = generate(model, prompt_ids, 120, temperature=0.65, top_k=50, seed=seed)
    return tokenizer.decode(ids[0].tolist())


def sample_only(args: argparse.Namespace) -> None:
    """Needs no other process, so it also runs as ``python examples/demo/train.py --sample-only ...``."""
    if int(os.environ.get("RANK", 0)) == 0:
        torch.set_num_threads(1)  # one token at a time gives no work for more
        tokenizer = load_tokenizer(Path(args.out))
        model = build_model(args, tokenizer)
        booster = Booster(device="cpu")
        booster.boost(model)
        booster.load(Path(args.out) / "checkpoint")
        print(sample(model, tokenizer, args.sample_only, args.seed))


def use_all_cores() -> None:
    """On a CPU, share the cores among the processes of this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def train(args: argparse.Namespace, saved: dict[str, Any]) -> bool:
    use_all_cores()
    demo = Demo(args, saved)
    with StopRequest() as stop:
        finished = demo.train(stop)
        demo.save()
        demo.finish(finished)
    return finished


def main() -> None:
    args, saved = parse_arguments()
    if args.sample_only is not None:
        sample_only(args)
        return
    finished = train(args, saved)
    # The group ends its threads only when nothing refers to it, so what DDP still holds must go first.  A
    # thread that outlives the interpreter would abort the process.
    gc.collect()
    dist.destroy_process_group()
    if not finished:
        sys.exit(130)


if __name__ == "__main__":
    main()
