"""Running the real command, looking for processes it left, waiting with a deadline."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARKER = "COLOSSALAI_TEST_MARKER"


def free_port() -> int:
    """A free port below those that the system gives to outgoing connections, so it stays free until used."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


def wait_until(condition: Callable[[], object], *, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds} s for {what}")
        time.sleep(0.02)


def environment_with_package() -> dict[str, str]:
    """Ours, such that this copy of the package is imported from any folder."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


class Command:
    """A running `colossalai ...` whose processes, on every host, carry a mark of their own."""

    def __init__(self, *arguments: object, env: Mapping[str, str] | None = None, cwd: Path | None = None):
        self.mark = uuid.uuid4().hex
        environment = {**environment_with_package(), MARKER: self.mark, **(env or {})}
        if (
            "COLOSSALAI_SSH_OPTIONS" in environment
        ):  # so that what ssh starts over there is marked from its birth
            environment["COLOSSALAI_SSH_OPTIONS"] += f" -o SetEnv={MARKER}={self.mark}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "colossalai", *map(str, arguments)],
            env=environment,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def finish(self, seconds: float = 60) -> Result:
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"no end within {seconds} s\n{out.decode()}\n{err.decode()}") from None
        with suppress(TimeoutError):  # a helper of multiprocessing may end a moment after its parent
            wait_until(lambda: not survivors(self.mark), seconds=3, what="the last processes")
        return Result(self.process.returncode, out.decode(), err.decode(), survivors(self.mark))


class Result:
    """What a command left: exit code, output, and processes that should not be there."""

    def __init__(self, code: int, out: str, err: str, survivors: dict[int, str]):
        self.code, self.out, self.err, self.survivors = code, out, err, survivors

    def __repr__(self) -> str:
        output = f"--- stdout\n{self.out}\n--- stderr\n{self.err}"
        return f"exit code {self.code}\n{output}\n--- left: {self.survivors}"


def run(*arguments: object, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Result:
    return Command(*arguments, env=env, cwd=cwd).finish()


def survivors(mark: str) -> dict[int, str]:
    """The living processes that inherited the mark, with their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARKER}={mark}".encode() in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if command:  # a zombie has none
                    found[int(folder.name)] = command
    return found
