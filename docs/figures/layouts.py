"""Pictures of layouts, which are asked of the code that cuts tensors."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import torch

import colossalai
from colossalai.context import ParallelMode
from colossalai.context.parallel_config import rank_table
from colossalai.mesh import Layout
from colossalai.mesh.mesh import mesh_coordinates
from colossalai.nn.modes import TensorParallel, mode_1d, mode_2d, mode_2p5d, mode_3d
from colossalai.testing import spawn
from docs.figures.svg import COLOURS, GREY, Picture

CELL = 18
PLAN = {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}


def mesh(folder: Path) -> None:
    """Eight ranks on the axes of a hybrid plan, and the groups of each axis."""
    groups = rank_table(PLAN, 8)
    picture = Picture(780, 300, "Eight ranks on three axes: data, pipeline, tensor")
    shown = (
        (ParallelMode.DATA, "data: same weights, other samples"),
        (ParallelMode.PIPELINE, "pipeline: other layers"),
        (ParallelMode.TENSOR, "tensor: other parts of each weight"),
    )
    picture.words(20, 30, 'parallel=dict(pipeline=2, tensor=dict(size=2, mode="1d")) on 8 ranks', bold=True)
    for column, (mode, title) in enumerate(shown):
        left = 20 + column * 250
        picture.words(left, 62, title, size=12)
        for rank in range(8):
            data, pipe, tensor = rank // 4, rank // 2 % 2, rank % 2
            (group,) = [i for i, ranks in enumerate(groups[mode]) if rank in ranks]
            x, y = left + tensor * 58 + data * 122, 80 + pipe * 58
            picture.box(x, y, 52, 52, COLOURS[group], f"rank {rank}", size=11)
        for data in range(2):
            picture.words(left + data * 122 + 55, 212, f"replica {data}", size=10, at="middle", ink="#5f6368")
        names = " ".join("(" + ",".join(map(str, ranks)) + ")" for ranks in groups[mode])
        picture.words(left, 238, names, size=11)
    picture.words(20, 275, "One colour is one process group. Rows are the stages of the pipeline.", size=12)
    picture.save(folder, "mesh")


def _pieces(
    axes: dict[str, int], layout: Layout, shape: tuple[int, int]
) -> dict[tuple[int, int, int, int], list[int]]:
    """The rectangles of a matrix (first row, first column, rows, columns), and the ranks that hold each."""
    held: dict[tuple[int, int, int, int], list[int]] = {}
    world = 1
    for size in axes.values():
        world *= size
    dims = (layout.dims[0], layout.dims[-1])
    for rank in range(world):
        place, starts, sizes = mesh_coordinates(axes, rank), [], []
        for names, length in zip(dims, shape, strict=True):
            index = parts = 0
            parts = 1
            for name in names:
                index, parts = index * axes[name] + place[name], parts * axes[name]
            starts.append(index * (length // parts))
            sizes.append(length // parts)
        held.setdefault((*starts, *sizes), []).append(rank)  # type: ignore[arg-type]
    return held


def _matrix(picture: Picture, x: float, y: float, tp: TensorParallel, layout: Layout, title: str) -> None:
    picture.words(x, y - 6, title, size=11)
    axes = dict(tp.axes)
    for (row, column, rows, columns), ranks in _pieces(axes, layout, (8, 8)).items():
        everyone = len(ranks) == tp.size
        colour = GREY if everyone else COLOURS[ranks[0] % len(COLOURS)]
        words = "all" if everyone else ",".join(map(str, ranks))
        place = (x + column * CELL, y + row * CELL, columns * CELL, rows * CELL)
        picture.box(*place, colour, words, size=10 if len(words) < 5 and columns > 1 else 8)


def cuts(folder: Path) -> None:
    """What each rank holds of the product X A = Y in every tensor mode."""
    modes = (
        ("1D on 4 ranks: only the weight is cut", mode_1d(4)),
        ("2D on 4 ranks: everything is cut into 2 x 2", mode_2d(2)),
        ("2.5D on 8 ranks: 2 layers of 2 x 2, each with a part of the rows of X", mode_2p5d(2, 2)),
        ("3D on 8 ranks: each of the three is cut into 8", mode_3d(2)),
    )
    picture = Picture(640, 4 * 210 + 20, "X A = Y in the tensor modes 1D, 2D, 2.5D and 3D")
    for number, (title, tp) in enumerate(modes):
        top = 62 + number * 210
        picture.words(20, top - 28, title, bold=True, size=13)
        _matrix(picture, 20, top, tp, tp.hidden, "X (samples, features)")
        picture.words(186, top + 78, "\u00d7", size=20)
        _matrix(picture, 220, top, tp, tp.expand, "A (weight)")
        picture.words(388, top + 78, "=", size=20)
        _matrix(picture, 424, top, tp, tp.inner, "Y")
    picture.save(folder, "cuts")


def _saved(rank: int, world_size: int, port: int, folder: Path, plan: str) -> None:
    from colossalai.booster import Booster
    from colossalai.booster.plugin import GeminiPlugin, TorchDDPPlugin

    os.chdir(folder)
    parallel = {"tensor": {"size": 4, "mode": "2d"}} if plan == "2d" else {}
    colossalai.launch_from_torch({"parallel": parallel}, backend="gloo", verbose=False)
    plugin = TorchDDPPlugin() if plan == "2d" else GeminiPlugin(device="cpu", precision="fp32")
    booster = Booster(plugin=plugin) if plan == "gemini" else Booster(device="cpu", plugin=plugin)
    linear = colossalai.nn.Linear if plan == "2d" else torch.nn.Linear
    model = torch.nn.Sequential(linear(16, 12, bias=False))
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.save(plan)


def checkpoint(folder: Path) -> None:
    """The boxes of one weight as two plans write them, and what one rank reads."""
    picture = Picture(660, 300, "One weight in two checkpoints: boxes of a 2D plan and of Gemini")
    with tempfile.TemporaryDirectory() as scratch:
        for column, (plan, title) in enumerate(
            (("2d", "written by 4 ranks, tensor mode 2D"), ("gemini", "written by 4 ranks under Gemini"))
        ):
            spawn(_saved, 4, folder=Path(scratch), plan=plan)
            tensors = json.loads((Path(scratch) / plan / "manifest.json").read_text())["tensors"]
            weight = tensors["model/0.weight"]
            left = 20 + column * 330
            picture.words(left, 30, title, bold=True, size=13)
            for start, size, file, _ in weight["boxes"]:
                x, y = left + start[1] * CELL, 46 + start[0] * CELL
                picture.box(x, y, size[1] * CELL, size[0] * CELL, COLOURS[file % 8], f"file {file}", size=10)
    picture.words(
        20,
        284,
        "A weight of 12 x 16. A reader takes from every file what it has in common with its own part.",
        size=12,
    )
    picture.save(folder, "checkpoint")


def all_layouts(folder: Path) -> None:
    mesh(folder)
    cuts(folder)
    checkpoint(folder)
