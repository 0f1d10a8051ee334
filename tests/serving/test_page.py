"""The page to try the model, in a browser."""

from __future__ import annotations

import json

import pytest

from tests.serving.browser import CHROMIUM, Browser, browser
from tests.serving.servers import Here
from tests.serving.stand_in import answer

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


def set_to(page: Browser, name: str, value: object) -> None:
    page.run(f"document.getElementById({name!r}).value = {json.dumps(value)}")


def send(page: Browser, text: str) -> str:
    set_to(page, "text", text)
    page.run("document.getElementById('send').click()")
    page.until("!document.getElementById('send').disabled")
    return str(page.run("document.getElementById('out').textContent"))


def test_the_page_continues_and_chats_with_and_without_a_stream(server: Here) -> None:
    with browser() as page:
        page.open(server.url)
        page.until("document.getElementById('model').textContent.includes('stand-in')")
        set_to(page, "max_tokens", 8)
        for stream in ("true", "false"):
            page.run(f"document.getElementById('stream').checked = {stream}")
            assert send(page, "Hello") == "Hello" + bytes(answer(b"Hello", 8)).decode()
            assert page.run("document.getElementById('told').textContent").startswith("8 tokens in ")
        page.run("document.getElementById('stream').checked = true")
        page.run("document.getElementById('chat').click()")
        first = bytes(answer(b"user: Hi\nassistant:", 8)).decode()
        assert send(page, "Hi") == f"youHistand-in{first}"
        second = bytes(answer(f"user: Hi\nassistant: {first}\nuser: <b>?\nassistant:".encode(), 8)).decode()
        assert send(page, "<b>?").endswith(f"you<b>?stand-in{second}")
        set_to(page, "temperature", 9)
        assert "temperature" in send(page, "Hi")
        page.open(f"{server.url}/docs")
        page.until("document.querySelectorAll('details').length >= 6")
        page.run("document.querySelectorAll('details button')[0].click()")
        page.until("document.querySelector('pre').textContent.startsWith('200')")
        assert {url for url in page.asked if not url.startswith(server.url)} <= {"about:blank"}
        assert [line for line in page.said if "400" not in line] == []
