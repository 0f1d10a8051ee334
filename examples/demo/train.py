"""Train a small GPT on the source of Python's standard library, then let it write some Python.

    colossalai run --nproc_per_node 2 examples/demo/train.py

Every process holds the whole model and trains on its own part of the data (``TorchDDPPlugin``); gradients are
averaged between them.  The script is an ordinary PyTorch loop with four changes: ``launch_from_torch``,
``Booster``, ``plugin.prepare_dataloader`` and ``booster.backward``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from progress import Progress, StopRequest
from report import Metrics, plot, unigram_entropy
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Subset

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from titans.dataloader.text import TokenWindows, stdlib_text
from titans.dataloader.tokenizer import Tokenizer
from titans.model.gpt import GPT, GPTLMLoss
from titans.utils import generate

VOCAB_SIZE = 1024
VALIDATION_WINDOWS = 256
VALIDATIONS = 10  # per training
SHAPE = {"seq_len": 64, "hidden": 128, "layers": 2, "heads": 4}  # a checkpoint brings its own
PROMPTS = ("def ", "class ")
GRADIENT_CLIPPING = 1.0


class Schedule:
    """How long to train, and the learning rate on the way: a linear warm-up, then half a cosine down to 10%.

    ``seconds`` bounds the training on a machine too slow for all ``steps``: the pace so far says how many fit.
    """

    def __init__(self, steps: int, seconds: float, first_step: int = 0) -> None:
        self.steps, self.seconds, self.first_step = steps, seconds, first_step
        self.end = steps

    def update(self, step: int, elapsed: float) -> None:
        """Look at the pace; ``elapsed`` must be the same number on every rank."""
        if self.seconds and step - self.first_step >= 10:
            affordable = self.first_step + int(self.seconds / elapsed * (step - self.first_step))
            self.end = min(self.steps, max(affordable, step))

    def factor(self, step: int) -> float:
        warm_up = max(1, self.end // 20)
        if step < warm_up:
            return (step + 1) / warm_up
        progress = min(1.0, (step - warm_up) / max(1, self.end - warm_up))
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


class Demo:
    """Everything a training needs, built in the order in which a script of yours would build it."""

    def __init__(self, args: argparse.Namespace, saved: dict[str, Any]) -> None:
        colossalai.launch_from_torch(config={}, seed=args.seed, verbose=False)
        self.args, self.out, self.step = args, Path(args.out), int(saved.get("step", 0))
        self.is_master = dist.get_rank() == 0
        self.metrics = Metrics(self.out / "metrics.jsonl", keep_until=self.step, active=self.is_master)

        text = stdlib_text(args.text_bytes)
        self.tokenizer = (
            load_tokenizer(self.out) if saved else Tokenizer.train(text.train[:1_000_000], VOCAB_SIZE)
        )
        train, validation = (torch.tensor(self.tokenizer.encode(part)) for part in text)
        self.bytes_per_token = len(text.validation) / len(validation)
        self.unigram = unigram_entropy(train)

        plugin = TorchDDPPlugin()
        self.booster = Booster(plugin=plugin)
        windows = TokenWindows(train, args.seq_len)
        held_out = TokenWindows(validation, args.seq_len)
        self.train_loader = plugin.prepare_dataloader(
            windows, batch_size=args.batch_size, shuffle=True, seed=args.seed, drop_last=True
        )
        self.validation_loader = plugin.prepare_dataloader(
            Subset(held_out, range(min(VALIDATION_WINDOWS, len(held_out)))), batch_size=32
        )
        model = build_model(args)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.schedule = Schedule(args.steps, args.time_limit, self.step)
        scheduler = LambdaLR(optimizer, self.schedule.factor)
        self.model, self.optimizer, self.criterion, self.train_loader, self.scheduler = self.booster.boost(
            model, optimizer, GPTLMLoss(), self.train_loader, scheduler
        )
        self.device = next(self.model.parameters()).device
        if saved:
            self.load()
        self.describe(text)

    def describe(self, text: Any) -> None:
        world, size = dist.get_world_size(), sum(p.numel() for p in self.model.parameters())
        args = self.args
        self.say(
            f"text:  {len(text.train) / 1e6:.1f} MB of Python's standard library to train on, "
            f"{len(text.validation) / 1e6:.1f} MB held out; {self.bytes_per_token:.2f} bytes per token"
        )
        self.say(
            f"model: GPT with {size / 1e6:.2f} million parameters: {args.layers} layers, width {args.hidden}, "
            f"{args.heads} heads, {args.seq_len} tokens of context, vocabulary {self.tokenizer.vocab_size}"
        )
        self.say(
            f"plan:  data parallel on {world} x {self.device.type} ({dist.get_backend()}), "
            f"{world} x {args.batch_size} windows per step, up to {args.steps} steps"
        )

    def say(self, message: str = "") -> None:
        if self.is_master:
            print(message, flush=True)

    def train(self) -> bool:
        """Train until the schedule ends (True) or somebody pressed Ctrl-C (False)."""
        start, first = time.monotonic(), self.step
        batches = endless(self.train_loader, first)
        validate_every = max(1, (self.args.steps - first) // VALIDATIONS)
        with StopRequest() as stop, Progress(first, self.args.steps, active=self.is_master) as progress:
            if first == 0:
                self.validate(progress)
            while self.step < self.schedule.end:
                loss = self.train_step(next(batches))
                # One small message per step: the mean loss, whether anybody wants to stop, and rank 0's clock,
                # so that all ranks decide alike.
                news = torch.tensor([loss, stop.requested, self.is_master * (time.monotonic() - start)])
                dist.all_reduce(news := news.to(self.device))
                loss, stops, elapsed = news.tolist()
                loss /= dist.get_world_size()
                self.schedule.update(self.step, elapsed)
                self.metrics.add(step=self.step, train_loss=loss, lr=self.scheduler.get_last_lr()[0])
                progress.update(self.step, self.schedule.end, loss)
                if stops:
                    return False
                if self.step % validate_every == 0 or self.step == self.schedule.end:
                    self.validate(progress)
        return True

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
        self.booster.save_model(self.model, folder / "model", shard=True, use_safetensors=True)
        self.booster.save_optimizer(self.optimizer, folder / "optimizer", shard=True)
        self.booster.save_lr_scheduler(self.scheduler, folder / "lr_scheduler.bin")
        if self.is_master:
            self.tokenizer.save(folder / "tokenizer.json")
            shape = {name: getattr(self.args, name) for name in SHAPE}
            (folder / "demo.json").write_text(json.dumps({"step": self.step, "shape": shape}))
        dist.barrier()

    def load(self) -> None:
        self.booster.load_model(self.model, self.checkpoint / "model")
        self.booster.load_optimizer(self.optimizer, self.checkpoint / "optimizer")
        self.booster.load_lr_scheduler(self.scheduler, self.checkpoint / "lr_scheduler.bin")
        self.say(f"going on from step {self.step} of {self.checkpoint}")

    def finish(self, finished: bool) -> None:
        """What rank 0 tells and draws; the others wait, since a process that leaves early breaks the group."""
        if self.is_master:
            if finished:
                self.show()
            picture = plot(self.metrics.records, self.out / "loss.png", math.log(VOCAB_SIZE), self.unigram)
            print(f"\nloss curve   {picture}")
            print(f"numbers      {self.metrics.path}")
            print(f"checkpoint   {self.checkpoint} (step {self.step})")
            print(NEXT.format(more=2 * self.args.steps))
            if not finished:
                print(
                    f"Stopped at step {self.step} of {self.args.steps} as you asked; add --resume to go on."
                )
        dist.barrier()

    def show(self) -> None:
        curve = [r["validation_loss"] for r in self.metrics.records if "validation_loss" in r]
        bits = curve[-1] / self.bytes_per_token / math.log(2)
        print(
            f"\nvalidation loss from {curve[0]:.3f} to {curve[-1]:.3f} nats per token ({bits:.2f} bits per byte)"
        )
        print(
            f"for comparison: {math.log(VOCAB_SIZE):.3f} knowing nothing, {self.unigram:.3f} knowing word frequencies"
        )
        for prompt in PROMPTS:
            print("\n" + sample(self.model.unwrap(), self.tokenizer, prompt, self.args.seed))


NEXT = """
What to try next:
  colossalai run --nproc_per_node 2 examples/demo/train.py --resume --steps {more}
  python examples/demo/train.py --sample-only "def read_lines("
  colossalai run --nproc_per_node 1 examples/demo/train.py --out runs/serial
  examples/demo/README.md explains the options and the code, docs/quickstart.md the rest
