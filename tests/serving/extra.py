"""The packages that the tests of HTTP need: importing this module skips them where one is missing."""

from __future__ import annotations

import pytest

_NEEDED = "needs `pip install --editable '.[serve]' httpx openai`"

for _name in ("fastapi", "uvicorn", "prometheus_client", "transformers"):
    pytest.importorskip(_name, reason=_NEEDED)
httpx = pytest.importorskip("httpx", reason=_NEEDED)
openai = pytest.importorskip("openai", reason=_NEEDED)
