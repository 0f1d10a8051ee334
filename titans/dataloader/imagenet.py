"""ImageNet from a folder, or synthetic images of the same shape.

The folder has the layout in which ImageNet is usually unpacked, a folder for each class with its images in
it:

    root/train/n01440764/n01440764_10026.JPEG ...
    root/val/n01440764/ILSVRC2012_val_00000293.JPEG ...

Any other images in this layout will do.  Files are read with Pillow when their turn comes; nothing is
downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from colossalai.logging import get_dist_logger
from colossalai.utils import get_dataloader
from titans.dataloader.images import ImageTransform, synthetic_images

SUFFIXES = (".jpeg", ".jpg", ".png")
CLASSES = 1000
# mean and standard deviation of ImageNet's pixels, by channel
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Images = Dataset[tuple[Tensor, int]]


class ImageNetFiles(NamedTuple):
    """What was found, in words, and the files of its two parts with their classes; no files if it is
    synthetic.
    """

    name: str
    train: list[tuple[Path, int]]
    test: list[tuple[Path, int]]


def build_imagenet(
    batch_size: int, root: str | Path, crop: int = 224, resize: int = 256
) -> tuple[DataLoader, DataLoader]:
    """Loaders of ImageNet for training and testing; each data-parallel rank gets its part.

    The middle square of an image is resized to ``resize`` and cropped to ``crop``, for training at a random
    place and mirrored half of the time.  Without the folders of this module's description under ``root``,
    synthetic images of 1000 classes are used; the log says which.
    """
    source = find_imagenet(root)
    augment = ImageTransform(resize, crop, MEAN, STD, train=True)
    plain = ImageTransform(resize, crop, MEAN, STD)
    train: Images = SyntheticImages(4096, 0, augment)
    test: Images = SyntheticImages(1024, 1, plain)
    if source.train:
        train, test = ImageFiles(source.train, augment), ImageFiles(source.test, plain)
    get_dist_logger().info(
        f"build_imagenet uses {source.name}: {len(train)} images to train, {len(test)} to test",  # type: ignore[arg-type]
        ranks=[0],
    )
    return get_dataloader(train, shuffle=True, batch_size=batch_size), get_dataloader(
        test, batch_size=batch_size
    )


def find_imagenet(root: str | Path) -> ImageNetFiles:
    """The files under ``root``, or none if it has neither of the two folders."""
    train, test = Path(root) / "train", Path(root) / "val"
    if not train.is_dir() and not test.is_dir():
        return ImageNetFiles(f"synthetic images (there are no folders train and val under {root})", [], [])
    classes = {folder.name: index for index, folder in enumerate(_folders(train))}
    if unknown := [folder.name for folder in _folders(test) if folder.name not in classes]:
        raise ValueError(f"{test} has the class {unknown[0]!r}, but {train} has no folder of that name")
    return ImageNetFiles(f"the images in {root}", *(_files(part, classes) for part in (train, test)))


def _folders(part: Path) -> list[Path]:
    return sorted(path for path in part.iterdir() if path.is_dir()) if part.is_dir() else []


def _files(part: Path, classes: dict[str, int]) -> list[tuple[Path, int]]:
    found = [
        (path, classes[folder.name])
        for folder in _folders(part)
        for path in sorted(folder.iterdir())
        if path.suffix.lower() in SUFFIXES
    ]
    if not found:
        raise ValueError(
            f"there are no images under {part}; build_imagenet needs a folder for each class with files"
            f" {', '.join(SUFFIXES)} in it"
        )
    return found


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Image files with their classes, read when they are needed."""

    def __init__(self, files: list[tuple[Path, int]], transform: ImageTransform) -> None:
        self.files, self.transform = files, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        return self.transform(_read(path, self.transform.resize)), label


class SyntheticImages(Dataset[tuple[Tensor, int]]):
    """``count`` images of all classes in turn, the same in every epoch and on every rank."""

    def __init__(self, count: int, seed: int, transform: ImageTransform) -> None:
        self.count, self.seed, self.transform = count, seed, transform

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.count:
            raise IndexError(f"image {index} of {self.count}")
        generator = torch.Generator().manual_seed(self.seed * self.count + index)
        label = torch.tensor([index % CLASSES])
        (image,) = synthetic_images(label, self.transform.resize, CLASSES, generator)
        return self.transform(image), index % CLASSES


def _read(path: Path, size: int) -> Tensor:
    """The largest square in the middle of an image, resized: (3, size, size) of uint8."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise RuntimeError(f"reading {path} needs Pillow: pip install pillow") from error
    try:
        with Image.open(path) as image:
            square = ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BILINEAR)
    except OSError as error:
        raise RuntimeError(f"{path} is not an image that Pillow can read: {error}") from error
    return torch.from_numpy(np.asarray(square).copy()).permute(2, 0, 1)
