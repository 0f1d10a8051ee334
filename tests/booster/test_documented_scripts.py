"""The training scripts of the pages on Booster (14), gradient accumulation (34) and gradient clipping (36).

As written there, but for a small model and random images in the place of torchvision, and ``.cuda()`` only where there
is CUDA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.cluster.dist_coordinator import priority_execution
from colossalai.logging import get_dist_logger
from colossalai.nn.lr_scheduler import CosineAnnealingLR
from colossalai.testing import spawn
from tests.booster.plans import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def resnet(num_classes: int = 10) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(64, num_classes),
    )


def cifar10(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(samples, 3, 32, 32, generator=generator)
    return TensorDataset(images, torch.randint(10, (samples,), generator=generator))


def _page_14(rank: int, world_size: int, port: int, folder: Path, use_safetensors: bool) -> None:
    launch(rank, world_size, port)
    plugin = TorchDDPPlugin()
    booster = Booster(plugin=plugin)
    model: Any = resnet()
    criterion: Any = lambda x: x.mean()  # noqa: E731
    optimizer: Any = SGD((model.parameters()), lr=0.001)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    model, optimizer, criterion, _, scheduler = booster.boost(
        model, optimizer, criterion, lr_scheduler=scheduler
    )

    x = torch.randn(4, 3, 224, 224)
    x = x.to(DEVICE)
    output = model(x)
    loss = criterion(output)
    booster.backward(loss, optimizer)
    optimizer.clip_grad_by_norm(1.0)
    optimizer.step()
    scheduler.step()

    save_path = folder / "model"
    booster.save_model(model, save_path, True, True, "", 10, use_safetensors=use_safetensors)

    new_model = resnet()
    booster.load_model(new_model, save_path)

    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0001)
    for name, value in model.state_dict().items():
        if rank == 0 or "running" not in name:  # rank 0's statistics are saved
            torch.testing.assert_close(new_model.state_dict()[name], value.cpu())


@pytest.mark.parametrize("use_safetensors", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_booster_api(world_size: int, use_safetensors: bool, tmp_path: Path) -> None:
    spawn(_page_14, world_size, folder=tmp_path, use_safetensors=use_safetensors)


def _page_34(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    BATCH_SIZE = 8
    GRADIENT_ACCUMULATION = 4
    model: Any = resnet(num_classes=10)
    with priority_execution():
        train_dataset = cifar10(BATCH_SIZE * GRADIENT_ACCUMULATION * world_size)
    criterion: Any = torch.nn.CrossEntropyLoss()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    plugin = TorchDDPPlugin()
    booster = Booster(plugin=plugin)
    train_dataloader: Any = plugin.prepare_dataloader(
        train_dataset, batch_size=BATCH_SIZE, shuffle=True, drop_last=True
    )
    model, optimizer, criterion, train_dataloader, _ = booster.boost(
        model=model, optimizer=optimizer, criterion=criterion, dataloader=train_dataloader
    )

    param_by_iter = []
    optimizer.zero_grad()
    for idx, (img, label) in enumerate(train_dataloader):
        sync_context = booster.no_sync(model)
        img = img.to(DEVICE)
        label = label.to(DEVICE)
        if idx % (GRADIENT_ACCUMULATION - 1) != 0:
            with sync_context:
                output = model(img)
                train_loss = criterion(output, label)
                booster.backward(train_loss, optimizer)
        else:
            output = model(img)
            train_loss = criterion(output, label)
            booster.backward(train_loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()

        ele_1st = next(model.parameters()).flatten()[0]
        param_by_iter.append(str(ele_1st.item()))

        if idx != 0 and idx % (GRADIENT_ACCUMULATION - 1) == 0:
            break

    assert len(param_by_iter) == 4
    assert param_by_iter[0] == param_by_iter[1] == param_by_iter[2]
    assert param_by_iter[3] != param_by_iter[0]  # the parameter is only updated in the last iteration


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradient_accumulation(world_size: int) -> None:
    spawn(_page_34, world_size)


def _page_36(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    logger = get_dist_logger()
    NUM_EPOCHS = 200
    BATCH_SIZE = 8
    GRADIENT_CLIPPING = 0.1
    torch.manual_seed(0)
    model: Any = resnet(num_classes=10)
    train_dataset = cifar10(BATCH_SIZE * 5 * world_size)
    criterion: Any = torch.nn.CrossEntropyLoss()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    lr_scheduler: Any = CosineAnnealingLR(optimizer, total_steps=NUM_EPOCHS)
    plugin = TorchDDPPlugin()
    booster = Booster(mixed_precision="fp16", plugin=plugin)
    train_dataloader: Any = plugin.prepare_dataloader(
        train_dataset, batch_size=BATCH_SIZE, shuffle=True, drop_last=True
    )
    model, optimizer, criterion, train_dataloader, lr_scheduler = booster.boost(
        model, optimizer, criterion, train_dataloader, lr_scheduler
    )

    seen = []
    model.train()
    for idx, (img, label) in enumerate(train_dataloader):
        img = img.to(DEVICE)
        label = label.to(DEVICE)

        model.zero_grad()
        output = model(img)
        train_loss = criterion(output, label)
        booster.backward(train_loss, optimizer)
        optimizer.clip_grad_by_norm(max_norm=GRADIENT_CLIPPING)
        norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert norm.item() == pytest.approx(GRADIENT_CLIPPING, rel=1e-3)
        optimizer.step()
        lr_scheduler.step()

        ele_1st = next(model.parameters()).flatten()[0]
        logger.info(f"iteration {idx}, loss: {train_loss}, 1st element of parameters: {ele_1st.item()}")
        seen.append(ele_1st.item())

        # only run for 4 iterations
        if idx == 3:
            break

    assert len(set(seen)) == 4
    assert 0.09 < optimizer.param_groups[0]["lr"] < 0.1


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradient_clipping(world_size: int) -> None:
    spawn(_page_36, world_size)
