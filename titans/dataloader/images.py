"""Images in memory, images made up, and the few transforms that training on them needs, on torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad
from torch.utils.data import Dataset

Transform = Callable[[Tensor], Tensor]


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """Images (count, channels, height, width) of uint8 with their classes, transformed when they are read."""

    def __init__(self, images: Tensor, labels: Tensor, transform: Transform | None = None) -> None:
        if images.dim() != 4 or images.dtype != torch.uint8 or labels.shape != images.shape[:1]:
            raise ValueError(
                "ImageDataset needs uint8 images of shape (count, channels, height, width) and one label"
                f" each, got {images.dtype} of shape {tuple(images.shape)} and labels of shape"
                f" {tuple(labels.shape)}"
            )
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        return (image if self.transform is None else self.transform(image)), int(self.labels[index])


@dataclass(frozen=True)
class ImageTransform:
    """Resize, crop and normalize one uint8 image (channels, height, width) to floats.

    ``train`` crops at a random place, after ``padding`` zeros on each side, and mirrors every second image;
    otherwise the crop is the centre.  An image smaller than the crop is an error, or with ``pad_if_needed``
    gets zeros around it.
    """

    resize: int
    crop: int
    mean: Sequence[float]
    std: Sequence[float]
    padding: int = 0
    pad_if_needed: bool = False
    train: bool = False

    def __post_init__(self) -> None:
        room = self.resize + 2 * self.padding
        if min(self.resize, self.crop) < 1 or self.padding < 0:
            raise ValueError(
                f"images need resize > 0, crop > 0 and padding >= 0, got {self.resize}, {self.crop},"
                f" {self.padding}"
            )
        if self.crop > room and not self.pad_if_needed:
            raise ValueError(
                f"crop={self.crop} does not fit into an image of resize={self.resize} with"
                f" padding={self.padding}; use a smaller crop, a larger resize, or pad_if_needed=True"
            )

    def __call__(self, image: Tensor) -> Tensor:
        x = image.float().div(255)  # (channels, height, width)
        if x.shape[1:] != (self.resize, self.resize):
            size = (self.resize, self.resize)
            x = interpolate(x[None], size, mode="bilinear", antialias=True, align_corners=False)[0]
        border = (self.padding if self.train else 0) + self._missing()
        x = self._cropped(pad(x, [border] * 4))
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return (x - mean) / std

    def _missing(self) -> int:
        """Further zeros on each side, without which the crop would not fit."""
        room = self.resize + 2 * (self.padding if self.train else 0)
        return max(0, -(-(self.crop - room) // 2))

    def _cropped(self, x: Tensor) -> Tensor:
        free = x.shape[-1] - self.crop
        top, left = free // 2, free // 2
        if self.train:
            top, left = torch.randint(free + 1, (2,)).tolist()
        x = x[:, top : top + self.crop, left : left + self.crop]
        return x.flip(-1) if self.train and torch.rand(()) < 0.5 else x


def synthetic_images(labels: Tensor, size: int, classes: int, generator: torch.Generator) -> Tensor:
    """An image (3, size, size) of uint8 for each label: the smooth pattern of its class under noise as
    strong.
    """
    patterns = torch.randn(classes, 3, 4, 4, generator=torch.Generator().manual_seed(10))  # always the same
    smooth = interpolate(patterns[labels], (size, size), mode="bilinear", align_corners=False)
    noise = torch.randn(smooth.shape, generator=generator)
    return (128 + 40 * (smooth + noise)).round().clamp(0, 255).to(torch.uint8)
