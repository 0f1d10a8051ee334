"""The routes, asked by the clients that people use."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from typing import Any
from unittest.mock import Mock

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from colossalai.serving.front import RequestError, TextModel
from colossalai.serving.http import Settings
from colossalai.serving.http.answering import PromptAnswer, as_api_error
from colossalai.serving.http.openai import _chat_logprobs, _completion_logprobs
from colossalai.serving.http.schemas import ChatMessage
from colossalai.serving.http.server import patient
from tests.serving.servers import Bytes, Here, Running, here, running, until_ready
from tests.serving.stand_in import answer

JSON = {"content-type": "application/json"}


def text(prompt: str, count: int) -> str:
    return bytes(answer(prompt.encode(), count)).decode()


def client(of: Here | Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{of.url}/v1", api_key="none", max_retries=0)


def test_generation_continues_the_prompt(server: Here) -> None:
    for body in (
        {"max_tokens": 5},
        {"max_new_tokens": 5, "greedy": True},
        {"max_tokens": 5, "top_k": 3, "top_p": 0.5},
    ):
        got = httpx.post(f"{server.url}/generation", json={"prompt": "Hello", **body})
        assert (got.status_code, got.json()) == (200, {"text": "Hello" + text("Hello", 5)})


def test_openai_completions(server: Here) -> None:
    ask = client(server)
    assert [model.id for model in ask.models.list()] == ["stand-in"]
    assert ask.models.retrieve("stand-in").id == "stand-in"
    done = ask.completions.create(model="stand-in", prompt=["ab", "c"], max_tokens=4, n=2, seed=3)
    assert [c.text for c in done.choices] == [text("ab", 4)] * 2 + [text("c", 4)] * 2
    assert [c.index for c in done.choices] == [0, 1, 2, 3]
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (3, 16, 19)
    tokens = ask.completions.create(model="stand-in", prompt=[97, 98], max_tokens=4)
    assert tokens.choices[0].text == text("ab", 4)
    whole = text("ab", 8)
    stopped = ask.completions.create(model="stand-in", prompt="ab", max_tokens=8, stop=whole[3])
    assert stopped.choices[0].text == whole[: whole.index(whole[3])]
    assert stopped.choices[0].finish_reason == "stop"


def test_log_probabilities_of_prompt_and_answer(server: Here) -> None:
    ask = client(server)
    done = ask.completions.create(model="stand-in", prompt="ab", max_tokens=3, logprobs=2, echo=True)
    (choice,) = done.choices
    assert choice.text == "ab" + text("ab", 3)
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert choice.logprobs.token_logprobs == [None, -1.0, -0.5, -0.5, -0.5]
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]
    scored = ask.completions.create(model="stand-in", prompt="abc", max_tokens=0, logprobs=0, echo=True)
    assert scored.choices[0].text == "abc"
    chat = ask.chat.completions.create(
        model="stand-in",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=3,
        logprobs=True,
        top_logprobs=2,
    )
    assert chat.choices[0].logprobs is not None
    listed = chat.choices[0].logprobs.content or []
    assert [one.logprob for one in listed] == [-0.5] * 3
    assert all(len(one.top_logprobs) == 2 for one in listed)


def test_a_part_of_a_character_has_no_bytes_of_another_text() -> None:
    model: Any = TextModel(Mock(), Bytes(), max_length=8)
    part, letter = _chat_logprobs(model, [(0xE2, -0.5, []), (0x61, -0.5, [])])["content"]
    assert (part["token"], part["bytes"]) == ("token_id:226", None)
    assert (letter["token"], letter["bytes"]) == ("a", [0x61])


def test_tokens_of_one_text_keep_their_own_log_probabilities() -> None:
    model: Any = TextModel(Mock(), Mock(decode=lambda tokens: "a"), max_length=8)  # " a" and "a" of LLaMA
    (top,) = _completion_logprobs(model, PromptAnswer(logprobs=[(5, -2.0, [(7, -0.5), (5, -2.0)])]), ())[
        "top_logprobs"
    ]
    assert top == {"a": -2.0, "token_id:7": -0.5}


def test_openai_streams(server: Here) -> None:
    ask = client(server)
    usage: Any = {"include_usage": True}
    events = list(
        ask.completions.create(model="stand-in", prompt="ab", max_tokens=6, stream=True, stream_options=usage)
    )
    assert "".join(c.text for event in events for c in event.choices) == text("ab", 6)
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 6
    assert [c.finish_reason for event in events for c in event.choices][-1] == "length"


def test_openai_chats(server: Here) -> None:
    ask = client(server)
    messages: Any = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    want = text("system: Be short.\nuser: Hi\nassistant:", 6)
    done = ask.chat.completions.create(model="stand-in", messages=messages, max_completion_tokens=6)
    assert done.choices[0].message.content == want
    events = list(ask.chat.completions.create(model="stand-in", messages=messages, max_tokens=6, stream=True))
    deltas = [event.choices[0].delta for event in events]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == want


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/generation", {"prompt": "", "max_tokens": 3}, 422, "at least 1 character"),
        ("/generation", {"prompt": "x"}, 422, "give max_tokens"),
        ("/generation", {"prompt": "x", "max_tokens": 257}, 422, "less than or equal to 256"),
        ("/generation", {"prompt": "x", "max_tokens": 0}, 422, "greater than 0"),
        ("/generation", {"prompt": "x", "max_tokens": 3, "top_p": 1.0}, 422, "less than 1"),
        ("/generation", {"prompt": "x", "max_tokens": 3, "unknown": 1}, 422, "not permitted"),
        (
            "/generation",
            {"prompt": "x", "max_tokens": 3, "greedy": True, "top_k": 4},
            422,
            "greedy draws nothing",
        ),
        ("/generation", {"prompt": "x" * 600, "max_tokens": 3}, 422, "context is 512 tokens"),
        ("/v1/completions", {"prompt": "x", "model": "gpt-5"}, 404, "'gpt-5' does not exist"),
        ("/v1/completions", {"prompt": "x" * 600}, 400, "context is 512 tokens"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 10**9}, 400, "context is 512 tokens"),
        ("/v1/completions", {"prompt": "x", "max_tokens": -1}, 400, "greater than or equal to 0"),
        ("/v1/completions", {"prompt": [1, 300]}, 400, "from 0 to 255"),
        ("/v1/completions", {"prompt": []}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x", "presence_penalty": 1.0}, 400, "presence_penalty"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"5": 1}}, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "x", "best_of": 3}, 400, "best_of is not offered"),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "suffix is not offered"),
        ("/v1/completions", {"prompt": "x", "top_k": -2}, 400, "top_k"),
        (
            "/v1/completions",
            {"prompt": "x", "max_new_tokens": 2},
            400,
            "no max_new_tokens; .* max_tokens here",
        ),
        ("/v1/completions", {"prompt": "x", "n": 65}, 400, "65 answers"),
        ("/v1/completions", {"prompt": "x", "seed": -1}, 400, "seed"),
        ("/v1/completions", {"prompt": "x", "temperature": 1e30}, 400, "temperature"),
        ("/v1/completions", {"prompt": "x", "stop": [""]}, 400, "stop"),
        ("/v1/completions", {"prompt": "x", "temperature": True}, 400, "temperature: .*valid number"),
        ("/v1/completions", {"prompt": "x", "top_p": "0.5"}, 400, "top_p: .*valid number"),
        ("/v1/completions", {"prompt": "x", "echo": "no"}, 400, "echo: .*valid boolean"),
        ("/v1/completions", {"prompt": "x", "stream": 1.0}, 400, "stream: .*valid boolean"),
        ("/generation", {"prompt": "x", "max_tokens": 1, "greedy": "yes"}, 422, "valid boolean"),
        ("/v1/completions", {"prompt": "x", "repetition_penalty": 1e-39}, 400, "repetition_penalty"),
        ("/v1/completions", {"prompt": "x", "stream_options": {}}, 400, "stream_options"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, 400, "role"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "tools": [{}]},
            400,
            "tools is not offered",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}},
            400,
            "response_format is not offered",
        ),
    ],
)
def test_what_is_wrong_is_named(server: Here, path: str, body: Any, status: int, message: str) -> None:
    got = httpx.post(server.url + path, json=body)
    assert got.status_code == status
    assert re.search(message, got.text), got.text
    if path.startswith("/v1"):
        assert got.json()["error"]["message"]


def test_values_that_ask_for_nothing_are_taken(server: Here) -> None:
    neutral = {"logit_bias": {}, "presence_penalty": 0.0, "frequency_penalty": 0, "best_of": 1, "top_k": -1}
    body = {"prompt": "x", "max_tokens": 2, "user": "me", "suffix": None, "stop": [], **neutral}
    assert httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["text"] == text("x", 2)


def test_the_param_of_an_error_is_the_field(server: Here) -> None:
    got = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "stop": ["a"] * 17}).json()["error"]
    assert got["param"] == "stop"
    assert got["message"].startswith("stop.")
    broken = httpx.post(f"{server.url}/v1/completions", content="{} x", headers=JSON).json()["error"]
    assert (broken["param"], broken["message"]) == (None, "body: it is no JSON: Extra data at character 3")
    for path, status in (("/v1/completions", 400), ("/generation", 422)):
        told = httpx.post(server.url + path, content=b'{"prompt":"x","max_tokens":1}')
        assert (told.status_code, "content-type: application/json" in told.text) == (status, True)


def test_the_name_of_who_speaks_reaches_the_template() -> None:
    message = ChatMessage(role="user", content="Hi", name="Ada")
    assert message.plain == {"role": "user", "content": "Hi", "name": "Ada"}
    assert "name" not in ChatMessage(role="user", content="Hi").plain


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt":"\xff","max_tokens":3}',
        b'{"prompt":"x","max_tokens":3,"top_p":NaN}',
        b'{"prompt":"x","max_tokens":Infinity}',
        b'{"prompt":"\\ud800","max_tokens":3}',
        b'{"prompt":"x","max_tokens":1e400}',
        b'{"prompt":"x","max_tokens":' + b"9" * 5000 + b"}",
        b"[" * 20_000,
        b'{"prompt":' * 5_000,
        b"null",
        b"",
        b"\0",
    ],
)
@pytest.mark.parametrize("path", ["/generation", "/v1/completions", "/v1/chat/completions"])
def test_bodies_that_are_none(server: Here, path: str, content: bytes) -> None:
    got = httpx.post(server.url + path, content=content, headers={"content-type": "application/json"})
    assert 400 <= got.status_code < 500
    got.json()


def test_a_template_that_refuses_what_is_no_text() -> None:
    error = as_api_error(RequestError("the chat template refuses these messages: \ud800"))
    error.message.encode()  # it can be sent


def test_two_lengths_are_refused_and_the_connection_is_closed(server: Here) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    head = b"POST /generation HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(head + b"0\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        got = b""
        while data := sock.recv(4096):
            got += data
    assert got.startswith(b"HTTP/1.1 400")
    assert got.count(b"HTTP/1.1") == 1


def test_a_body_over_the_limit_is_refused_also_without_a_length(server: Here) -> None:
    def pieces() -> Any:
        for _ in range(100):
            yield b"x" * 1000

    for content in (b"x" * 70_000, pieces()):
        got = httpx.post(f"{server.url}/v1/completions", content=content)
        assert got.status_code == 413
        assert "limit of 65536 bytes" in got.json()["error"]["message"]


def test_prometheus_reads_the_metrics(server: Here) -> None:
    httpx.post(f"{server.url}/generation", json={"prompt": "Hello", "max_tokens": 5})
    for path in ("a", "b", "c"):
        httpx.get(f"{server.url}/{path}")
    got = httpx.get(f"{server.url}/metrics")
    families = {family.name: family for family in text_string_to_metric_families(got.text)}
    assert {s.labels["route"] for s in families["colossalai_http_requests"].samples} <= {
        "/generation", "/v1/models", "/v1/models/{name:path}", "/v1/completions",
        "/v1/chat/completions", "/metrics",
        "/health", "/", "/docs", "/page.js", "/docs.js", "/openapi.json", "other",
    }  # fmt: skip
    (up,) = families["colossalai_up"].samples
    assert up.value == 1
    assert families["colossalai_output_tokens"].samples[0].value >= 5
    assert "colossalai_generator_pages_free" in families
    assert families["colossalai_time_to_first_token_seconds"].type == "histogram"


def test_pages_load_nothing_from_elsewhere(server: Here) -> None:
    for path in ("/", "/docs", "/page.js", "/docs.js"):
        got = httpx.get(server.url + path)
        assert got.status_code == 200
        assert "//" not in got.text.replace("http://www.w3.org", "").replace("/* not JSON */", "").replace(
            "// ", ""
        )
        assert "default-src 'none'" in got.headers["content-security-policy"]


def test_a_key_lets_in_who_has_it() -> None:
    with here(api_key="secret") as server:
        body = {"prompt": "x", "max_tokens": 1}
        assert httpx.get(f"{server.url}/health").status_code == 200
        for key in (None, b"Bearer wrong", b"secret", b"B\xe9"):
            headers = [] if key is None else [(b"authorization", key)]
            for path in ("/generation", "/v1/completions"):
                assert httpx.post(server.url + path, json=body, headers=headers).status_code == 401
            assert httpx.get(f"{server.url}/metrics", headers=headers).status_code == 401
        with pytest.raises(openai.AuthenticationError, match="API key"):
            client(server).models.list()
        lower = httpx.get(f"{server.url}/v1/models", headers={"authorization": "bearer secret"})
        assert lower.status_code == 200  # the name of a scheme has no case
        ask = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret")
        assert ask.completions.create(model="stand-in", prompt="x", max_tokens=2).choices[0].text == text(
            "x", 2
        )


@pytest.mark.parametrize("key", ["", " ", "secret\n", " secret", "a\tb", "schl\xfcssel"])
def test_a_key_that_no_client_could_send_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="api_key must be a text of ASCII"):
        Settings(api_key=key)


def test_pages_of_allowed_hosts_can_read_refusals() -> None:
    with here(api_key="secret", allow_origins=("http://page",)) as server:
        ask = {"origin": "http://page", "access-control-request-method": "POST"}
        before = httpx.options(f"{server.url}/v1/completions", headers=ask)
        assert (before.status_code, before.headers["access-control-allow-origin"]) == (200, "http://page")
        refused = httpx.post(f"{server.url}/v1/completions", json={}, headers={"origin": "http://page"})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "http://page")
        other = httpx.post(f"{server.url}/v1/completions", json={}, headers={"origin": "http://other"})
        assert "access-control-allow-origin" not in other.headers


def test_a_full_queue_and_clients_that_leave() -> None:
    with here(limit=2, options={"delay": 0.2}) as server, contextlib.ExitStack() as asked:
        body = {"prompt": "x", "max_tokens": 500, "stream": True}
        for _ in range(2):
            one = asked.enter_context(
                httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60)
            )
            lines = one.iter_lines()  # it leaves when this is collected
            asked.callback(lines.close)
            next(lines)
        full = httpx.post(f"{server.url}/generation", json={"prompt": "x", "max_tokens": 1})
        assert (full.status_code, "queue full" in full.json()["detail"]) == (406, True)
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError):
                client(server).completions.create(model="stand-in", prompt="x", stream=stream)
        asked.close()  # they leave
        until_idle(server)


def test_an_answer_that_takes_too_long() -> None:
    with here(options={"delay": 0.05}, request_timeout=1.0) as server:
        body = {"prompt": "x", "max_tokens": 400}
        late = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert (late.status_code, late.json()["error"]["code"]) == (408, "timeout")
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60
        ) as stream:
            lines = [json.loads(line[6:]) for line in stream.iter_lines() if line and line != "data: [DONE]"]
        assert "longer than this server allows" in lines[-1]["error"]["message"]
        until_idle(server)


def test_bodies_that_are_too_large_together_are_refused() -> None:
    with here(max_body=1000, max_bodies=2, body_timeout=20) as server:
        host, port = server.url.removeprefix("http://").split(":")
        head = b"POST /generation HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n" + b" " * 900
        with contextlib.ExitStack() as slow:
            for _ in range(2):
                sock = slow.enter_context(socket.create_connection((host, int(port))))
                sock.sendall(head)
            body = b'{"prompt":"x","max_tokens":1}' + b" " * 500
            ask = lambda: httpx.post(  # noqa: E731
                f"{server.url}/generation", content=body, headers={"content-type": "application/json"}
            )
            deadline = time.monotonic() + 10
            while (got := ask()).status_code != 429 and time.monotonic() < deadline:
                pass  # the slow ones have not been read yet
            assert (got.status_code, "too large together" in got.text) == (429, True)
        while (got := ask()).status_code != 200:
            assert time.monotonic() < deadline, got.text


def test_a_client_that_does_not_read_is_let_go() -> None:
    with here(body_timeout=0.5, request_timeout=1.0, max_body=1 << 20) as server:
        host, port = server.url.removeprefix("http://").split(":")
        inside = len(os.listdir("/proc/self/fd"))
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((host, int(port)))
            data = json.dumps(
                {"prompt": [[97, 98]] * 60, "max_tokens": 500, "stream": True, "logprobs": 20}
            ).encode()
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            sock.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            deadline = time.monotonic() + 30
            while len(os.listdir("/proc/self/fd")) <= inside + 1:  # ours, and then that of the server
                assert time.monotonic() < deadline
            while len(os.listdir("/proc/self/fd")) > inside + 1:
                assert time.monotonic() < deadline, "the server still holds the connection"
            until_idle(server)


@pytest.fixture
def connection() -> Any:
    """A connection that looks at itself when the test says so."""
    made: Any = object.__new__(patient(20.0))
    made.loop, made.transport, made.cycle = Mock(), Mock(), None
    made.transport.is_closing.return_value = False
    made.timeout_keep_alive_task = None
    made._seen, made._unread = None, -1
    return made


def test_a_connection_without_a_request_is_closed_but_not_one_that_was_busy(connection: Any) -> None:
    connection._look()
    connection.transport.close.assert_called_once()
    connection.transport.close.reset_mock()
    connection.cycle = Mock(response_complete=False)
    connection._look()
    connection.cycle.response_complete = True
    connection._look()  # it has just ended, and its client may be about to use it again
    connection.transport.close.assert_not_called()
    connection._look()
    connection.transport.close.assert_called_once()


def test_a_connection_between_two_requests_lives_as_long_as_keep_alive_says(connection: Any) -> None:
    connection.cycle = Mock(response_complete=True)
    connection.timeout_keep_alive_task = Mock()  # uvicorn's
    for _ in range(3):
        connection._look()
    connection.timeout_keep_alive_task = None  # the first bytes of a head have come
    connection._look()
    connection.transport.close.assert_not_called()
    connection._look()
    connection.transport.close.assert_called_once()


def test_a_closed_connection_whose_client_does_not_read_is_cut(connection: Any) -> None:
    connection.transport.is_closing.return_value = True
    for unread in (9000, 5000):
        connection.transport.get_write_buffer_size.return_value = unread
        connection._look()  # slow, but it reads
    connection.transport.abort.assert_not_called()
    connection._look()
    connection.transport.abort.assert_called_once()


def until_idle(server: Here, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while "colossalai_pending 0.0" not in httpx.get(f"{server.url}/metrics").text:
        assert time.monotonic() < deadline, "requests of clients that have left still run"


def test_sigterm_lets_answers_finish_and_takes_no_more() -> None:
    with running("--delay", "0.02") as server:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 60, "stream": True}
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2 if not rest[-1] else -1] == "data: [DONE]"
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health")
        assert server.process.wait(60) == 0  # a busy machine takes a while to end the ranks


def test_a_dead_rank_is_a_503_and_then_health_returns() -> None:
    with here(tp=2, options={"delay": 0.02}) as server:
        asked: list[Any] = []

        def ask(stream: bool) -> None:
            try:
                got = client(server).completions.create(
                    model="stand-in", prompt="x", max_tokens=400, stream=stream
                )
                asked.append("".join(c.text for e in got for c in e.choices) if stream else got)  # type: ignore[union-attr]
            except openai.APIError as error:
                asked.append(str(error))

        threads = [threading.Thread(target=ask, args=(i % 2 == 0,)) for i in range(6)]
        for thread in threads:
            thread.start()
        while "colossalai_pending 6.0" not in httpx.get(f"{server.url}/metrics").text:
            pass
        os.kill(server.service.pids[1], signal.SIGKILL)
        for thread in threads:
            thread.join(10)
        assert len(asked) == 6
        assert all("died: its process was ended by SIGKILL" in one for one in asked), asked
        until_ready(server.url)
        assert client(server).completions.create(model="stand-in", prompt="x", max_tokens=3).choices[
            0
        ].text == text("x", 3)


def test_a_slow_head_and_a_slow_body_are_cut_off() -> None:
    with here(body_timeout=0.5) as server:
        host, port = server.url.removeprefix("http://").split(":")
        for sent in (
            b"POST /generation HTTP/1.1\r\nhost: x\r\n",
            b"POST /generation HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{",
        ):
            with socket.create_connection((host, int(port)), timeout=15) as sock:
                sock.sendall(sent)
                got = b""
                while data := sock.recv(4096):
                    got += data
            assert got == b"" or b"408" in got.split(b"\r\n")[0]
        assert httpx.get(f"{server.url}/health").status_code == 200
