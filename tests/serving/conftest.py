"""A server that most tests of HTTP share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.serving.servers import Here


@pytest.fixture(scope="module")
def server() -> Iterator[Here]:
    from tests.serving.servers import here  # skips, where the extra is missing

    with here() as found:
        yield found
