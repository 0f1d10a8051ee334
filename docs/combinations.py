"""``python -m docs.combinations``: which plugin works with which precision, tensor mode and pipeline.

Every cell is tried: a small model takes two training steps on ranks of this machine's CPU.  What is refused
has the words of the error.  The tables on the pages ``combinations.md`` are written again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.mixed_precision import PRECISIONS
from colossalai.booster.plans import choose_plan
from colossalai.pipeline.schedule import SCHEDULES
from colossalai.testing import spawn
from docs.pages import ENGLISH
from docs.translated_tables import write_tables

PAGE = ENGLISH / "combinations.md"
PLUGINS = ("none", "ddp", "fsdp", "zero1", "zero2", "gemini", "gemini_cuda")
MODES = {"1d": (2, None), "2d": (4, None), "2.5d": (4, 1), "3d": (8, None)}
_FP8 = "on GPUs with fp8: NVIDIA Ada, Hopper, Blackwell"
Cells = dict[tuple[str, str], str]  # row and column -> nothing, or the words of the refusal


def _booster(plugin: str, precision: str | None = None) -> Booster:
    if plugin == "none":
        return Booster(device="cpu", mixed_precision=precision)
    made = {"plugin": plugin, "device": "cpu"} if plugin.startswith("gemini") else plugin
    if precision is None and plugin.startswith(("gemini", "zero")):
        made = {**(made if isinstance(made, dict) else {"plugin": made}), "precision": "fp32"}
    chosen = choose_plan(made)
    options: dict[str, Any] = {} if plugin.startswith("gemini") else {"device": "cpu"}
    return Booster(mixed_precision=precision, plugin=chosen.plugin, **options)


def _train(booster: Booster, model: nn.Module, batch: torch.Tensor) -> None:
    torch.manual_seed(0)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(2):
        optimizer.zero_grad()
        booster.backward(model(batch).float().square().mean(), optimizer)
        optimizer.step()


def _why(error: Exception) -> str:
    words = " ".join(str(error).split())
    if "needs a GPU with fp8" in words:
        return _FP8
    return f"{type(error).__name__}: " + re.sub(r"mixed_precision='\w+'", "this mixed_precision", words)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def try_precisions(rank: int, world_size: int, port: int) -> Cells:
    colossalai.launch_from_torch({}, backend="gloo", verbose=False)
    cells: Cells = {}
    for plugin in PLUGINS[1:]:
        for precision in PRECISIONS:
            try:
                _train(_booster(plugin, precision), _mlp(), torch.randn(8, 8))
                cells[plugin, precision] = ""
            except Exception as error:
                cells[plugin, precision] = _why(error)
    return cells


def try_mode(rank: int, world_size: int, port: int, mode: str, tensor: dict[str, Any]) -> Cells:
    colossalai.launch_from_torch({"parallel": {"tensor": tensor}}, backend="gloo", verbose=False)
    cells: Cells = {}
    for plugin in PLUGINS:
        model = nn.Sequential(
            colossalai.nn.Embedding(32, 16),
            colossalai.nn.Linear(16, 32),
            nn.GELU(),
            colossalai.nn.Linear(32, 16),
        )
        try:
            _train(_booster(plugin), model, colossalai.nn.partition_batch(torch.arange(32).view(8, 4)))
            cells[plugin, mode] = ""
        except Exception as error:
            cells[plugin, mode] = _why(error)
    return cells


def try_schedule(rank: int, world_size: int, port: int, schedule: str) -> Cells:
    chunks = 2 if schedule in ("interleaved", "zbv") else 1
    config = {
        "parallel": {"pipeline": {"size": 2, "schedule": schedule}},
        "NUM_MICRO_BATCHES": 2,
        "NUM_CHUNKS": chunks,
    }
    colossalai.launch_from_torch(config, backend="gloo", verbose=False)
    from colossalai.builder import build_pipeline_model

    cells: Cells = {}
    for plugin in PLUGINS:
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8) for _ in range(4)]
        try:
            model = build_pipeline_model(nn.Sequential(*layers), num_chunks=chunks, verbose=False)
            booster = _booster(plugin)
            model, optimizer, criterion, *_ = booster.boost(
                model, torch.optim.AdamW(model.parameters(), lr=1e-3), nn.MSELoss()
            )
            for _ in range(2):
                optimizer.zero_grad()
                batch = torch.randn(8, 8), torch.randn(8, 8)
                booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
                optimizer.step()
            cells[plugin, schedule] = ""
        except Exception as error:
            cells[plugin, schedule] = _why(error)
    return cells


def table(cells: Cells) -> Iterator[str]:
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    reasons: dict[str, str] = {}
    yield "| plugin | " + " | ".join(f"`{name}`" for name in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for row in rows:
        marks = []
        for column in columns:
            why = cells[row, column]
            letter = reasons.setdefault(why, chr(ord("a") + len(reasons))) if why else ""
            marks.append(f"{'yes' if why in ('', _FP8) else 'no'} ({letter})".removesuffix(" ()"))
        yield f"| `{row}` | " + " | ".join(marks) + " |"
    for why, letter in reasons.items():
        yield ""
        yield f"({letter}) {why}" if why == _FP8 else f"({letter}) `{why}`"


def tables() -> dict[str, str]:
    """The tables of the page by name."""
    modes: Cells = {}
    for mode, (size, depth) in MODES.items():
        tensor = {"size": size, "mode": mode} | ({"depth": depth} if depth else {})
        modes |= spawn(try_mode, size, mode=mode, tensor=tensor)[0]
    schedules: Cells = {}
    for schedule in SCHEDULES:
        schedules |= spawn(try_schedule, 2, schedule=schedule)[0]
    cells = {"precisions": spawn(try_precisions, 1)[0], "modes": modes, "schedules": schedules}
    return {name: "\n".join(table(found)) + "\n" for name, found in cells.items()}


def written(text: str) -> str:
    """The page with the tables of this code."""
    for name, content in tables().items():
        start, end = f"<!-- {name}: python -m docs.combinations -->\n", f"<!-- end of {name} -->"
        head, tail = text.split(start)[0], text.split(end)[1]
        text = f"{head}{start}\n{content}\n{end}{tail}"
    return text


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    write_tables(PAGE.stem)
