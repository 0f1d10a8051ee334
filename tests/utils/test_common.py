from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from colossalai.logging import DistributedLogger
from colossalai.utils import conditional_context, disposable, ensure_path_exists, print_rank_0


def test_only_the_first_rank_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print_rank_0("without a launcher")
    monkeypatch.setenv("RANK", "1")
    print_rank_0("not this")
    print_rank_0("nor this", logger=DistributedLogger("print"))
    monkeypatch.setenv("RANK", "0")
    print_rank_0("first")
    print_rank_0("logged", logger=DistributedLogger("print"))
    out, err = capsys.readouterr()
    assert out == "without a launcher\nfirst\n"
    assert "INFO: logged\n" in err
    assert "this" not in err.replace(__file__, "")


def test_parts_of_a_message_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")  # on every rank alike
    with pytest.raises(TypeError, match=r"one message, and a logger; the second argument is 0\.5: join"):
        print_rank_0("loss", 0.5)  # type: ignore[arg-type]


def test_a_context_can_be_off() -> None:
    events = []

    @contextmanager
    def context() -> Iterator[None]:
        events.append("in")
        yield
        events.append("out")

    with conditional_context(context(), enable=False):
        events.append("off")
    with conditional_context(context()):
        events.append("on")
    assert events == ["off", "in", "on", "out"]


def test_an_enabled_context_sees_the_error() -> None:
    with conditional_context(pytest.raises(ValueError, match="mine")):
        raise ValueError("mine")


def test_a_disposable_function_runs_once() -> None:
    calls = []

    @disposable
    def function(x: int) -> int:
        calls.append(x)
        return x

    assert (function(3), function(4)) == (3, None)
    assert calls == [3]
    assert function.__name__ == "function"


def test_the_folder_of_a_file_is_made(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b" / "file.pt"
    ensure_path_exists(str(file))
    ensure_path_exists(file)
    assert file.parent.is_dir()
    assert not file.exists()
