"""How the scripts of the documents run here.

``torchvision`` and ``timm`` are stand-ins (`install`): their data sets are a few random images of the right
shape, their transforms do nothing, ``resnet18`` is that of `titans` and the other models are small, because
half precision is slow on a CPU.  ``.cuda()`` does nothing where there is no CUDA.
"""

from __future__ import annotations

import ast
import os
import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import colossalai
from titans.model.resnet import resnet18
from titans.model.vit import vit_tiny_patch32_224

# How a script starts with the config that `prepare` wrote; the names are those of a rank of `spawn`.
LAUNCH = (
    "'./config.py', ...",
    "'./config.py', rank=rank, world_size=world_size, host='localhost', port=port",
)

# Iterating with ``enumerate`` would give the index for the images.
WITHOUT_INDEX = ("in enumerate(train_dataloader)", "in train_dataloader")


class Images(Dataset):
    """Random images, whose class shows in their brightness."""

    def __init__(
        self, samples: int, size: int, classes: int, transform: Callable[[Tensor], Tensor], seed: int = 0
    ) -> None:
        self.transform = transform
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(classes, (samples,), generator=generator)
        brightness = self.labels.view(-1, 1, 1, 1) / classes
        self.images = torch.randn(samples, 3, size, size, generator=generator) + brightness

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.images[index]), self.labels[index]


def _cifar10(root: str | Path, train: bool = True, download: bool = False, transform: Any = None) -> Dataset:
    return Images(80 if train else 24, 32, 10, transform, seed=int(train))


def _caltech101(root: str | Path, download: bool = False, transform: Any = None) -> Dataset:
    return Images(16, 224, 101, transform)


def _resnet34(num_classes: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 4, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(256, num_classes))


def _vit_base_patch16_224(drop_rate: float) -> nn.Module:
    sizes = {"hidden_size": 32, "num_heads": 2, "depth": 2, "num_classes": 101}
    return vit_tiny_patch32_224(**sizes, dropout=drop_rate)


def as_it_is(*_: Any, **__: Any) -> Callable[[Tensor], Tensor]:
    """The transform, whatever it is called, that does nothing."""
    return lambda image: image


STAND_INS = {
    "torchvision.transforms": {
        "Compose": as_it_is,
        "Normalize": as_it_is,
        "RandomCrop": as_it_is,
        "RandomHorizontalFlip": as_it_is,
        "RandomResizedCrop": as_it_is,
        "Resize": as_it_is,
        "ToTensor": as_it_is,
    },
    "torchvision.datasets": {"CIFAR10": _cifar10, "Caltech101": _caltech101},
    "torchvision.models": {"resnet18": resnet18, "resnet34": _resnet34},
    "timm.models": {"vit_base_patch16_224": _vit_base_patch16_224},
}


def prepare(folder: Path, config: str = "", arguments: Sequence[str] = ()) -> None:
    """Make this rank the place where a script runs: in ``folder`` with its ``config.py``, with what it
    imports.
    """
    os.chdir(folder)
    os.environ["DATA"] = str(folder)
    sys.argv = ["train.py", *arguments]
    draft = Path(f"config_{os.getpid()}")
    draft.write_text(config)
    draft.replace("config.py")  # whole at every moment: the other ranks read it, too
    install()


def install() -> None:
    """Put the stand-ins into this process."""
    for name, content in STAND_INS.items():
        stand_in(name, **content)
    # two ranks may have to share one GPU, which NCCL does not allow
    colossalai.launch = partial(colossalai.launch, backend="gloo")
    colossalai.launch_from_torch = partial(colossalai.launch_from_torch, backend="gloo")
    if not torch.cuda.is_available():
        Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]


def stand_in(name: str, **content: Any) -> None:
    """From now on ``import name`` gives a module with this content."""
    package, _, part = name.rpartition(".")
    module = types.ModuleType(name)
    vars(module).update(content)
    sys.modules[name] = module
    if package:
        setattr(sys.modules.setdefault(package, types.ModuleType(package)), part, module)


def is_inside(wrapper: Any, kind: type) -> bool:
    """Whether ``wrapper``, or what it wraps, is a ``kind``: the plugin of several ranks puts its own
    around.
    """
    return isinstance(wrapper, kind) or (hasattr(wrapper, "optim") and is_inside(wrapper.optim, kind))


def run(*blocks: str, **names: Any) -> dict[str, Any]:
    """Run the blocks one after the other, as one script that knows ``names``; return all its names."""
    namespace: dict[str, Any] = {"__name__": "documentation", **names}
    for block in blocks:
        exec(compile(block, "documentation", "exec"), namespace)
    return namespace


def values_of(name: str, block: str) -> list[Any]:
    """What ``name`` holds after each of its assignments in ``block``."""
    namespace: dict[str, Any] = {}
    values = []
    for statement in ast.parse(block).body:
        exec(compile(ast.Module([statement], type_ignores=[]), "documentation", "exec"), namespace)
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
            values.append(namespace[name])
    return values
