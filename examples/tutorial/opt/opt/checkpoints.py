"""What is written while training goes on, and read when it is taken up again."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from colossalai.checkpoint_io import GatheredCheckpointIO
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.engine import Engine
from colossalai.logging import get_dist_logger


class Checkpoints:
    """Folders ``step_N`` and ``epoch_N`` under ``--output_dir``: weights, optimizer and scheduler, for any
    number of processes.
    """

    def __init__(self, args: argparse.Namespace, engine: Engine, scheduler: Any) -> None:
        self.engine, self.scheduler = engine, scheduler
        self.output: Path | None = args.output_dir
        self.origin: Path | None = args.resume_from_checkpoint
        self.accumulate: int = args.gradient_accumulation_steps
        self.every = every(args.checkpointing_steps, args.output_dir)
        self.io = GatheredCheckpointIO(gpc.get_group(ParallelMode.DATA))

    def after_step(self, done: int) -> None:
        if isinstance(self.every, int) and done % self.every == 0:
            self._save(f"step_{done}")

    def after_epoch(self, epoch: int) -> None:
        if self.every == "epoch":
            self._save(f"epoch_{epoch}")

    def _save(self, name: str) -> None:
        assert self.output is not None
        folder = self.output / name
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        self.io.save_model(self.engine.model, folder / "model.safetensors", use_safetensors=True)
        self.io.save_optimizer(optimizer_of(self.engine), folder / "optimizer.bin")
        if dist.get_rank() == 0:
            torch.save(self.scheduler.state_dict(), folder / "scheduler.bin")

    def resume(self, batches: int) -> tuple[int, int, int]:
        """Updates done, the epoch to go on with, and batches of it to pass over."""
        if self.origin is None:
            return 0, 0, 0
        found = re.fullmatch(r"(step|epoch)_(\d+)", self.origin.name)
        if found is None or not self.origin.is_dir():
            raise ValueError(
                "--resume_from_checkpoint needs a folder step_N or epoch_N that --checkpointing_steps has"
                f" written, got {self.origin}"
            )
        self.io.load_model(self.engine.model, self.origin / "model.safetensors")
        self.io.load_optimizer(optimizer_of(self.engine), self.origin / "optimizer.bin")
        self.scheduler.load_state_dict(torch.load(self.origin / "scheduler.bin", weights_only=False))
        get_dist_logger().info(f"Resumed from {self.origin}", ranks=[0])
        in_epoch = -(-batches // self.accumulate)
        number = int(found[2])
        done = number if found[1] == "step" else (number + 1) * in_epoch
        return done, done // in_epoch, done % in_epoch * self.accumulate

    def save_model(self, config: Any, tokenizer: Any) -> None:
        """The trained model, as ``from_pretrained`` of transformers reads it."""
        assert self.output is not None
        if dist.get_rank() == 0:
            self.output.mkdir(parents=True, exist_ok=True)
            config.save_pretrained(self.output)
            tokenizer.save_pretrained(self.output)
        dist.barrier()
        self.io.save_model(self.engine.model, self.output / "model.safetensors", use_safetensors=True)


def optimizer_of(engine: Engine) -> Any:
    """Gemini's, without what accumulates."""
    optimizer: Any = engine.optimizer
    while not hasattr(optimizer, "chunks"):
        optimizer = optimizer.optim
    return optimizer


def every(text: str | None, output: Path | None) -> int | str | None:
    if text is None:
        return None
    if text != "epoch" and not (text.isdecimal() and int(text) > 0):
        raise ValueError(f"--checkpointing_steps is a number of updates or 'epoch', got {text!r}")
    if output is None:
        raise ValueError("--checkpointing_steps needs --output_dir, the folder to write to")
    return text if text == "epoch" else int(text)
