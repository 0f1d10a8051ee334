"""Without the extra the package imports, and says what is missing."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("fastapi", "uvicorn", "prometheus_client", "starlette", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import energonai
import colossalai.serving
from click.testing import CliRunner
from colossalai.cli.app import cli
done = CliRunner().invoke(cli, ["serve", "nowhere"])
print(done.exit_code, done.output)
"""


def test_the_package_imports_without_the_extra() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "1 Error: serving over HTTP needs fastapi, which is not installed: pip install"
    )
