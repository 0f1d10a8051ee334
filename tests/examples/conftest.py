"""Models this small are computed faster by one thread than by several that wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.examples.scripts import write_cifar


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
