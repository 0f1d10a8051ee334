"""CIFAR-10, or what is at hand in its place: 32x32 colour images of ten classes.

1. ``root`` (or ``root/cifar-10-batches-py``) holds the batches of
   https://www.cs.toronto.edu/~kriz/cifar.html: these.
2. scikit-learn is installed: its handwritten digits, enlarged to the same shape.
3. Else ten coloured patterns under noise: enough to see that a model learns, and nothing more.
"""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader

from colossalai.logging import get_dist_logger
from colossalai.utils import get_dataloader
from titans.dataloader.images import ImageDataset, ImageTransform, synthetic_images

FOLDER = "cifar-10-batches-py"
TRAIN_FILES = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST_FILES = ("test_batch",)
# mean and standard deviation of CIFAR-10's pixels, by channel
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Images(NamedTuple):
    """Images (count, 3, 32, 32) of uint8 and their classes, 0 to 9."""

    images: Tensor
    labels: Tensor


class CifarImages(NamedTuple):
    """What was found, in words, and its two parts."""

    name: str
    train: Images
    test: Images


def build_cifar(
    batch_size: int,
    root: str | Path,
    padding: int | None = None,
    pad_if_needed: bool = False,
    crop: int = 224,
    resize: int = 224,
    *,
    drop_last: bool = False,
) -> tuple[DataLoader, DataLoader]:
    """Loaders of CIFAR-10 for training and testing; each data-parallel rank gets its part.

    Images are resized to ``resize`` and cropped to ``crop``; for training after ``padding`` zeros on each
    side, at a random place, and mirrored half of the time.  ``drop_last`` leaves out a last batch that is
    shorter than the others, which a pipeline could not cut into its micro-batches.  Without the data under
    ``root`` a stand-in is used (see this module); the log says which.
    """
    augment = ImageTransform(resize, crop, MEAN, STD, padding or 0, pad_if_needed, train=True)
    plain = ImageTransform(resize, crop, MEAN, STD, pad_if_needed=True)
    source = load_cifar(root)
    get_dist_logger().info(
        f"build_cifar uses {source.name}: {len(source.train.labels)} images to train,"
        f" {len(source.test.labels)} to test",
        ranks=[0],
    )
    options: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last}
    train = get_dataloader(ImageDataset(*source.train, augment), shuffle=True, **options)
    return train, get_dataloader(ImageDataset(*source.test, plain), **options)


def load_cifar(root: str | Path) -> CifarImages:
    """CIFAR-10 under ``root``, or a stand-in."""
    for folder in (Path(root) / FOLDER, Path(root)):
        if (folder / TEST_FILES[0]).is_file():
            return CifarImages(
                f"CIFAR-10 in {folder}", _batches(folder, TRAIN_FILES), _batches(folder, TEST_FILES)
            )
    absent = f"there is no CIFAR-10 under {root}"
    if importlib.util.find_spec("sklearn") is not None:
        return CifarImages(f"scikit-learn's digits ({absent})", *_digits())
    name = f"synthetic images ({absent}, and no scikit-learn)"
    return CifarImages(name, _synthetic(4096, seed=0), _synthetic(1024, seed=1))


class _ArraysOnly(pickle.Unpickler):
    """Reads what the batches consist of, numpy arrays and plain values; anything else could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0).__reduce__()[0]  # the same function under the path that this numpy has
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes in Python 2's format
            return _encode
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is neither an array nor a plain value")


def _encode(text: str, encoding: str) -> bytes:
    return text.encode(encoding)


def _batches(folder: Path, names: tuple[str, ...]) -> Images:
    parts = [_batch(folder / name) for name in names]
    return Images(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))


def _batch(path: Path) -> Images:
    try:
        with path.open("rb") as file:
            content = _ArraysOnly(file, encoding="bytes").load()
        images = torch.from_numpy(np.ascontiguousarray(content[b"data"], dtype=np.uint8))
        labels = torch.tensor(content[b"labels"], dtype=torch.int64)
        return Images(images.view(len(labels), 3, 32, 32), labels)
    except Exception as error:
        raise RuntimeError(f"{path} is not a batch of CIFAR-10 (python version): {error}") from error


def _digits() -> tuple[Images, Images]:
    """1797 digits of 8x8 pixels from 0 to 16; every fifth is for testing."""
    from sklearn.datasets import load_digits

    data = load_digits()
    grey = torch.from_numpy(np.asarray(data.images, dtype=np.float32))[:, None]  # (count, 1, 8, 8)
    large = interpolate(grey, (32, 32), mode="bilinear", align_corners=False).mul(255 / 16)
    images = large.round().clamp(0, 255).to(torch.uint8).expand(-1, 3, -1, -1).contiguous()
    labels = torch.from_numpy(np.asarray(data.target, dtype=np.int64))
    test = torch.arange(len(labels)) % 5 == 4
    return Images(images[~test], labels[~test]), Images(images[test], labels[test])


def _synthetic(count: int, seed: int) -> Images:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    return Images(synthetic_images(labels, 32, 10, generator), labels)
