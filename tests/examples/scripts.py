"""Running the scripts of ``examples`` on ranks that already exist, on a CIFAR-10 of a few images."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import runpy
import sys
from pathlib import Path

import torch

from colossalai.testing import spawn

EXAMPLES = Path(__file__).parents[2] / "examples"

# A config of examples/image: quick to learn, and with features of the engine.
TINY_VIT = """
import torch
from titans.model import vit

BATCH_SIZE = 8
NUM_EPOCHS = 3
WARMUP_EPOCHS = 0
IMG_SIZE = 32
model = dict(type=vit.VisionTransformer, img_size=32, patch_size=16, num_classes=10, depth=1, num_heads=2,
             hidden_size=32, dropout=0.0)
optimizer = dict(type=torch.optim.AdamW, lr=1e-2)
gradient_accumulation = 2
clip_grad_norm = 1.0
"""


def write_cifar(folder: Path, per_batch: int = 32) -> None:
    """Batches in the format of CIFAR-10: one colour per class, with a little noise."""
    generator = torch.Generator().manual_seed(0)
    colours = torch.randint(40, 216, (10, 3, 1, 1), generator=generator)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        labels = torch.arange(per_batch) % 10
        noise = torch.randint(-20, 21, (per_batch, 3, 32, 32), generator=generator)
        images = (colours[labels] + noise).to(torch.uint8).flatten(1)
        (folder / name).write_bytes(pickle.dumps({b"data": images.numpy(), b"labels": labels.tolist()}))


def changed_config(example: Path, path: Path, *changes: tuple[str, str]) -> Path:
    """The config of ``example`` with these changes, written to ``path``."""
    text = (example / "config.py").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def run_script(name: str, *options: object, data: Path | None = None, nprocs: int = 1, rank: int = 0) -> str:
    """What ``colossalai run --nproc_per_node nprocs examples/name options`` shows of one rank."""
    arguments = [str(option) for option in options]
    # a minute would do, but for a machine that also does other work
    out = spawn(_run, nprocs, timeout=120, script=EXAMPLES / name, options=arguments, data=data)[rank]
    assert isinstance(out, str)
    return out


def _run(
    rank: int, world_size: int, port: int, script: Path, options: list[str], data: Path | None = None
) -> str:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks cannot share a GPU under NCCL
    os.environ["DATA"] = str(data)
    sys.path.insert(0, str(script.parent))  # as python does for a script
    sys.argv = [script.name, *options]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if end.code:  # spawn would lose what was printed before
                raise RuntimeError(f"exit code {end.code}\n{out.getvalue()}") from None
    return out.getvalue()


def help_of_all(rank: int, world_size: int, port: int, scripts: list[Path]) -> dict[str, str]:
    """The ``--help`` of each script; a module that two folders have by the same name is imported anew."""
    found = {}
    for script in scripts:
        modules, path = set(sys.modules), list(sys.path)
        found[str(script)] = _run(rank, world_size, port, script, ["--help"])
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if (file := getattr(sys.modules[name], "__file__", None)) and EXAMPLES in Path(file).parents:
                del sys.modules[name]
    return found
