"""What ranks do that are started again: `restarted.py FOLDER FAILURES HOW THEN`.

In the first FAILURES starts the last rank fails (HOW: ``raise`` or ``linger``, where a thread keeps the
process alive), and the others wait for it, whatever they are told.  After these all ranks do THEN: ``end`` or
``wait``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

folder, failures, how, then = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def wait_forever() -> None:
    (folder / f"waiting_{attempt}_{rank}").touch()
    while True:
        signal.pause()


(folder / f"start_{attempt}_{rank}").touch()
while len(list(folder.glob(f"start_{attempt}_*"))) < world:
    time.sleep(0.01)
print(f"start {attempt} of rank {rank}", flush=True)
if attempt < failures:
    if rank != world - 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wait_forever()
    if how == "linger":
        threading.Thread(target=threading.Event().wait).start()
    raise ValueError(f"boom number {attempt}")
if then == "wait":
    wait_forever()
