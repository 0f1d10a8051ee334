"""Options and fixtures that every test shares."""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="also run the generated cases marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))
        if "slow" in item.keywords and not config.getoption("--all-cases"):
            item.add_marker(pytest.mark.skip(reason="runs with --all-cases (make test-all)"))
