"""The sections of page 38, with all the defaults that it lists."""

from __future__ import annotations

from typing import Any

from colossalai.amp import AMP_TYPE
from tests.documents.pages import code
from tests.documents.scripts import run

DOCUMENTED: dict[AMP_TYPE, dict[str, Any]] = {
    section.pop("mode"): section
    for section in (run(block)["fp16"] for block in (code("38.torch"), code("38.apex"), code("38.naive")))
}
