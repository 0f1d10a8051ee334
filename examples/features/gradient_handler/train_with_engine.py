"""A gradient handler of your own, in the place of DDP.

    colossalai run --nproc_per_node 2 examples/features/gradient_handler/train_with_engine.py

It averages the gradients over the processes as ``DataParallelGradientHandler`` does, and notes their norm on
each process before and after.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm, parameters_to_vector

import colossalai
from colossalai.cluster import DistCoordinator
from colossalai.core import global_context as gpc
from colossalai.engine.gradient_handler import DataParallelGradientHandler
from colossalai.registry import GRADIENT_HANDLER
from colossalai.utils import get_current_device
from titans.dataloader.cifar10 import build_cifar
from titans.model.resnet import resnet18
from titans.utils.scripts import image_parser


@GRADIENT_HANDLER.register_module
class WatchedHandler(DataParallelGradientHandler):
    """``handle_gradient`` is called by every ``engine.step``, on every process."""

    def handle_gradient(self) -> None:
        self.before = self.norm()
        super().handle_gradient()
        self.after = self.norm()

    def norm(self) -> Tensor:
        return get_total_norm([p.grad for p in self._model.parameters() if p.grad is not None])


def everywhere(value: Tensor) -> list[float]:
    """The values of all processes."""
    gathered = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, value)
    return [round(x.item(), 4) for x in gathered]


def main() -> None:
    args = image_parser(__doc__, Path(__file__).with_name("config.py")).parse_args()
    colossalai.launch_from_torch(config=args.config, verbose=False)

    model = resnet18(num_classes=10)
    train_dataloader, _ = build_cifar(gpc.config.BATCH_SIZE, args.data, padding=4, crop=32, resize=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    engine, train_dataloader, _, _ = colossalai.initialize(
        model, optimizer, torch.nn.CrossEntropyLoss(), train_dataloader, verbose=False
    )
    (handler,) = engine.gradient_handlers
    assert isinstance(handler, WatchedHandler)

    engine.train()
    for idx, (img, label) in enumerate(islice(train_dataloader, 4)):
        engine.zero_grad()
        output = engine(img.to(get_current_device()))
        loss = engine.criterion(output, label.to(get_current_device()))
        engine.backward(loss)
        engine.step()
        weights = everywhere(parameters_to_vector(engine.model.parameters()).detach().norm())
        before, after = everywhere(handler.before), everywhere(handler.after)
        DistCoordinator().print_on_master(
            f"iteration {idx}, gradient norm by rank: {before}, after the handler: {after}, norm of the"
            f" weights: {weights}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
