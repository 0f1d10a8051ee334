"""A headless Chromium, driven by its own protocol: what it shows, what it asks for, what its console says."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
_SECONDS = 60
_COMPLAINTS = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")


class Tab:
    """One page of the browser."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self.complaints: list[dict[str, Any]] = []
        self.requested: list[str] = []

    async def listen(self) -> None:
        while text := await self._connection.read_message():
            message = json.loads(text)
            if "id" in message:
                self._answers.pop(message["id"]).set_result(message)
            elif message["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif message["method"] == "Network.requestWillBeSent":
                self.requested.append(message["params"]["request"]["url"])
            elif message["method"] in _COMPLAINTS:
                self.complaints.append(message["params"])

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        text = json.dumps({"id": number, "method": method, "params": arguments})
        await self._connection.write_message(text)
        message = await asyncio.wait_for(answer, _SECONDS)
        return message["result"]  # a refused call has none: a KeyError shows its message

    async def open(self, url: str, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        await self.loaded()

    async def loaded(self) -> None:
        await asyncio.wait_for(self._loaded.wait(), _SECONDS)

    async def follow(self, selector: str) -> None:
        """Click on a link, and wait for its page."""
        self._loaded.clear()
        await self.value(f"document.querySelector({selector!r}).click()")
        await self.loaded()

    async def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript, or of the promise that it is."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        return answer["result"].get("value")

    async def links(self, selector: str) -> list[str]:
        """Where the links that ``selector`` finds lead; waits until there are some."""
        return await self.value(
            "new Promise(done => { const look = () => {"
            f" const found = [...document.querySelectorAll({selector!r})].map(link => link.href);"
            " if (found.length) done(found) };"
            " new MutationObserver(look).observe(document, {subtree: true, childList: true}); look() })"
        )


@contextlib.asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Tab]:
    """A browser whose profile is in ``folder``."""
    from tornado.httpclient import AsyncHTTPClient
    from tornado.websocket import websocket_connect

    process = await asyncio.create_subprocess_exec(
        str(CHROMIUM),
        *_FLAGS.split(),
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "about:blank",
        stderr=asyncio.subprocess.PIPE,
    )
    tasks = []
    try:
        assert process.stderr is not None
        async for line in process.stderr:
            if found := re.search(rb"ws://([^/]+)/", line):
                break
        tasks.append(asyncio.create_task(process.stderr.read()))  # a full pipe would stop the browser
        listing = await AsyncHTTPClient().fetch(f"http://{found[1].decode()}/json")
        page = next(target for target in json.loads(listing.body) if target["type"] == "page")
        tab = Tab(await websocket_connect(page["webSocketDebuggerUrl"], max_message_size=1 << 26))
        tasks.append(asyncio.create_task(tab.listen()))
        for domain in ("Page", "Runtime", "Log", "Network"):
            await tab.call(f"{domain}.enable")
        yield tab
    finally:
        process.terminate()
        await process.wait()
        for task in tasks:
            task.cancel()
