"""Servers for tests: a stand-in for the model, real ranks, real HTTP; in a thread, or in a process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from colossalai.serving import Generation, Job, Service, TextModel
from colossalai.serving.http import Settings
from colossalai.serving.http.server import app_of, bind, make_server
from tests.serving.stand_in import stand_in

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


class Bytes:
    """A tokenizer whose tokens are bytes."""

    chat_template = None

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, tokens: list[int], **options: Any) -> str:
        return bytes(tokens).decode(errors="replace")

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant:"

    def __len__(self) -> int:
        return 256


class Here:
    """A server in a thread of this process."""

    def __init__(self, url: str, service: Service) -> None:
        self.url, self.service = url, service


@contextlib.contextmanager
def here(
    *, limit: int = 0, tp: int = 1, options: dict[str, Any] | None = None, **settings: Any
) -> Iterator[Here]:
    """Serve the stand-in; ``options`` are its own, ``settings`` those of the server."""
    made = Settings(port=0, **{"max_body": 1 << 16, **settings})
    sock = bind(made)
    service = Service(Job(Generation, {"build": stand_in, "options": options or {}}, tp=tp), limit=limit)
    model = TextModel(service, Bytes(), max_length=512, name="stand-in", chat_template=CHAT)
    ready = threading.Event()
    try:
        service.start()
        server = make_server(app_of(model, made), service, made, announce=ready.set)
        thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
        thread.start()
        try:
            ready.wait(30)
            yield Here(f"http://127.0.0.1:{sock.getsockname()[1]}", service)
        finally:
            server.should_exit = server.force_exit = True
            thread.join(30)
    finally:
        model.close()
        service.close()
        sock.close()


class Running:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    @property
    def ranks(self) -> list[int]:
        """The processes of its ranks, which its fork server has started."""
        return [
            child
            for server in _children(self.process.pid)
            for child in _children(server)
            if os.getpgid(child) == child
        ]

    def stop(self, timeout: float = 30.0) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


@contextlib.contextmanager
def running(
    *arguments: str, module: str = "tests.serving.serve_stand_in", wait: float = 60.0
) -> Iterator[Running]:
    """Start ``python -m module arguments``, wait until it says where it listens, and end it."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", module, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("listening on "):
                break
        else:
            raise RuntimeError("".join(lines) or "the server said nothing")
        yield Running(process, line.split()[-1])
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def until_ready(url: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.05)
    raise TimeoutError(f"{url} was not ready within {seconds:g} s")
