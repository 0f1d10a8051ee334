"""Train an image model with an engine: the loop is yours, the config says which features it has.

colossalai run --nproc_per_node 2 examples/image/train_with_engine.py --config examples/image/resnet/config_cpu.py
"""

from __future__ import annotations

import torch.distributed as dist
from parts import batches, build_parser, build_parts, evaluate, mean

import colossalai
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger


def main() -> None:
    args = build_parser(__doc__).parse_args()
    colossalai.launch_from_torch(config=args.config)
    logger = get_dist_logger()
    # fp16, gradient_accumulation, clip_grad_norm: whatever the config asks for is in the engine
    engine, train_dataloader, test_dataloader, lr_scheduler = colossalai.initialize(
        *build_parts(gpc.config, args.data)
    )
    for epoch in range(gpc.config.NUM_EPOCHS):
        train_dataloader.sampler.set_epoch(epoch)
        engine.train()
        losses = []
        for images, labels in batches(train_dataloader, f"epoch {epoch}"):
            engine.zero_grad()
            output = engine(images)
            loss = engine.criterion(output, labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        lr_scheduler.step()

        train_loss = mean(losses)
        test_loss, accuracy = evaluate(engine.model, engine.criterion, test_dataloader)
        logger.info(
            f"Epoch {epoch} - train loss: {train_loss:.5}, test loss: {test_loss:.5}, acc: {accuracy:.5},"
            f" lr: {lr_scheduler.get_last_lr()[0]:.5g}",
            ranks=[0],
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
