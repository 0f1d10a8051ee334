"""What importing the package costs and needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEAVY = (
    "torchvision",
    "timm",
    "transformers",
    "matplotlib",
    "rich",
    "triton",
    "torch._dynamo",
    "torch._inductor",
)

LIGHT = """
import sys
import torch

before = set(sys.modules)
import colossalai
import colossalai.booster, colossalai.engine, colossalai.nn, colossalai.pipeline, colossalai.trainer

print("\\n".join(set(sys.modules) - before))
"""

# Each is imported in a process of its own, forked after torch is loaded: as clean as a new interpreter, and
# faster.
ALONE = """
import importlib, os, pkgutil, sys, traceback
import torch, torch.distributed.tensor

class Absent:
    def find_spec(self, name, path=None, target=None):
        optional = ("torchvision", "timm", "transformers", "matplotlib", "apex", "flash_attn")
        if name.partition(".")[0] in optional:
            raise ModuleNotFoundError(f"No module named {name!r}: it is optional, import it where it is used")

sys.meta_path.insert(0, Absent())

def packages(folder, name):
    yield name
    for module in pkgutil.iter_modules([folder]):
        inner = f"{name}.{module.name}"
        if module.ispkg:
            yield from packages(os.path.join(folder, module.name), inner)
        elif "." not in name and not module.name.startswith("_"):
            yield inner

failed, running = 0, 0

def reap():
    global failed, running
    failed += os.wait()[1] != 0
    running -= 1

for root in ("colossalai", "titans"):
    for name in packages(os.path.dirname(importlib.util.find_spec(root).origin), root):
        print(name, flush=True)
        if running == 2:
            reap()
        running += 1
        pid = os.fork()
        if pid == 0:
            try:
                importlib.import_module(name)
            except BaseException:
                print(f"--- {name}", file=sys.stderr)
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
while running:
    reap()
sys.exit(failed)
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False
    )


def test_importing_the_package_imports_nothing_heavy() -> None:
    result = run(LIGHT)
    assert result.returncode == 0, result.stderr
    loaded = result.stdout.split()
    assert {"colossalai", "colossalai.nn.attention"} <= set(loaded)
    assert [m for m in loaded if any(m == heavy or m.startswith(f"{heavy}.") for heavy in HEAVY)] == []


def test_every_package_can_be_imported_first_and_without_optional_packages() -> None:
    result = run(ALONE)
    assert result.returncode == 0, result.stderr
    assert {"colossalai.core", "colossalai.testing", "titans"} <= set(result.stdout.split()), (
        "the walk found them"
    )
