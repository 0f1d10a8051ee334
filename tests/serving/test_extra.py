"""Without the extra the package imports, and says what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HIDE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""
CODE = """
import energonai
import colossalai.serving
from click.testing import CliRunner
from colossalai.cli.app import cli
done = CliRunner().invoke(cli, ["serve", "nowhere"])
print(done.exit_code, done.output)
"""


COLLECT = """
import pytest
pytest.main(["--collect-only", "-q", "-rs", "-p", "no:cacheprovider", *sys.argv[1:]])
"""


def without(packages: list[str], code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What a program does where ``packages`` are not installed."""
    program = f"hidden = {packages}\n{HIDE}{code}"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=200
    )


def test_the_package_imports_without_the_extra() -> None:
    done = without(["fastapi", "uvicorn", "prometheus_client", "starlette", "transformers"], CODE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "1 Error: serving over HTTP needs fastapi, which is not installed: pip install"
    )


@pytest.mark.parametrize(
    ("packages", "modules", "command"),
    [
        (
            ["fastapi", "httpx"],
            ["tests/serving/test_http.py", "tests/examples/test_serving.py"],
            "'.[serve]'",
        ),
        (["pymdownx"], ["tests/documents/test_own_pages.py"], "docs/requirements-doc-test.txt"),
    ],
)
def test_tests_of_a_missing_package_are_skipped_with_its_command(
    packages: list[str], modules: list[str], command: str
) -> None:
    done = without(packages, COLLECT, *(str(ROOT / module) for module in modules))
    assert done.stdout.count("SKIPPED [1]") == len(modules), done.stdout[-2000:] + done.stderr[-2000:]
    assert "needs `pip install" in done.stdout
    assert command in done.stdout
    assert "error" not in done.stdout.splitlines()[-1]
