from __future__ import annotations

import inspect
import io
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from colossalai.logging import (
    DistributedLogger,
    disable_existing_loggers,
    get_dist_logger,
    set_rank_resolver,
)
from colossalai.testing import spawn


@pytest.fixture
def logger(request: pytest.FixtureRequest) -> DistributedLogger:
    return DistributedLogger(request.node.name)


@pytest.fixture
def resolver() -> Iterator[dict[str, int]]:
    ranks: dict[str, int] = {}
    set_rank_resolver(lambda mode: ranks[mode])
    yield ranks
    set_rank_resolver(None)


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_a_call_writes_one_line_and_a_file_says_where_it_was_made(
    logger: DistributedLogger, level: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    logger.log_to_file(tmp_path)
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    getattr(logger, level)("hello 100%")
    head = f"colossalai - {logger.name} - {level.upper()}: "
    place = f"({__file__}:{line} test_a_call_writes_one_line_and_a_file_says_where_it_was_made)"
    assert capsys.readouterr().err.splitlines() == [head + "hello 100%"]
    assert (tmp_path / "rank_0.log").read_text().splitlines() == [f"{head}hello 100% {place}"]


def test_one_logger_per_name() -> None:
    assert get_dist_logger() is get_dist_logger("colossalai")
    assert get_dist_logger("another") is not get_dist_logger()


def test_nothing_is_written_twice(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(root)
    try:
        DistributedLogger("twice")
        DistributedLogger("twice").info("once")
    finally:
        logging.getLogger().removeHandler(root)
    assert capsys.readouterr().err.count("once") == 1


def test_a_users_own_handler_stays() -> None:
    logging.getLogger("shared").addHandler(own := logging.StreamHandler(io.StringIO()))
    logger = DistributedLogger("shared")
    logger = DistributedLogger("shared")
    logger.debug("not this: the level of the console holds")
    logger.info("heard")
    assert own.stream.getvalue().splitlines() == ["heard"]
    assert len(logging.getLogger("shared").handlers) == 2


def test_only_the_named_ranks_log(
    logger: DistributedLogger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "2")
    logger.info("for the others", ranks=[0, 1])
    logger.info("for nobody", ranks=[])
    assert capsys.readouterr().err == ""
    logger.info("for me", ranks=[0, 2])
    logger.info("for all")
    assert [line.rpartition(": ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "for me",
        "for all",
    ]


def test_ranks_are_counted_within_the_parallel_mode(
    logger: DistributedLogger,
    resolver: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", "5")
    resolver["tensor"] = 1
    logger.info("no", parallel_mode="tensor", ranks=[0, 5])
    logger.info("no", ranks=[1])
    assert capsys.readouterr().err == ""
    logger.info("yes", "tensor", [1])
    logger.info("yes", ranks=[5])
    logger.info("yes", parallel_mode="unknown to the resolver, but not needed")
    assert capsys.readouterr().err.count(": yes") == 3


def test_without_a_resolver_every_mode_has_the_global_rank(
    logger: DistributedLogger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    logger.info("no", "tensor", [0])
    logger.info("yes", "tensor", [1])
    assert "no" not in capsys.readouterr().err.split()


def test_levels_of_console_and_file_are_separate(
    logger: DistributedLogger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger.debug("too detailed")
    logger.log_to_file(tmp_path, level="DEBUG")
    logger.set_level("error")
    logger.debug("detail")
    logger.warning("careful")
    logger.error("broken")
    assert capsys.readouterr().err == f"colossalai - {logger.name} - ERROR: broken\n"
    written = (tmp_path / "rank_0.log").read_text().splitlines()
    assert [line.rpartition(": ")[2].split()[0] for line in written] == ["detail", "careful", "broken"]


def test_a_warning_is_given_once(logger: DistributedLogger, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        logger.warning_once("slow path")
        logger.warning_once("old name")
    err = capsys.readouterr().err
    assert err.count("WARNING: slow path") == err.count("WARNING: old name") == 1


def test_a_terminal_gets_the_rich_console(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "200")
    logger = DistributedLogger("rich")
    monkeypatch.setattr(sys, "stderr", later := Terminal())
    logger.warning("a [red]list[/red]: [0]")
    assert "colossalai - rich - WARNING: a [red]list[/red]: [" in _without_colours(later.getvalue())
    assert "\x1b[" in later.getvalue()


def test_a_file_is_opened_once_and_appended_or_replaced(logger: DistributedLogger, tmp_path: Path) -> None:
    logger.log_to_file(tmp_path / "new" / "folder", suffix="train")
    logger.info("first")
    logger.log_to_file(tmp_path / "new" / "folder", suffix="train")
    logger.info("second")
    text = (tmp_path / "new" / "folder" / "rank_0_train.log").read_text()
    assert text.count(": first") == text.count(": second") == 1
    logger.log_to_file(tmp_path / "new" / "folder", mode="w", suffix="train")
    assert (tmp_path / "new" / "folder" / "rank_0_train.log").read_text() == ""


def _log_on_two_ranks(rank: int, world_size: int, port: int, folder: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    logger = get_dist_logger()
    logger.log_to_file(folder)
    logger.info("from all")
    logger.info("from the first", ranks=[0])


def test_each_rank_has_its_file(tmp_path: Path) -> None:
    spawn(_log_on_two_ranks, 2, folder=str(tmp_path))
    texts = [(tmp_path / f"rank_{rank}.log").read_text() for rank in (0, 1)]
    assert [text.count("from all") for text in texts] == [1, 1]
    assert [text.count("from the first") for text in texts] == [1, 0]


@pytest.fixture
def other_loggers() -> Iterator[dict[str, logging.Logger]]:
    loggers = {name: logging.getLogger(name) for name in ("colossalai.part", "lib", "lib.part", "library")}
    everyone = [item for item in logging.root.manager.loggerDict.values() if isinstance(item, logging.Logger)]
    levels = [(logger, logger.level) for logger in everyone]
    for logger in loggers.values():
        logger.setLevel(logging.DEBUG)
    yield loggers
    for logger, level in levels:  # those of the package and of libraries are silenced too
        logger.setLevel(level)


def test_other_loggers_are_silenced(other_loggers: dict[str, logging.Logger]) -> None:
    other_loggers["lib"].setLevel(logging.ERROR)
    disable_existing_loggers()
    assert {name: logger.level for name, logger in other_loggers.items()} == {
        "colossalai.part": logging.DEBUG,
        "lib": logging.ERROR,
        "lib.part": logging.WARNING,
        "library": logging.WARNING,
    }


def test_only_some_loggers_are_silenced(other_loggers: dict[str, logging.Logger]) -> None:
    disable_existing_loggers(include=["lib", "colossalai"], exclude=["lib.part"])
    assert {name: logger.level for name, logger in other_loggers.items()} == {
        "colossalai.part": logging.WARNING,
        "lib": logging.WARNING,
        "lib.part": logging.DEBUG,
        "library": logging.DEBUG,
    }


def test_bad_arguments_are_named(logger: DistributedLogger, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"ranks is a list .* got 0; write ranks=\[0\]"):
        logger.info("x", ranks=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there is no log level 'warnings'; did you mean 'WARNING'"):
        logger.set_level("warnings")
    with pytest.raises(ValueError, match="no log level 'loud'; use one of DEBUG, INFO"):
        logger.log_to_file(tmp_path, level="loud")
    with pytest.raises(ValueError, match=r"mode 'a' \(append\) or 'w' \(replace\), got 'r'"):
        logger.log_to_file(tmp_path, mode="r")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"needs a directory .*file is a file"):
        logger.log_to_file(tmp_path / "file")
    with pytest.raises(TypeError, match=r"exclude is a list of logger names.*write exclude=\['lib'\]"):
        disable_existing_loggers(exclude="lib")
    with pytest.raises(TypeError, match="rank resolver must be a function of the parallel mode, got 0"):
        set_rank_resolver(0)  # type: ignore[arg-type]


def _without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
