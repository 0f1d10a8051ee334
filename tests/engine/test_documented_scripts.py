"""The Python of the documents' pages 05, 21, 22, 24, 33, 35, 37 and 47, run as it stands there.

Indentation is repaired.  ``torchvision`` is a stand-in with a small network and random images, ``.cuda()`` does nothing
where there is no CUDA, and the numbers of epochs and samples are small.
"""

from __future__ import annotations

import itertools
import os
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import colossalai
from colossalai.booster.plugin.ddp import TorchDDPModel
from colossalai.testing import assert_equal_in_group, spawn
from tests.engine.plans import logged, on_device

# ---- page 21, steps 1 to 6 ----

CONFIG = """
from colossalai.amp import AMP_TYPE

BATCH_SIZE = 8
NUM_EPOCHS = 2

fp16=dict(
    mode=AMP_TYPE.TORCH
)
"""

LAUNCH = """
import colossalai

# ./config.py refers to the config file we just created in step 1
colossalai.launch_from_torch(config='./config.py')
"""

COMPONENTS = """
from pathlib import Path
from colossalai.logging import get_dist_logger
import torch
import os
from colossalai.core import global_context as gpc
from colossalai.utils import get_dataloader
from torchvision import transforms
from colossalai.nn.lr_scheduler import CosineAnnealingLR
from torchvision.datasets import CIFAR10
from torchvision.models import resnet34

# build logger
logger = get_dist_logger()

# build resnet
model = resnet34(num_classes=10)

# build datasets
train_dataset = CIFAR10(
    root='./data',
    download=True,
    transform=transforms.Compose(
        [
            transforms.RandomCrop(size=32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(mean=[0.4914, 0.4822, 0.4465], std=[
                0.2023, 0.1994, 0.2010]),
        ]
    )
)

test_dataset = CIFAR10(
    root='./data',
    train=False,
    transform=transforms.Compose(
        [
            transforms.ToTensor(),
            transforms.Normalize(mean=[0.4914, 0.4822, 0.4465], std=[
                0.2023, 0.1994, 0.2010]),
        ]
    )
)

# build dataloaders
train_dataloader = get_dataloader(dataset=train_dataset,
                                  shuffle=True,
                                  batch_size=gpc.config.BATCH_SIZE,
                                  num_workers=1,
                                  pin_memory=True,
                                  )

test_dataloader = get_dataloader(dataset=test_dataset,
                                 add_sampler=False,
                                 batch_size=gpc.config.BATCH_SIZE,
                                 num_workers=1,
                                 pin_memory=True,
                                 )

# build criterion
criterion = torch.nn.CrossEntropyLoss()

# optimizer
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)

# lr_scheduler
lr_scheduler = CosineAnnealingLR(optimizer, total_steps=gpc.config.NUM_EPOCHS)
"""

INITIALIZE = """
engine, train_dataloader, test_dataloader, _ = colossalai.initialize(model,
                                                                     optimizer,
                                                                     criterion,
                                                                     train_dataloader,
                                                                     test_dataloader,
                                                                     )
"""

WITH_ENGINE = """
for epoch in range(gpc.config.NUM_EPOCHS):
    # execute a training iteration
    engine.train()
    for img, label in train_dataloader:
        img = img.cuda()
        label = label.cuda()

        # set gradients to zero
        engine.zero_grad()

        # run forward pass
        output = engine(img)

        # compute loss value and run backward pass
        train_loss = engine.criterion(output, label)
        engine.backward(train_loss)

        # update parameters
        engine.step()

    # update learning rate
    lr_scheduler.step()

    # execute a testing iteration
    engine.eval()
    correct = 0
    total = 0
    for img, label in test_dataloader:
        img = img.cuda()
        label = label.cuda()

        # run prediction without back-propagation
        with torch.no_grad():
            output = engine(img)
            test_loss = engine.criterion(output, label)

        # compute the number of correct prediction
        pred = torch.argmax(output, dim=-1)
        correct += torch.sum(pred == label)
        total += img.size(0)

    logger.info(
        f"Epoch {epoch} - train loss: {train_loss:.5}, test loss: {test_loss:.5}, acc: {correct / total:.5}, lr: {lr_scheduler.get_last_lr()[0]:.5g}", ranks=[0])
"""

