"""What the tests of the examples share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.scripts import write_cifar


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests start two ranks, which cannot share a GPU under NCCL."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="session")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a CIFAR-10 of 160 images to train on and 32 to test with."""
    folder = tmp_path_factory.mktemp("cifar")
    write_cifar(folder)
    return folder