"""


def build_model(args: argparse.Namespace) -> GPT:
    torch.manual_seed(args.seed)
    return GPT(
        vocab_size=VOCAB_SIZE,
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


def endless(loader: DataLoader, first: int) -> Iterator[Tensor]:
    """Epoch after epoch, each in its own order, beginning with batch number ``first``."""
    for epoch in itertools.count(first // len(loader)):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        skipped = max(0, first - epoch * len(loader))
        yield from itertools.islice(loader, skipped, None)


def sample(model: GPT, tokenizer: Tokenizer, prompt: str, seed: int) -> str:
    device = next(model.parameters()).device
    prompt_ids = torch.tensor([tokenizer.encode(prompt)], device=device)
    ids = generate(model, prompt_ids, 150, temperature=0.7, top_k=50, seed=seed)
    return tokenizer.decode(ids[0].tolist())


def sample_only(args: argparse.Namespace) -> None:
    """Needs no other process, so it also runs as ``python examples/demo/train.py --sample-only ...``."""
    if int(os.environ.get("RANK", 0)) == 0:
        torch.set_num_threads(1)  # one token at a time gives no work for more
        model = build_model(args)
        Booster(device="cpu").load_model(model, Path(args.out) / "checkpoint" / "model")
        print(sample(model, load_tokenizer(Path(args.out)), args.sample_only, args.seed))


def parse_arguments() -> tuple[argparse.Namespace, dict[str, Any]]:
    """The options, and what ``--resume`` and ``--sample-only`` find in the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=positive, default=1500, help="optimizer steps (default: %(default)s)")
    parser.add_argument(
        "--batch-size", type=positive, default=8, help="windows per process and step (%(default)s)"
    )
    parser.add_argument("--seq-len", type=positive, help=f"tokens per window ({SHAPE['seq_len']})")
    parser.add_argument("--hidden", type=positive, help=f"width of the model ({SHAPE['hidden']})")
    parser.add_argument("--layers", type=positive, help=f"transformer blocks ({SHAPE['layers']})")
    parser.add_argument("--heads", type=positive, help=f"attention heads per block ({SHAPE['heads']})")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=1024, help="of weights, data order and samples (%(default)s)"
    )
    parser.add_argument("--out", default="runs/demo", help="folder for the results (%(default)s)")
    parser.add_argument("--text-bytes", type=positive, default=6_000_000, help="text to read (%(default)s)")
    parser.add_argument(
        "--time-limit", type=float, default=75.0, metavar="S",
        help="on a slow machine, train fewer steps so as to end after S seconds; 0: never (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument(
        "--sample-only", metavar="PROMPT", help="do not train: continue PROMPT with the checkpoint"
    )
    args = parser.parse_args()
    saved: dict[str, Any] = {}
    if args.resume or args.sample_only is not None:
        path = Path(args.out) / "checkpoint" / "demo.json"
        if not path.is_file():
            parser.error(
                f"there is no checkpoint in {args.out}; train without --resume first, or correct --out"
            )
        saved = json.loads(path.read_text())
    for name, default in SHAPE.items():
        given, stored = getattr(args, name), saved.get("shape", {}).get(name)
        if stored and given and given != stored:
            option = "--" + name.replace("_", "-")
            parser.error(
                f"the checkpoint in {args.out} has {option} {stored}, not {given}; leave {option} out"
            )
        setattr(args, name, stored or given or default)
    if args.hidden % args.heads:
        parser.error(f"--hidden {args.hidden} is not divisible by --heads {args.heads}")
    if args.seq_len < 2:
        parser.error("--seq-len must be at least 2: each token is predicted from those before it")
    if args.resume and args.sample_only is None and saved["step"] >= args.steps:
        parser.error(f"the checkpoint is at step {saved['step']} already; pass a higher --steps to go on")
    if args.sample_only == "":
        parser.error("--sample-only needs a prompt of at least one letter to go on from")
    return args, saved


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def use_all_cores() -> None:
    """On a CPU, share the cores among the processes of this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def train(args: argparse.Namespace, saved: dict[str, Any]) -> bool:
    use_all_cores()
    demo = Demo(args, saved)
    finished = demo.train()
    demo.save()
    demo.finish(finished)
    return finished


def main() -> None:
    args, saved = parse_arguments()
    if args.sample_only is not None:
        sample_only(args)
        return
    finished = train(args, saved)
    # The group ends its threads only when nothing refers to it, so what DDP still holds must go first.  A thread
    # that outlives the interpreter would abort the process.
    gc.collect()
    dist.destroy_process_group()
    if not finished:
        sys.exit(130)


if __name__ == "__main__":
    main()
