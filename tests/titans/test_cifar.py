"""CIFAR-10 from disk, and its two stand-ins."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from colossalai.logging import get_dist_logger
from titans.dataloader.cifar10 import MEAN, STD, build_cifar, load_cifar
from titans.dataloader.images import ImageDataset, ImageTransform


def write_batches(folder: Path, per_file: int = 4) -> dict[str, np.ndarray]:
    """Small files in the format of the real ones: Python 2's pickles, with bytes as keys."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    written = {}
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        written[name] = generator.integers(0, 256, (per_file, 3072), dtype=np.uint8)
        batch = {
            b"data": written[name],
            b"labels": [i % 10 for i in range(per_file)],
            b"batch_label": name.encode(),
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return written


@pytest.fixture
def _without_sklearn(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "sklearn" else find(name, *a)
    )


@pytest.mark.parametrize("inside", ["cifar-10-batches-py", ""])
def test_batches_on_disk_are_used(inside: str, tmp_path: Path) -> None:
    written = write_batches(tmp_path / "root" / inside if inside else tmp_path / "root")
    train, test = build_cifar(4, tmp_path / "root", padding=2, crop=32, resize=32)
    assert (len(train), len(test)) == (5, 1)
    ((images, labels),) = test
    assert labels.tolist() == [0, 1, 2, 3]
    expected = torch.from_numpy(written["test_batch"]).view(4, 3, 32, 32).float() / 255
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(images, (expected - mean) / std)
    seen = [label for _, batch in train for label in batch.tolist()]
    assert sorted(seen) == sorted([0, 1, 2, 3] * 5)
    assert load_cifar(tmp_path / "root").train.images.flatten(1).numpy().tobytes() == b"".join(
        written[f"data_batch_{i}"].tobytes() for i in range(1, 6)
    )


def test_digits_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, datasets = ModuleType("sklearn"), ModuleType("sklearn.datasets")
    digits = np.zeros((20, 8, 8))
    digits[:, :4] = 16
    datasets.load_digits = lambda: SimpleNamespace(images=digits, target=np.arange(20) % 10)  # type: ignore[attr-defined]
    package.__spec__ = importlib.util.spec_from_loader("sklearn", loader=None)
    monkeypatch.setitem(sys.modules, "sklearn", package)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", datasets)
    source = load_cifar(tmp_path)
    assert source.name == f"scikit-learn's digits (there is no CIFAR-10 under {tmp_path})"
    assert source.train.images.shape == (16, 3, 32, 32)
    assert source.test.labels.tolist() == [4, 9, 4, 9]
    assert (source.train.images[0, 0, 0, 0], source.train.images[0, 2, -1, -1]) == (255, 0)


@pytest.mark.usefixtures("_without_sklearn")
def test_synthetic_stand_in_can_be_learnt(tmp_path: Path) -> None:
    source = load_cifar(tmp_path)
    assert source.name == f"synthetic images (there is no CIFAR-10 under {tmp_path}, and no scikit-learn)"
    again = load_cifar(tmp_path)
    assert torch.equal(source.train.images, again.train.images)  # the same on every rank
    train, test = (part.images.float().flatten(1) for part in (source.train, source.test))
    means = torch.stack([train[source.train.labels == k].mean(0) for k in range(10)])
    guess = torch.cdist(test, means).argmin(1)
    assert (guess == source.test.labels).float().mean() > 0.95
    assert source.test.images.shape == (1024, 3, 32, 32)


@pytest.mark.usefixtures("_without_sklearn")
def test_the_log_says_what_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(get_dist_logger(), "info", lambda text, ranks: lines.append(f"{ranks} {text}"))
    build_cifar(4, tmp_path, crop=32, resize=32)
    (line,) = lines
    assert line.startswith("[0] build_cifar uses synthetic images")
    assert line.endswith("4096 images to train, 1024 to test")


class _Evil:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_batches_never_run_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_batches(tmp_path / "root")
    (tmp_path / "root" / "test_batch").write_bytes(pickle.dumps({b"data": _Evil()}, protocol=2))
    with pytest.raises(RuntimeError, match=r"test_batch is not a batch of CIFAR-10.*print, which is neither"):
        load_cifar(tmp_path / "root")
    assert "run" not in capsys.readouterr().out
    (tmp_path / "root" / "test_batch").write_bytes(b"damaged")
    with pytest.raises(RuntimeError, match="test_batch is not a batch of CIFAR-10"):
        load_cifar(tmp_path / "root")


def transform(resize: int, crop: int, **options: Any) -> ImageTransform:
    return ImageTransform(resize, crop, (0.0,), (1.0,), **options)


def test_transforms() -> None:
    torch.manual_seed(0)
    image = torch.arange(16, dtype=torch.uint8).view(1, 4, 4) + 100
    exact = image.float() / 255
    assert torch.equal(transform(4, 4)(image), exact)
    assert torch.equal(transform(4, 2)(image), exact[:, 1:3, 1:3])
    assert transform(8, 6)(image).shape == (1, 6, 6)
    torch.testing.assert_close(transform(2, 2)(image)[0, 0, 0], exact[0, :2, :2].mean(), rtol=0.02, atol=0)
    grown = transform(4, 7, pad_if_needed=True)(image)
    assert grown.shape == (1, 7, 7)
    assert torch.equal(grown[:, 2:6, 2:6], exact) or torch.equal(grown[:, 1:5, 1:5], exact)
    seen = {tuple(transform(4, 4, padding=1, train=True)(image).flatten().tolist()) for _ in range(200)}
    assert len(seen) == 18  # nine places, mirrored or not
    assert tuple(exact.flatten().tolist()) in seen
    assert tuple(exact.flip(-1).flatten().tolist()) in seen


def test_what_transforms_and_datasets_refuse() -> None:
    with pytest.raises(ValueError, match=r"crop=8 does not fit into an image of resize=4 with padding=1"):
        transform(4, 8, padding=1)
    with pytest.raises(ValueError, match="need resize > 0, crop > 0 and padding >= 0, got 0, 4, 0"):
        transform(0, 4)
    with pytest.raises(ValueError, match=r"needs uint8 images .*got torch.float32 of shape \(2, 3, 4, 4\)"):
        ImageDataset(torch.zeros(2, 3, 4, 4), torch.zeros(2))