OWN_HOOK = """
from colossalai.logging import get_dist_logger
from colossalai.trainer import hooks

class LogMessageHook(hooks.BaseHook):

    def __init__(self, priority=10):
        self._logger = get_dist_logger()

    def before_train(self, trainer):
        self._logger.info('training starts')

    def after_train(self, trainer):
        self._logger.info('training finished')
"""

WITH_TRAINER = """
from colossalai.nn.metric import Accuracy
from colossalai.trainer import Trainer, hooks

# create a trainer object
trainer = Trainer(
    engine=engine,
    logger=logger
)

# define the hooks to attach to the trainer
hook_list = [
    hooks.LossHook(),
    hooks.LRSchedulerHook(lr_scheduler=lr_scheduler, by_epoch=True),
    hooks.AccuracyHook(accuracy_func=Accuracy()),
    hooks.LogMetricByEpochHook(logger),
    hooks.LogMemoryByEpochHook(logger)
]

# then in your training script
hook_list.append(LogMessageHook())

# start training
# run testing every 1 epoch
trainer.fit(
    train_dataloader=train_dataloader,
    epochs=gpc.config.NUM_EPOCHS,
    test_dataloader=test_dataloader,
    test_interval=1,
    hooks=hook_list,
    display_progress=True
)
"""

# ---- page 22 ----

PSEUDO_CODE = """
import colossalai
import torch

# launch distributed environment
colossalai.launch(config='./config.py', rank=RANK, world_size=WORLD_SIZE, host='127.0.0.1', port=PORT)

# create your objects
model = MyModel()
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
criterion = torch.nn.CrossEntropyLoss()
train_dataloader = MyTrainDataloader()
test_dataloader = MyTrainDataloader()

# initialize features
engine, train_dataloader, test_dataloader, _ = colossalai.initialize(model,
                                                                     optimizer,
                                                                     criterion,
                                                                     train_dataloader,
                                                                     test_dataloader)
"""

# ---- page 21, the iteration at its beginning ----

ITERATION = """
for img, label in train_dataloader:
    engine.zero_grad()
    output = engine(img)
    loss = engine.criterion(output, label)
    engine.backward(loss)
    engine.step()
"""

# ---- pages 37 and 05 ----

HANDLER = """
from colossalai.registry import GRADIENT_HANDLER
from colossalai.engine.gradient_handler import BaseGradientHandler

@GRADIENT_HANDLER.register_module
class MyGradientHandler(BaseGradientHandler):

    def handle_gradient(self):
        do_something()
"""

YOUR_HANDLER = """
from colossalai.registry import GRADIENT_HANDLER
from colossalai.engine import BaseGradientHandler

@GRADIENT_HANDLER.register_module
class YourGradientHandler(BaseGradientHandler):

    def handle_gradient(self):
        do_something()
"""

# ---- page 24 ----

CHECKPOINTS = """
from colossalai.utils import save_checkpoint
# save
save_checkpoint('xxx.pt', epoch, model)

from colossalai.utils import load_checkpoint
# load
load_checkpoint('xxx.pt', model)
"""

# ---- page 47 ----

DATA_PARALLEL = """
from colossalai.amp import AMP_TYPE

# ViT Base
BATCH_SIZE = 256
DROP_RATE = 0.1
NUM_EPOCHS = 300

# mix precision
fp16 = dict(
    mode=AMP_TYPE.TORCH,
)

gradient_accumulation = 16
clip_grad_norm = 1.0

dali = dict(
    gpu_aug=True,
    mixup_alpha=0.2
)
"""


class CIFAR10(Dataset):
    """Random images of the right shape, whose class shows in their brightness."""

    def __init__(self, root: str, train: bool = True, download: bool = False, transform: Any = None) -> None:
        self.transform = transform
        generator = torch.Generator().manual_seed(int(train))
        self.labels = torch.randint(10, (24,), generator=generator)
        self.images = torch.randn(24, 3, 32, 32, generator=generator) + self.labels.view(-1, 1, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.images[index]), self.labels[index]


def _transform(*_: Any, **__: Any) -> Any:
    return lambda image: image


def resnet34(num_classes: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 4, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(256, num_classes))


