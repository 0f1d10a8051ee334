"""Fine-tune OPT, or any causal language model of transformers, under ZeRO-3 with Gemini.

    torchrun --standalone --nproc_per_node=2 run_clm.py -s --model_name_or_path facebook/opt-125m
    torchrun --standalone --nproc_per_node=2 run_clm.py --model_name_or_path FOLDER \\
        --train_file text.txt --output_dir tuned

The model is built on the meta device; its weights are drawn, or read, straight into the chunks of Gemini.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from arguments import parse_args
from checkpoints import Checkpoints
from data import build_datasets, build_loaders, read_texts, tokenizer_of
from models import build, config_of, opt_config
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import get_scheduler

import colossalai
from colossalai.checkpoint_io import read_pretrained
from colossalai.context import Config
from colossalai.core import global_context as gpc
from colossalai.engine import Engine
from colossalai.logging import disable_existing_loggers, get_dist_logger
from colossalai.nn.optimizer import HybridAdam
from colossalai.utils import colo_set_process_memory_fraction, get_current_device

HERE = Path(__file__).parent
GB = 1024**3


def settings(args: argparse.Namespace) -> Config:
    """colossalai_zero.py with what the options say."""
    config = Config.from_file(HERE / "colossalai_zero.py")
    model = config.zero.model_config
    model.seed = args.seed
    if args.mem_cap > 0 and not torch.cuda.is_available():
        model.compute_capacity = int(args.mem_cap * GB)
    if args.gradient_accumulation_steps > 1:
        config.gradient_accumulation = args.gradient_accumulation_steps
    return config


def cap_memory(gigabytes: float) -> None:
    if gigabytes > 0 and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(get_current_device()).total_memory
        colo_set_process_memory_fraction(min(1.0, gigabytes * GB / total))


def log(message: str) -> None:
    get_dist_logger().info(message, ranks=[0])


def main() -> None:
    args = parse_args()
    disable_existing_loggers()
    colossalai.launch_from_torch(settings(args), seed=args.seed)
    cap_memory(args.mem_cap)
    log("Start preparing dataset")
    texts = read_texts(args)
    log("Dataset is prepared")
    finetune = args.config_name is None and not args.synthetic
    name = args.config_name or args.model_name_or_path
    config = config_of(name, args.synthetic) if args.config_name is None else scratch_config(name)
    log("Model config has been created")
    tokenizer = tokenizer_of(args)
    log(f"{type(tokenizer).__name__} has been created")
    datasets = build_datasets(args, config, texts, tokenizer)
    loaders = build_loaders(args, datasets)
    log("Finetune a pre-trained model" if finetune else "Train a new model from scratch")
    log(f"using Colossal-AI version {colossalai.__version__}")
    engine, train_loader, eval_loader, scheduler = prepare(args, build(config, args.init_in_cpu), loaders)
    if finetune:
        load(engine.model, Path(args.model_name_or_path))
    log("Dataloaders have been created")
    checkpoints = Checkpoints(args, engine)
    train(args, engine, train_loader, eval_loader, scheduler, checkpoints)
    if args.output_dir is not None and not args.synthetic:
        checkpoints.save_model(config, tokenizer)
    log("Training finished")
    dist.destroy_process_group()


def scratch_config(name: str) -> Any:
    return config_of(name, True) if Path(name).is_dir() else opt_config(name)


def prepare(args: argparse.Namespace, model: nn.Module, loaders: list[DataLoader]) -> Any:
    """The engine, both loaders and the scheduler."""
    frozen = ("bias", "layer_norm.weight")
    named = list(model.named_parameters())
    groups = [
        {
            "params": [p for n, p in named if not n.endswith(frozen)],
            "weight_decay": args.weight_decay,
        },
        {"params": [p for n, p in named if n.endswith(frozen)], "weight_decay": 0.0},
    ]
    optimizer = HybridAdam(groups, lr=args.learning_rate)
    steps = total_steps(args, len(loaders[0]))
    scheduler = get_scheduler(args.lr_scheduler_type, optimizer, args.num_warmup_steps, steps)
    return colossalai.initialize(model, optimizer, None, *loaders, lr_scheduler=scheduler, verbose=False)


def total_steps(args: argparse.Namespace, batches: int) -> int:
    """Updates in the whole training."""
    in_epoch = math.ceil(batches / args.gradient_accumulation_steps)
    return min(args.max_train_steps or math.inf, args.num_train_epochs * in_epoch)  # type: ignore[return-value]


def load(model: Any, folder: Path) -> None:
    """The weights of a checkpoint, one tensor at a time."""
    for name, value in read_pretrained(model.unwrap(), folder):
        model.load_state_dict({name: value}, strict=False)


def announce(args: argparse.Namespace, train_loader: Any, steps: int) -> None:
    ranks, accumulate = gpc.data_parallel_size, args.gradient_accumulation_steps
    batch = args.per_device_train_batch_size
    log("***** Running training *****")
    log(f"  Num examples = {len(getattr(train_loader, 'dataloader', train_loader).dataset)}")
    log(f"  Num Epochs = {args.num_train_epochs}")
    log(f"  Instantaneous batch size per device = {batch}")
    log(f"  Total train batch size (w. parallel, distributed & accumulation) = {batch * ranks * accumulate}")
    log(f"  Gradient Accumulation steps = {accumulate}")
    log(f"  Total optimization steps = {steps}")


def train(
    args: argparse.Namespace,
    engine: Engine,
    train_loader: Any,
    eval_loader: Any,
    scheduler: Any,
    checkpoints: Checkpoints,
) -> None:
    accumulate = args.gradient_accumulation_steps
    steps = total_steps(args, len(train_loader))
    announce(args, train_loader, steps)
    done = checkpoints.resume()
    in_epoch = math.ceil(len(train_loader) / accumulate)
    first_epoch, behind = done // in_epoch, done % in_epoch * accumulate
    bar = tqdm(total=steps, initial=done, disable=dist.get_rank() != 0)
    for epoch in range(first_epoch, args.num_train_epochs):
        sampler = getattr(train_loader, "dataloader", train_loader).sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        engine.train()
        # of an epoch that is resumed, the loader gives the batches that were not used yet
        for index, batch in enumerate(train_loader, start=behind):
            if done >= steps:
                break
            step(engine, scheduler, batch)
            if (index + 1) % accumulate == 0 or index + 1 == len(train_loader):
                done += 1
                bar.update()
                log(f"Global step {done} finished")
                checkpoints.after_step(done)
        behind = 0
        loss = evaluate(engine, eval_loader)
        perplexity = math.exp(loss) if loss < 700 else math.inf
        log(f"Epoch {epoch}: perplexity: {perplexity} eval_loss: {loss}")
        checkpoints.after_epoch(epoch, done)
        if done >= steps:
            break
    bar.close()


def step(engine: Engine, scheduler: Any, batch: dict[str, torch.Tensor]) -> None:
    engine.zero_grad()
    loss = engine(**{name: tensor.to(get_current_device()) for name, tensor in batch.items()})["loss"]
    engine.backward(loss)
    engine.step()
    scheduler.step()


@torch.no_grad()
def evaluate(engine: Engine, loader: Any) -> float:
    """The mean loss over all ranks."""
    engine.eval()
    total = torch.zeros(2, dtype=torch.float64, device=get_current_device())
    for batch in loader:
        output = engine(**{name: tensor.to(get_current_device()) for name, tensor in batch.items()})
        count = len(batch["input_ids"])
        total += torch.tensor([float(output["loss"]) * count, count], device=total.device)
    dist.all_reduce(total)
    return float(total[0] / total[1])


if __name__ == "__main__":
    main()
