"""BERT on sequences that are cut over ranks, beside data and pipeline parallelism, as the config says.

colossalai run --nproc_per_node 4 train.py -s
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import colossalai
from colossalai.context import Config
from colossalai.core import global_context as gpc
from colossalai.engine import Engine
from colossalai.logging import get_dist_logger
from colossalai.nn import CrossEntropyLoss
from colossalai.utils import get_current_device
from titans.dataloader.bert import get_bert_pretrain_data_loader
from titans.model.bert import BERT
from titans.model.pipeline_bert import build_bert_pipeline
from titans.utils.scripts import script_parser


def parse_arguments() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("-s", "--synthetic", action="store_true", help="random tokens instead of --data")
    parser.add_argument("--data", type=Path, help="a text file or a folder of them")
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("config.py"))
    args = parser.parse_args()
    if args.synthetic == (args.data is not None):
        parser.error("say what to train on: -s for random tokens, or --data PATH for text")
    return args


def build_data(config: Config, path: Path | None) -> tuple[DataLoader, DataLoader]:
    rows = config.GLOBAL_BATCH_SIZE // gpc.data_parallel_size
    sizes = (path, rows, config.SEQ_LENGTH, config.VOCAB_SIZE)
    return get_bert_pretrain_data_loader(*sizes), get_bert_pretrain_data_loader(*sizes, seed=1)


def bert_sizes(config: Config) -> dict[str, Any]:
    return {
        "vocab_size": config.VOCAB_SIZE,
        "max_position_embeddings": config.SEQ_LENGTH,
        "hidden_size": config.HIDDEN_SIZE,
        "num_heads": config.NUM_ATTENTION_HEADS,
    }


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Biases and layer norms are vectors, and do not decay."""
    kept = [p for p in model.parameters() if p.dim() == 1]
    decayed = [p for p in model.parameters() if p.dim() > 1]
    get_dist_logger().info(
        f"without weight decay param: {len(kept)}, with weight decay param: {len(decayed)}", ranks=[0]
    )
    groups = [{"params": decayed, "weight_decay": config.WEIGHT_DECAY}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.LR)


def build_schedule(optimizer: torch.optim.Optimizer, config: Config) -> LambdaLR:
    """Up from 0 while it warms up, then down in a straight line to ``MIN_LR``, which it keeps."""
    warmup, least = int(config.DECAY_ITERS * config.WARMUP_FRACTION), config.MIN_LR / config.LR

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return max(least, 1 - (1 - least) * (step - warmup) / max(1, config.DECAY_ITERS - warmup))

    get_dist_logger().info(
        f"LR Scheduler is built with {warmup} warmup steps and {config.DECAY_ITERS} decay steps", ranks=[0]
    )
    return LambdaLR(optimizer, factor)


def run(engine: Engine, batches: Iterator[Any], steps: int, schedule: LambdaLR | None = None) -> float:
    """The mean loss of some steps, on every rank; they train if there is a schedule."""
    losses = torch.zeros(2, device=get_current_device())  # their sum and their number
    for _ in range(steps):
        if schedule is not None:
            engine.zero_grad()
        _, _, loss = engine.execute_schedule(
            batches, forward_only=schedule is None, return_output_label=False
        )
        if schedule is not None:
            engine.step()
            schedule.step()
        if loss is not None:  # only on the last stage of a pipeline
            losses += torch.stack([loss.detach().float(), torch.ones_like(loss, dtype=torch.float)])
    dist.all_reduce(losses)
    return (losses[0] / losses[1]).item()


def main() -> None:
    args = parse_arguments()
    settings = Config.from_file(args.config)
    colossalai.launch_from_torch(config=settings, seed=settings.SEED, verbose=False)
    logger, config = get_dist_logger(), gpc.config

    train_data, eval_data = build_data(config, args.data)
    logger.info("Dataloaders are built", ranks=[0])

    sizes = bert_sizes(config)
    model = build_bert_pipeline(config.DEPTH, **sizes)
    logger.info("Model is built with softmax in fp32 = True", ranks=[0])
    with torch.device("meta"):  # of all stages
        count = sum(p.numel() for p in BERT(depth=config.DEPTH, **sizes).parameters())
    logger.info(f"This model has {count} parameters", ranks=[0])
    criterion = CrossEntropyLoss()
    logger.info("Criterion is built", ranks=[0])
    optimizer = build_optimizer(model, config)
    logger.info("Optimizer is built", ranks=[0])
    schedule = build_schedule(optimizer, config)
    engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)

    logger.info("start training", ranks=[0])
    train_batches, eval_batches = itertools.cycle(train_data), itertools.cycle(eval_data)
    for step in range(config.EVAL_INTERVAL, config.TRAIN_ITERS + 1, config.EVAL_INTERVAL):
        engine.train()
        start = time.perf_counter()
        train_loss = run(engine, train_batches, config.EVAL_INTERVAL, schedule)
        milliseconds = 1000 * (time.perf_counter() - start) / config.EVAL_INTERVAL
        engine.eval()
        with torch.no_grad():
            eval_loss = run(engine, eval_batches, config.EVAL_ITERS)
        logger.info(
            f"Step {step} / {config.TRAIN_ITERS} | Train Loss: {train_loss:.5f} | Eval Loss: {eval_loss:.5f} "
            f"| Loss Scale: {engine.optimizer.loss_scale}| Learning rate: {schedule.get_last_lr()[0]:.5g} "
            f"| train-iterations: {milliseconds:.2f}ms",
            ranks=[0],
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
