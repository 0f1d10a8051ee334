"""A server that most tests of HTTP share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving.servers import Here, here


@pytest.fixture(scope="module")
def server() -> Iterator[Here]:
    with here() as found:
        yield found
