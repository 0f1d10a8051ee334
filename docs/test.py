"""``python -m docs.test [PAGE ...]``: run what pages show, and compare what it prints.

A page becomes its files (see `docs.pages`) in an empty folder, where its commands are run.  Scripts
run on ranks of `colossalai.testing.spawn` on the CPU, which start in a fraction of a second; everything else
is a command of the shell.  A page of another language is run as the English one, whose blocks it repeats.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from colossalai.testing import free_port, spawn
from docs.pages import ENGLISH, ROOT, SOURCE, Page, pages

_JOB = re.compile(r"(?:colossalai run|torchrun) --nproc_per_node (\d+) (.*)")
_ONE = re.compile(r"python (?!-)(.*)")
_TESTS = re.compile(r"pytest (.*)")
_LIMIT = 300


class WrongPage(AssertionError):
    """A page whose code fails, or does not print what the page shows."""


def run(page: Page, folder: Path) -> str:
    """Run the commands of ``page`` in ``folder``; return what they printed, or raise ``WrongPage``."""
    for name, text in page.files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    printed = ""
    for command in page.commands:
        try:
            printed += _run(command, folder)
        except Exception as error:
            raise WrongPage(f"{page.path}: `{command}`: {error}") from None
    for shown in page.outputs() if page.commands else ():
        if missing := first_missing(shown, printed.splitlines()):
            raise WrongPage(f"{page.path} shows {missing!r}, which is not printed at its place:\n{printed}")
    return printed


def first_missing(shown: list[str], printed: list[str]) -> str | None:
    """The first line of ``shown`` that does not come, after those before it, in ``printed``."""
    rest = iter(line.rstrip() for line in printed)
    for line in filter(None, (line.rstrip() for line in shown)):
        pattern = re.sub(r"[\[\]*?]", lambda found: f"[{found[0]}]", line).replace("...", "*")
        if not any(fnmatch.fnmatchcase(candidate, pattern) for candidate in rest):
            return line
    return None


def _run(command: str, folder: Path) -> str:
    if job := _JOB.fullmatch(command):
        return "".join(
            spawn(_script, int(job[1]), timeout=_LIMIT / 2, folder=folder, words=shlex.split(job[2]))
        )
    if one := _ONE.fullmatch(command):
        task = partial(_alone, environment=dict(os.environ), folder=folder, words=shlex.split(one[1]))
        return "".join(spawn(task, 1, timeout=_LIMIT / 2))
    if tests := _TESTS.fullmatch(command):
        return _run_tests(folder, shlex.split(tests[1]))
    command = re.sub(r"colossalai run(?= )", f"colossalai run --master_port {free_port()}", command, count=1)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=_LIMIT
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def _run_tests(folder: Path, words: list[str]) -> str:
    """Run tests in this process, whose ranks start quickly."""
    import pytest

    plain = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(folder), "-c", os.devnull]
    here = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = pytest.main([*plain, *words])
    finally:
        os.chdir(here)
    if code:
        raise RuntimeError(f"exit code {code}\n{out.getvalue()}")
    return out.getvalue()


def _script(rank: int, world_size: int, port: int, folder: Path, words: list[str]) -> str:
    """What a rank prints that runs the script ``words[0]``."""
    os.chdir(folder)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks cannot share a GPU under NCCL
    sys.path.insert(0, str(folder))  # as python does for a script
    sys.argv = list(words)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(words[0], run_name="__main__")
    return out.getvalue()


def _alone(
    rank: int, world_size: int, port: int, environment: dict[str, str], folder: Path, words: list[str]
) -> str:
    """What a script prints that no launcher has started: as for a reader, no variable names its rank."""
    os.environ.clear()
    os.environ.update(environment)
    return _script(rank, world_size, port, folder, words)


def page_named(name: str) -> Page:
    """The page by its name or path; the English one for that of another language."""
    path = Path(name).resolve() if name.endswith(".md") else ENGLISH / f"{name}.md"
    if path.is_relative_to(SOURCE):
        path = ENGLISH / Path(*path.relative_to(SOURCE).parts[1:])
    if not path.is_file():
        known = ", ".join(page.name for page in pages())
        raise SystemExit(f"there is no page {name!r}; known: {known}, or the path of a file")
    return Page.read(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.test", description=(__doc__ or "").split(":", 1)[1])
    parser.add_argument("page", nargs="*", help="its name, such as `booster`, or its path; default: all")
    parser.add_argument("--folder", type=Path, help="where to write the files of the page, which stay there")
    options = parser.parse_args()
    chosen = [page_named(name) for name in options.page] or [page for page in pages() if page.commands]
    wrong = 0
    for page in chosen:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as scratch:
            folder = (options.folder or Path(scratch)).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            try:
                printed = run(page, folder)
            except WrongPage as error:
                wrong += 1
                print(f"{page.name}: WRONG\n{error}", flush=True)
                continue
        if options.page:
            print(printed, end="")
        print(f"{page.name}: {len(page.commands)} commands, {time.perf_counter() - start:.1f} s", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
