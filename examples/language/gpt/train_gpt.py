"""Train GPT-2 or GPT-3 with the plan of a config file.

    torchrun --standalone --nproc_per_node=4 train_gpt.py --config=gpt2_configs/gpt2_2d.py --from_torch
    colossalai run --nproc_per_node 4 train_gpt.py --config gpt2_configs/gpt2_2d.py --from_torch -s --tiny
    python train_gpt.py --config gpt3_configs/gpt3_pp1d.py --dry-run

The text comes from the file or folder in the environment variable DATA.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import dry_run_gpt
import torch
import torch.distributed as dist
from parts import (
    build_criterion,
    build_dataloader,
    build_model,
    build_optimizer,
    check_config,
    fit_to_plan,
    tflop_per_step,
)
from tiny import shrink

import colossalai
from colossalai.context import Config
from colossalai.core import global_context as gpc
from colossalai.logging import disable_existing_loggers, get_dist_logger
from colossalai.nn.lr_scheduler import LinearWarmupLR
from colossalai.trainer import Trainer, hooks

SYNTHETIC_STEPS = 16  # in an epoch


def parse_args() -> argparse.Namespace:
    parser = colossalai.get_default_parser()
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--from_torch", action="store_true", help="started by torchrun or colossalai run; otherwise by srun"
    )
    parser.add_argument(
        "-s", "--use_dummy_dataset", action="store_true", help="random tokens, not the text in DATA"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="shrink model and batch, so that the plan runs on CPU processes"
    )
    parser.add_argument("--max_steps", type=positive, help="stop after this many steps")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="do not train: run a step of each of --world_size ranks (default: as few as the plan needs)"
        " on the meta device, and print the memory that each needs",
    )
    parser.add_argument(
        "--memory", type=float, help="memory of a GPU in GiB: a dry run that needs more ends with an error"
    )
    parser.add_argument(
        "--report", type=Path, help="write the peak of each rank's GPU memory, in bytes, to this JSON file"
    )
    args = parser.parse_args()
    if args.config is None:
        parser.error("--config is needed, such as --config=gpt2_configs/gpt2_vanilla.py")
    if not (args.dry_run or args.use_dummy_dataset or os.environ.get("DATA")):
        parser.error(
            "set the environment variable DATA to a file or folder with text, or pass -s for random tokens"
        )
    return args


class PeakMemory(hooks.BaseHook):
    """The most bytes of tensors that were on this rank's GPU at one time."""

    def __init__(self) -> None:
        super().__init__(priority=0)  # before other hooks, which may reset the statistics
        self.bytes = 0

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        if torch.cuda.is_available():
            self.bytes = max(self.bytes, torch.cuda.max_memory_allocated())

    def write(self, path: Path) -> None:
        """Every rank calls this; the first one writes the numbers of all."""
        peaks = [0] * dist.get_world_size()
        dist.all_gather_object(peaks, self.bytes)
        if dist.get_rank() == 0:
            path.write_text(json.dumps(peaks))


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is needed, got {text}")
    return int(text)


def launch(args: argparse.Namespace, config: Config) -> None:
    if args.from_torch:
        colossalai.launch_from_torch(config, args.backend, seed=42)
    else:
        colossalai.launch_from_slurm(config, args.host, args.port or 29500, args.backend, seed=42)


def train(args: argparse.Namespace) -> None:
    logger = get_dist_logger()
    config = gpc.config
    fit_to_plan(config)
    logger.info("Build data loader", ranks=[0])
    data = None if args.use_dummy_dataset else os.environ["DATA"]
    train_dataloader = build_dataloader(config, data, SYNTHETIC_STEPS)
    logger.info("Build model", ranks=[0])
    model, criterion = build_model(config), build_criterion(config)
    tflop = tflop_per_step(model, config)
    logger.info("Build optimizer", ranks=[0])
    optimizer = build_optimizer(config, model.parameters())
    warmup = min(5, config.NUM_EPOCHS // 10)
    lr_scheduler = LinearWarmupLR(optimizer, total_steps=config.NUM_EPOCHS, warmup_steps=warmup)
    engine, train_dataloader, _, lr_scheduler = colossalai.initialize(
        model, optimizer, criterion, train_dataloader, lr_scheduler=lr_scheduler
    )
    batch = config.BATCH_SIZE * gpc.data_parallel_size
    logger.info(f"Init done, global batch size = {batch}", ranks=[0])
    peak = PeakMemory()
    Trainer(engine, logger=logger).fit(
        train_dataloader,
        epochs=config.NUM_EPOCHS,
        max_steps=args.max_steps,
        hooks=[
            hooks.LossHook(),
            hooks.LRSchedulerHook(lr_scheduler, by_epoch=True),
            hooks.LogMetricByEpochHook(logger),
            hooks.ThroughputHook(ignored_steps=10, tflop_per_step=tflop),
            hooks.LogMetricByStepHook(),
            hooks.LogMemoryByEpochHook(logger),
            peak,
        ],
        display_progress=True,
        return_output_label=False,  # the logits of a batch would stay in memory until its end
    )
    if args.report is not None:
        peak.write(args.report)


def main() -> None:
    args = parse_args()
    disable_existing_loggers()
    config = Config.from_file(args.config)
    check_config(config)
    if args.tiny:
        config = shrink(config)
    if args.dry_run:
        sys.exit(dry_run_gpt.main(config, args))
    launch(args, config)
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
