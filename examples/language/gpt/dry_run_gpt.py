"""``train_gpt.py --dry-run``: the config at full size, on as many ranks as it needs, without a GPU."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable

import torch
from parts import build_criterion, build_model, build_optimizer, fit_to_plan
from tqdm import tqdm

from colossalai.context import Config, ParallelConfig
from colossalai.core import global_context as gpc
from colossalai.dry_run import Parts, RankReport, dry_run, format_reports

GIB = 2**30


def build() -> Parts:
    """This rank's model and batch, on the meta device."""
    config = gpc.config
    fit_to_plan(config)
    model = build_model(config)
    optimizer = build_optimizer(config, model.parameters())
    ids = torch.zeros(config.BATCH_SIZE, config.SEQ_LEN, dtype=torch.long)
    return Parts(model, optimizer, build_criterion(config), ({"input_ids": ids}, ids))


def world_size_of(config: Config) -> int:
    """The fewest processes that the plan needs, or ``NUM_GPUS``."""
    plan = ParallelConfig.parse(config.parallel)
    return config.get("NUM_GPUS") or (plan.data or 1) * plan.pipeline * plan.tensor


def play(config: Config, world_size: int | None = None) -> list[RankReport]:
    def bar(ranks: list[int]) -> Iterable[int]:
        return tqdm(ranks, desc="ranks", file=sys.stderr)

    return dry_run(config, world_size or world_size_of(config), build, bar)


def main(config: Config, args: argparse.Namespace) -> int:
    """Print the table; 1 if a rank needs more than ``--memory``."""
    world_size = args.world_size or world_size_of(config)
    start = time.perf_counter()
    reports = play(config, world_size)
    seconds = time.perf_counter() - start
    print(f"{args.config} on {world_size} ranks, played in {seconds:.1f} s:\n\n{format_reports(reports)}\n")
    worst = max(reports, key=lambda report: report.memory.peak)
    needed = worst.memory.peak / GIB
    print(f"rank {worst.rank} needs most: {needed:.1f} GiB, and what CUDA and NCCL take for themselves")
    if args.memory is not None and needed > args.memory:
        print(f"this is more than --memory {args.memory:g} GiB", file=sys.stderr)
        return 1
    return 0
