"""ImageNet from a folder, and its stand-in."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from colossalai.logging import get_dist_logger
from titans.dataloader.imagenet import MEAN, STD, build_imagenet, find_imagenet

COLOURS = {"n01": (255, 0, 0), "n02": (0, 255, 0), "n03": (0, 0, 255)}


def write_folder(root: Path, per_class: int = 2) -> None:
    """Images of one colour each, of other sizes than the loaders give."""
    image = pytest.importorskip("PIL.Image", reason="needs Pillow to write images")
    for part in ("train", "val"):
        for name, colour in COLOURS.items():
            (root / part / name).mkdir(parents=True)
            for i in range(per_class):
                pixels = np.full((40 + 10 * i, 60, 3), colour, dtype=np.uint8)
                image.fromarray(pixels).save(root / part / name / f"{i}.png")
            (root / part / name / "notes.txt").write_text("not an image")


def test_a_folder_is_used(tmp_path: Path) -> None:
    write_folder(tmp_path)
    train, test = build_imagenet(2, tmp_path, crop=24, resize=32)
    assert (len(train), len(test)) == (3, 3)
    seen = sorted(label for _, labels in train for label in labels.tolist())
    assert seen == [0, 0, 1, 1, 2, 2]
    for images, labels in test:
        assert images.shape == (2, 3, 24, 24)
        pixels = images * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
        expected = torch.eye(3)[labels].view(2, 3, 1, 1).expand_as(pixels)  # class 0 is red, 1 green, 2 blue
        torch.testing.assert_close(pixels, expected, atol=1e-5, rtol=0)


def test_the_middle_square_is_taken(tmp_path: Path) -> None:
    write_folder(tmp_path)
    image = pytest.importorskip("PIL.Image")
    pixels = np.zeros((32, 96, 3), dtype=np.uint8)
    pixels[:, 32:64] = 255
    image.fromarray(pixels).save(tmp_path / "val" / "n01" / "0.png")
    _, test = build_imagenet(1, tmp_path, crop=32, resize=32)
    images, _ = next(iter(test))
    white = ((1 - torch.tensor(MEAN)) / torch.tensor(STD)).view(3, 1, 1)
    torch.testing.assert_close(images[0], white.expand(3, 32, 32))


def test_synthetic_images_have_the_shape_of_the_real_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(get_dist_logger(), "info", lambda text, ranks: lines.append(text))
    train, test = build_imagenet(4, tmp_path)
    images, labels = next(iter(test))
    assert images.shape == (4, 3, 224, 224)
    assert labels.tolist() == [0, 1, 2, 3]
    assert lines == [
        f"build_imagenet uses synthetic images (there are no folders train and val under {tmp_path}):"
        " 4096 images to train, 1024 to test"
    ]
    again, _ = next(iter(build_imagenet(4, tmp_path)[1]))
    assert torch.equal(images, again)  # the same on every rank
    first, other = test.dataset[0][0], train.dataset[0][0]
    assert not torch.equal(first, other), "testing on the training images"
    same_class, next_class = test.dataset[1000][0], test.dataset[1][0]
    assert (first - same_class).square().mean() < (first - next_class).square().mean()
    with pytest.raises(IndexError, match="image 1024 of 1024"):
        test.dataset[1024]


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train" / "n01").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"no images under .*train; build_imagenet needs a folder for each"):
        find_imagenet(tmp_path)
    (tmp_path / "train" / "n01" / "0.jpeg").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"no images under .*val"):
        find_imagenet(tmp_path)
    (tmp_path / "val" / "n02").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"val has the class 'n02', but .*train has no folder of that name"):
        find_imagenet(tmp_path)
    (tmp_path / "val" / "n02").rename(tmp_path / "val" / "n01")
    (tmp_path / "val" / "n01" / "0.JPEG").write_bytes(b"damaged")
    train, _ = build_imagenet(1, tmp_path)
    with pytest.raises(RuntimeError, match=r"0\.jpeg is not an image that Pillow can read"):
        train.dataset[0]
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(RuntimeError, match=r"reading .*0\.jpeg needs Pillow: pip install pillow"):
        train.dataset[0]