def prepare(folder: Path, config: str) -> None:
    """Where the scripts run: a folder with their config, a stand-in for torchvision, and CUDA or its absence."""
    os.chdir(folder)
    draft = Path(f"config_{os.getpid()}")
    draft.write_text(config)
    draft.replace("config.py")  # whole at every moment: the other ranks read it, too
    names = ("RandomCrop", "RandomHorizontalFlip", "ToTensor", "Normalize", "Compose")
    parts = {
        "transforms": types.SimpleNamespace(**dict.fromkeys(names, _transform)),
        "datasets": types.SimpleNamespace(CIFAR10=CIFAR10),
        "models": types.SimpleNamespace(resnet34=resnet34),
    }
    sys.modules["torchvision"] = types.SimpleNamespace(**parts)  # type: ignore[assignment]
    sys.modules.update({f"torchvision.{name}": part for name, part in parts.items()})  # type: ignore[misc]
    # two ranks may have to share one GPU, which NCCL does not allow
    colossalai.launch = partial(colossalai.launch, backend="gloo")
    colossalai.launch_from_torch = partial(colossalai.launch_from_torch, backend="gloo")
    if not torch.cuda.is_available():
        Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]


def run(*blocks: str, **names: Any) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "documentation", **names}
    for block in blocks:
        exec(compile(block, "documentation", "exec"), namespace)
    return namespace


def check_page_21(rank: int, world_size: int, port: int, folder: Path, how: str) -> list[str]:
    prepare(folder, CONFIG)
    with logged() as messages:
        blocks = [WITH_ENGINE] if how == "engine" else [OWN_HOOK, WITH_TRAINER]
        names = run(LAUNCH, COMPONENTS, INITIALIZE, *blocks)
    assert type(names["engine"].optimizer).__name__ == "TorchAMPOptimizer"
    assert names["lr_scheduler"].get_last_lr()[0] < 1e-6, "the end of the cosine"
    return messages


def test_page_21_with_engine(tmp_path: Path) -> None:
    messages, _ = spawn(check_page_21, 2, folder=tmp_path, how="engine")
    lines = [m for m in messages if m.startswith("Epoch")]
    assert [line.split(",")[0].split(":")[0] for line in lines] == [
        "Epoch 0 - train loss",
        "Epoch 1 - train loss",
    ]
    assert "acc: " in lines[1]


def test_page_21_with_trainer_and_own_hook(tmp_path: Path) -> None:
    messages, _ = spawn(check_page_21, 2, folder=tmp_path, how="trainer")
    lines = [m for m in messages if m.startswith(("[Epoch", "training"))]
    assert [line.split(":")[0] for line in lines] == [
        "training starts",
        *["[Epoch 0 / Train]"] * 2,
        *["[Epoch 0 / Test]"] * 2,
        *["[Epoch 1 / Train]"] * 2,
        *["[Epoch 1 / Test]"] * 2,
        "training finished",
    ]
    assert lines[1].split(": ")[1].startswith("Loss = ")
    assert " | LR = 0.05" in lines[1]
    assert "Accuracy = " in lines[3]


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def my_data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    batches = [(10 * torch.randn(4, 6, generator=generator), torch.tensor([0, 1, 2, 0])) for _ in range(8)]
    return [tuple(on_device(x, y)) for x, y in batches]  # type: ignore[misc]


def start(
    rank: int, world_size: int, port: int, folder: Path, config: str, *before: str, **names: Any
) -> dict[str, Any]:
    prepare(folder, config)
    names = {"RANK": rank, "WORLD_SIZE": world_size, "PORT": port, "MyTrainDataloader": my_data, **names}
    names.setdefault("MyModel", MyModel)
    return run(*before, PSEUDO_CODE, **names)


def check_page_22(rank: int, world_size: int, port: int, folder: Path) -> None:
    names = start(rank, world_size, port, folder, "")
    before = names["engine"].model.body.weight.clone()
    run(ITERATION, **names)
    assert not torch.equal(names["engine"].model.body.weight, before)
    saved = {name: tensor.clone() for name, tensor in names["model"].state_dict().items()}
    nn.init.zeros_(names["model"].body.weight) if rank == 1 else None
    run(CHECKPOINTS, epoch=3, model=names["model"])  # rank 0 writes
    for name, tensor in names["model"].state_dict().items():
        assert torch.equal(tensor, saved[name])


