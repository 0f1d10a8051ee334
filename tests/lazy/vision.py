"""Tiny models of timm and torchvision.

PyPI has torchvision with CUDA alone, and a CPU build of torch does not load its library: ``import
torchvision`` fails for two operators, and so does transformers, which takes what is installed.  So ``make``
puts both beside the other packages (``.venv/vision``), where only ``find_packages`` finds them, and their
models, which do not use these operators, are built all the same.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

FOLDER = Path(sys.prefix) / "vision"
_OPERATORS = ("nms", "qnms")
_libraries: list[torch.library.Library] = []  # operators live as long as their library

_BLOCK = {"depth": 2, "embed_dim": 24, "num_heads": 2}
# Options of ``timm.create_model``, and the size of an image.
_TIMM: dict[str, tuple[dict[str, Any], int]] = {
    "vit_tiny_patch16_224": ({**_BLOCK, "img_size": 32}, 32),
    "deit_tiny_distilled_patch16_224": ({**_BLOCK, "img_size": 32}, 32),
    "beit_base_patch16_224": ({**_BLOCK, "img_size": 32}, 32),
    "eva02_tiny_patch14_224": ({**_BLOCK, "img_size": 28}, 28),
    "vit_base_patch16_siglip_224": ({**_BLOCK, "img_size": 32}, 32),
    "swin_tiny_patch4_window7_224": (
        {"img_size": 32, "window_size": 4, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2)},
        32,
    ),
    "convnext_atto": ({"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}, 32),
    "cait_xxs24_224": ({**_BLOCK, "img_size": 32}, 32),
    "xcit_nano_12_p16_224": ({**_BLOCK, "img_size": 32}, 32),
    "resnet10t": ({}, 32),
    "efficientnet_lite0": ({}, 32),
    "mobilenetv3_small_050": ({}, 32),
    "mobilevit_xxs": ({}, 64),
    "regnetx_002": ({}, 32),
}
_TORCHVISION: dict[str, tuple[dict[str, Any], int]] = {
    "resnet18": ({}, 32),
    "mobilenet_v2": ({"width_mult": 0.25}, 32),
    "mobilenet_v3_small": ({"reduced_tail": True}, 32),
    "shufflenet_v2_x0_5": ({}, 32),
    "squeezenet1_1": ({}, 64),
    "mnasnet0_5": ({}, 32),
    "regnet_y_400mf": ({}, 32),
    "efficientnet_b0": ({}, 32),
    "VisionTransformer": (
        {
            "image_size": 32,
            "patch_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "hidden_dim": 24,
            "mlp_dim": 48,
        },
        32,
    ),
    "SwinTransformer": (
        {
            "patch_size": [4, 4],
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": [4, 4],
        },
        32,
    ),
    "DenseNet": ({"growth_rate": 4, "block_config": (2, 2), "num_init_features": 8}, 32),
    "GoogLeNet": ({"init_weights": True, "aux_logits": False}, 64),
}
MODELS = [*(f"timm {name}" for name in _TIMM), *(f"torchvision {name}" for name in _TORCHVISION)]


def are_installed() -> bool:
    return FOLDER.is_dir() or importlib.util.find_spec("timm") is not None


@contextmanager
def find_packages() -> Iterator[None]:
    """Let timm and torchvision be imported inside the block.

    Ranks of later tests inherit the path, but not the operators that torchvision needs.
    """
    if not torch.cuda.is_available() and not _libraries:
        _libraries.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in _OPERATORS:
            _libraries[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    before = list(sys.path)
    sys.path.append(str(FOLDER))
    try:
        yield
    finally:
        sys.path[:] = before


def builder(kind: str) -> Callable[[], nn.Module]:
    """What builds the model ``kind``, one of ``MODELS``."""
    package, name = kind.split()
    with find_packages():
        if package == "timm":
            import timm

            return partial(timm.create_model, name, num_classes=10, **_TIMM[name][0])
        import torchvision

    options = {"num_classes": 10, **_TORCHVISION[name][0]}
    if hasattr(torchvision.models, name) and isinstance(getattr(torchvision.models, name), type):
        return partial(getattr(torchvision.models, name), **options)
    return partial(torchvision.models.get_model, name, **options)


def images(kind: str) -> torch.Tensor:
    package, name = kind.split()
    size = (_TIMM if package == "timm" else _TORCHVISION)[name][1]
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
