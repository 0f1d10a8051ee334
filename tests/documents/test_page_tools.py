"""What the tools of the pages refuse, and what they write above blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import check
from docs.pages import ENGLISH, Page
from docs.test import WrongPage, run
from docs.titles import with_titles

RUN = "<!-- doc-test-command: python page.py -->\n"


def _page(text: str) -> Page:
    return Page(ENGLISH / "page.md", text)


def _block(code: str, title: str = "") -> str:
    return f'```python title="{title}"\n{code}\n```\n' if title else f"```python\n{code}\n```\n"


SHOWN = '```text title="Output"\ntwo\n```\n'


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("print(1 / 0)", "division by zero"),
        ("print('three')", "shows 'two', which is not printed"),
        ("import colossalai\ncolossalai.launch_from_torch({})", "they come from torchrun or colossalai run"),
    ],
    ids=["fails", "prints something else", "needs a launcher"],
)
def test_a_broken_block_is_found(code: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(WrongPage, match=why):
        run(_page(_block(code) + SHOWN + RUN), tmp_path)


def test_outputs_come_in_their_order(tmp_path: Path) -> None:
    assert run(_page(_block("print('one')\nprint('two')") + SHOWN + RUN), tmp_path) == "one\ntwo\n"
    shown = SHOWN.replace("two", "two\none")
    with pytest.raises(WrongPage, match="shows 'one'"):
        run(_page(_block("print('one')\nprint('two')") + shown + RUN), tmp_path)


EXCUSED = "<!-- doc-test-ignore-start: a reason -->\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (_block("pass"), "no doc-test-command runs this block"),
        ("```sh\nrm -rf runs\n```\n", "is not run by the page"),
        ("```sh\ncolossalai run --nproc_per_node 2 page.py\n```\n", "is not run by the page"),
        (EXCUSED + "```sh\ncolossalai run --procs 2 page.py\n```\n", "No such option '--procs'"),
        ("<!-- doc-test-ignore-start -->\n" + _block("pass"), "needs a reason"),
    ],
)
def test_code_that_nobody_runs_is_a_problem(text: str, problem: str) -> None:
    assert [found for found in check.code(_page(text)) if problem in found]


def test_a_link_that_leads_nowhere_is_a_problem() -> None:
    links = "[a](launch.md) [b](launch.md#in-the-script) [c](lunch.md) [d](launch.md#nowhere)"
    assert [problem.split(" leads")[0] for problem in check.links(_page(links))] == [
        "the link lunch.md",
        "the link launch.md#nowhere",
    ]


def test_titles_tell_the_file_and_the_command() -> None:
    commands = RUN + "<!-- doc-test-command: env OMP_NUM_THREADS=1 python other.py -->\n"
    text = _block("a") + SHOWN + _block("b") + "```sh\npython page.py\n```\n" + SHOWN
    text += _block("c", "other.py") + SHOWN + commands
    titled = with_titles(_page(text), "en")
    assert [line.partition("title=")[2] for line in titled.splitlines() if "title=" in line] == [
        '"page.py"',
        '"Output of python page.py"',
        '"page.py, continued"',
        '"Output"',  # of the command above it
        '"other.py"',
        '"Output of python other.py"',
    ]
    assert '"python page.py 的输出"' in with_titles(_page(text), "zh-Hans")
    assert len(titled.splitlines()) == len(text.splitlines())
