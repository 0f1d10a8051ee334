from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from colossalai.core import global_context as gpc


@pytest.fixture(autouse=True)
def _context_is_empty_afterwards() -> Iterator[None]:
    yield
    gpc.destroy()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
