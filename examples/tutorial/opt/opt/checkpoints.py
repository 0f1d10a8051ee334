"""Checkpoints that are written during training, and from which training is resumed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch.distributed as dist

from colossalai.engine import Engine
from colossalai.logging import get_dist_logger


class Checkpoints:
    """Folders ``step_N`` and ``epoch_N`` under ``--output_dir``, each with all that the run needs to go on,
    on any number of processes.
    """

    def __init__(self, args: argparse.Namespace, engine: Engine) -> None:
        assert engine.booster is not None
        self.engine, self.booster = engine, engine.booster
        self.output: Path | None = args.output_dir
        self.origin: Path | None = args.resume_from_checkpoint
        self.every = every(args.checkpointing_steps, args.output_dir)

    def after_step(self, done: int) -> None:
        if isinstance(self.every, int) and done % self.every == 0:
            self._save(f"step_{done}", done)

    def after_epoch(self, epoch: int, done: int) -> None:
        if self.every == "epoch":
            self._save(f"epoch_{epoch}", done)

    def _save(self, name: str, done: int) -> None:
        assert self.output is not None
        self.booster.save(self.output / name, {"updates": done})

    def resume(self) -> int:
        """Go on from ``--resume_from_checkpoint``, if it is given; return the updates that are done."""
        if self.origin is None:
            return 0
        if not self.origin.is_dir():
            raise ValueError(
                "--resume_from_checkpoint needs a folder step_N or epoch_N that --checkpointing_steps has"
                f" written, got {self.origin}"
            )
        done: int = self.booster.load(self.origin)["updates"]
        get_dist_logger().info(f"Resumed from {self.origin}", ranks=[0])
        return done

    def save_model(self, config: Any, tokenizer: Any) -> None:
        """The trained model, as ``from_pretrained`` of transformers reads it."""
        assert self.output is not None
        if dist.get_rank() == 0:
            self.output.mkdir(parents=True, exist_ok=True)
            config.save_pretrained(self.output)
            tokenizer.save_pretrained(self.output)
        dist.barrier()
        self.booster.save_model(self.engine.model, self.output / "model.safetensors", use_safetensors=True)


def every(text: str | None, output: Path | None) -> int | str | None:
    if text is None:
        return None
    if text != "epoch" and not (text.isdecimal() and int(text) > 0):
        raise ValueError(f"--checkpointing_steps is a number of updates or 'epoch', got {text!r}")
    if output is None:
        raise ValueError("--checkpointing_steps needs --output_dir, the folder to write to")
    return text if text == "epoch" else int(text)
