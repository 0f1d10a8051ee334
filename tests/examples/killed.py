"""``killed.py KILLS SCRIPT ...``: runs SCRIPT, and a rank ends by SIGKILL in some of its optimizer steps.

KILLS is a JSON list with one entry for each start of the job: the rank, and how many steps it makes before.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    kills, script = json.loads(sys.argv[1]), sys.argv[2]
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt < len(kills) and kills[attempt][0] == int(os.environ["RANK"]):
        _die_after(kills[attempt][1])
    sys.path.insert(0, str(Path(script).parent))
    sys.argv = sys.argv[2:]
    runpy.run_path(script, run_name="__main__")


def _die_after(steps: int) -> None:
    original, made = torch.optim.AdamW.step, 0

    def step(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
        nonlocal made
        if made == steps:
            os.kill(os.getpid(), signal.SIGKILL)
        made += 1
        return original(self, *args, **kwargs)

    torch.optim.AdamW.step = step  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
