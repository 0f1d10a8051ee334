"""Train an image model with an engine: the loop is yours, the config says which features it has.

colossalai run --nproc_per_node 2 examples/image/train_with_engine.py --config
examples/image/resnet/config_cpu.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from parts import build_parser, build_parts, mean
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

import colossalai
from colossalai.core import global_context as gpc
from colossalai.engine import Engine
from colossalai.logging import get_dist_logger
from colossalai.nn.metric import Accuracy
from colossalai.utils import get_current_device


def passes(engine: Engine, loader: DataLoader, what: str, test: bool = False) -> Iterator[tuple]:
    """Output, labels and loss of each batch, of which only the last stage of a pipeline knows."""
    data = iter(loader)
    for _ in tqdm(range(len(loader)), desc=what, leave=False, disable=dist.get_rank() != 0):
        # forward and, in training, backward: in micro-batches if the config has a pipeline
        yield engine.execute_schedule(data, forward_only=test)


def train(engine: Engine, loader: DataLoader, epoch: int) -> float:
    """The mean loss."""
    loader.sampler.set_epoch(epoch)
    engine.train()
    losses: list[Tensor] = []
    engine.zero_grad()
    for _, _, loss in passes(engine, loader, f"epoch {epoch}"):
        engine.step()
        engine.zero_grad()
        if loss is not None:
            losses.append(loss)
    return mean(losses)


def evaluate(engine: Engine, loader: DataLoader) -> tuple[float, float]:
    """Mean loss and accuracy over the test images of all processes."""
    engine.eval()
    accuracy = Accuracy()
    sums = torch.zeros(3, device=get_current_device())  # losses, right, all
    for output, labels, loss in passes(engine, loader, "test", test=True):
        if loss is not None:
            count = labels.new_tensor(len(labels))
            sums += torch.stack([loss * count, accuracy(output, labels), count])
    dist.all_reduce(sums)
    losses, right, count = sums.tolist()
    return losses / count, right / count


def main() -> None:
    args = build_parser(__doc__).parse_args()
    colossalai.launch_from_torch(config=args.config)
    logger = get_dist_logger()
    # parallel, fp16, gradient_accumulation, clip_grad_norm: whatever the config asks for is in the engine
    engine, train_dataloader, test_dataloader, lr_scheduler = colossalai.initialize(
        *build_parts(gpc.config, args.data)
    )
    for epoch in range(gpc.config.NUM_EPOCHS):
        train_loss = train(engine, train_dataloader, epoch)
        lr_scheduler.step()
        test_loss, accuracy = evaluate(engine, test_dataloader)
        logger.info(
            f"Epoch {epoch} - train loss: {train_loss:.5}, test loss: {test_loss:.5}, acc: {accuracy:.5},"
            f" lr: {lr_scheduler.get_last_lr()[0]:.5g}",
            ranks=[0],
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
