"""Chromium without a screen, driven through its debugging pipe."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe"
)


class Browser:
    """One page.  What it asked for over the network is in ``asked``, what its console said in ``said``."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._rest = to, back, b""
        self._number = 0
        self._session: str | None = None
        self.asked: list[str] = []
        self.said: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                data = os.read(self._back, 1 << 16)
                if not data:
                    raise EOFError("chromium has ended")
                self._rest += data
            line, _, self._rest = self._rest.partition(b"\0")
            got = json.loads(line)
            if got.get("id") == self._number:
                if "error" in got:
                    raise RuntimeError(f"{method}: {got['error']}")
                return got["result"]
            self._note(got)

    def _note(self, event: Any) -> None:
        method, told = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.asked.append(told["request"]["url"])
        elif method == "Log.entryAdded":
            if told["entry"]["level"] == "error":
                self.said.append(told["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.said.append(str(told["exceptionDetails"]))

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression on the page."""
        got = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in got:
            raise RuntimeError(f"{script}: {got['exceptionDetails']}")
        return got["result"].get("value")

    def until(self, script: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not self.run(script):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {seconds:g} s: {script}")
            time.sleep(0.02)

    def screenshot(self, path: Path, width: int = 900, height: int = 620) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    folder = tempfile.mkdtemp()
    command = f"exec {CHROMIUM} {_FLAGS} --user-data-dir={folder} 3<&{their_in} 4>&{their_out}"
    process = subprocess.Popen(
        ["bash", "-c", command],
        pass_fds=(their_in, their_out),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(their_in)
    os.close(their_out)
    try:
        yield Browser(our_out, our_in)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
        os.close(our_out)
        os.close(our_in)
        shutil.rmtree(folder, ignore_errors=True)
