"""What the launched ranks do in these tests: `worker.py FOLDER ACTION RANK`.

It needs no torch, so it starts fast.

The rank named performs the action once all ranks are there; the others refuse to end by SIGTERM or SIGINT, as
ranks stuck in a collective do.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

folder, action, actor = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def meet() -> None:
    (folder / f"rank_{rank}").touch()
    while len(list(folder.glob("rank_*"))) < world:
        time.sleep(0.01)


def wait_forever() -> None:
    (folder / f"waiting_{rank}").touch()
    while True:
        signal.pause()


def act() -> None:
    if action == "raise":
        raise ValueError("boom on purpose")
    if action == "linger":
        threading.Thread(target=wait_in_thread).start()
        raise ValueError("boom on purpose")
    if action == "exit":
        sys.exit(7)
    if action in ("leave", "quit"):
        (folder / f"left_{rank}").touch()
        sys.exit(0)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while action == "talk":
        print("a line", flush=True)
        time.sleep(0.02)
    if action == "save":
        try:
            wait_forever()
        except KeyboardInterrupt:
            (folder / "saved").touch()
            sys.exit(128 + signal.SIGINT)  # as a shell expects of what was interrupted
    wait_forever()


def wait_in_thread() -> None:
    threading.Event().wait()


if rank != actor:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
meet()
print(f"rank {rank} of {world} is here", flush=True)
if "ODD_VALUE" in os.environ:
    print(json.dumps([os.environ["ODD_VALUE"], os.getcwd()]), flush=True)
if rank == actor:
    act()
elif action == "leave":  # as gloo says it
    while not list(folder.glob("left_*")):
        time.sleep(0.01)
    time.sleep(0.5)
    raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4")
else:
    wait_forever()
