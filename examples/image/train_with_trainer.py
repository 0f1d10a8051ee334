"""Train an image model with a trainer: the loop is the trainer's, hooks do what happens beside it.

colossalai run --nproc_per_node 2 examples/image/train_with_trainer.py --config
examples/image/resnet/config_cpu.py
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from parts import build_parser, build_parts

import colossalai
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.nn.metric import Accuracy
from colossalai.trainer import Trainer, hooks


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("-c", "--checkpoint", type=Path, help="save one after each epoch in this folder")
    args = parser.parse_args()
    colossalai.launch_from_torch(config=args.config)
    logger = get_dist_logger()
    engine, train_dataloader, test_dataloader, lr_scheduler = colossalai.initialize(
        *build_parts(gpc.config, args.data)
    )
    hook_list: list[hooks.BaseHook] = [
        hooks.LossHook(),
        hooks.AccuracyHook(accuracy_func=Accuracy()),
        hooks.LRSchedulerHook(lr_scheduler=lr_scheduler, by_epoch=True),
        hooks.ThroughputHook(ignored_steps=2),
        hooks.LogMetricByStepHook(),
        hooks.LogMetricByEpochHook(logger),
        hooks.LogMemoryByEpochHook(logger),
    ]
    if args.checkpoint is not None:
        hook_list.append(hooks.SaveCheckpointHook(interval=1, checkpoint_dir=args.checkpoint))
    trainer = Trainer(engine=engine, logger=logger)
    trainer.fit(
        train_dataloader=train_dataloader,
        epochs=gpc.config.NUM_EPOCHS,
        test_dataloader=test_dataloader,
        test_interval=1,
        hooks=hook_list,
        display_progress=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
