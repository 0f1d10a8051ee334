from __future__ import annotations

from collections.abc import Iterator

import pytest

from colossalai.core import global_context as gpc


@pytest.fixture(autouse=True)
def _context_is_empty_afterwards() -> Iterator[None]:
    yield
    gpc.destroy()