def test_page_22_and_24(tmp_path: Path) -> None:
    spawn(check_page_22, 2, folder=tmp_path)


PARAM = """
for i, (img, label) in enumerate(train_dataloader):
    engine.zero_grad()
    output = engine(img)
    loss = engine.criterion(output, label)
    engine.backward(loss)
    engine.step()
    seen.append(next(engine.model.parameters()).detach().clone())
    print(f'iteration {i}, first 10 elements of param: {next(engine.model.parameters()).flatten()[:10]}')
"""


def check_page_33(rank: int, world_size: int, port: int, folder: Path) -> None:
    names = start(rank, world_size, port, folder, "gradient_accumulation = 4\n")
    seen = [next(names["model"].parameters()).detach().clone()]
    run(PARAM, seen=seen, **names)
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(seen)]
    assert moved == [False, False, False, True] * 2, "only the 4th iteration updates the parameters"


def test_page_33_gradient_accumulation(tmp_path: Path) -> None:
    spawn(check_page_33, 1, folder=tmp_path)


def check_page_35(rank: int, world_size: int, port: int, folder: Path) -> None:
    names = start(rank, world_size, port, folder, "clip_grad_norm = 1.0\n")
    engine, norms = names["engine"], []
    for img, label in names["train_dataloader"]:
        engine.zero_grad()
        engine.backward(engine.criterion(engine(img), label))
        before = torch.cat([p.grad.flatten() for p in engine.model.parameters()]).norm()
        engine.step()
        after = torch.cat([p.grad.flatten() for p in engine.model.parameters()]).norm()
        norms.append((float(before), float(after)))
    assert all(after <= 1.0 + 1e-5 for _, after in norms)
    assert any(before > 2.0 for before, _ in norms), "there was something to clip"


def test_page_35_gradient_clipping(tmp_path: Path) -> None:
    spawn(check_page_35, 1, folder=tmp_path)


def check_pages_37_and_05(rank: int, world_size: int, port: int, folder: Path, name: str, key: str) -> int:
    calls: list[int] = []
    config = f"{key} = [dict(type='{name}')]\n"
    blocks = {"MyGradientHandler": [HANDLER], "YourGradientHandler": [YOUR_HANDLER]}.get(name, [])
    torch.manual_seed(rank)
    names = start(rank, world_size, port, folder, config, *blocks, do_something=lambda: calls.append(1))
    engine = names["engine"]
    assert not isinstance(engine.model, TorchDDPModel), "DDP is not used when there are handlers"
    names["train_dataloader"] = [
        (x + rank, y) for x, y in names["train_dataloader"]
    ]  # other data on each rank
    run(ITERATION, **names)
    if name == "DataParallelGradientHandler":
        for p in engine.model.parameters():
            assert_equal_in_group(p)
    return len(calls)


def test_page_37_and_05_gradient_handlers(tmp_path: Path) -> None:
    for name, key in (
        ("MyGradientHandler", "gradient_handler"),
        ("YourGradientHandler", "gradient_handlers"),
    ):
        assert spawn(check_pages_37_and_05, 1, folder=tmp_path, name=name, key=key) == [8]
    spawn(
        check_pages_37_and_05, 2, folder=tmp_path, name="DataParallelGradientHandler", key="gradient_handler"
    )


def check_page_47(rank: int, world_size: int, port: int, folder: Path) -> None:
    names = start(rank, world_size, port, folder, DATA_PARALLEL)
    engine = names["engine"]
    before = next(engine.model.parameters()).detach().clone()
    for i, (img, label) in enumerate(names["train_dataloader"]):  # 8 batches: one incomplete group
        engine.zero_grad()
        engine.backward(engine.criterion(engine(img / 10), label))  # small enough for fp16
        engine.step()
        assert torch.equal(next(engine.model.parameters()), before) == (i < 7)
        assert_equal_in_group(next(engine.model.parameters()))


def test_page_47_all_features_at_once(tmp_path: Path) -> None:
    spawn(check_page_47, 2, folder=tmp_path)
