"""Habits of saving and loading."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.habits.habit import habit
from tests.habits.models import build
from tests.habits.script import Script

THEME = "Saving and loading"


def _start(s: Script) -> dict[str, Any]:
    """The weights that the serial model begins with, as a file of an earlier run holds them."""
    return copy.deepcopy(build(s.habit.model).state_dict())


def _path(s: Script, name: str) -> Path:
    return s.folder / f"{s.rank}-{name}"


@habit(THEME, "`torch.save(model.state_dict(), path)` on every rank")
def save_state_dict(s: Script) -> None:
    s.train()
    torch.save(s.model.state_dict(), _path(s, "model.pt"))
    s.state("file", torch.load(_path(s, "model.pt"), weights_only=False))
    s.train()


@habit(
    THEME,
    "`if rank == 0: torch.save(model.state_dict(), path)`",
    instead="`booster.save_model(model, path)`, which every rank calls",
    breaks=True,
)
def save_on_rank_0(s: Script) -> None:
    s.train()
    if s.rank == 0:
        torch.save(s.model.state_dict(), _path(s, "model.pt"))
        s.state("file", torch.load(_path(s, "model.pt"), weights_only=False), alone=True)
    else:
        s.state("file", None)
    s.train()


@habit(THEME, "`torch.save(model.unwrap().state_dict(), path)`")
def save_unwrapped(s: Script) -> None:
    s.train()
    torch.save(s.unwrap().state_dict(), _path(s, "model.pt"))
    s.state("file", torch.load(_path(s, "model.pt"), weights_only=False))
    s.train()


@habit(THEME, "`torch.save(model, path)`: the whole object", instead="`booster.save_model(model, path)`")
def save_object(s: Script) -> None:
    s.train()
    torch.save(s.model, _path(s, "model.pt"))
    loaded = torch.load(_path(s, "model.pt"), weights_only=False)
    s.state("file", dict(loaded.state_dict()))
    s.train()


@habit(THEME, "`booster.save_model(model, path)`, read by `torch.load`")
def booster_save_model(s: Script) -> None:
    s.train()
    path = s.folder / "model.pt"
    if s.serial:
        torch.save(s.model.state_dict(), path)
    else:
        s.save_model(path)  # type: ignore[attr-defined]
    s.see("file", dict(torch.load(path, weights_only=True)))
    s.train()


@habit(THEME, "`model.load_state_dict(state)` in the middle of training")
def load_state_dict(s: Script) -> None:
    s.train()
    s.model.load_state_dict(_start(s))
    s.train(2)


@habit(THEME, "`model.unwrap().load_state_dict(state)`")
def load_unwrapped(s: Script) -> None:
    s.train()
    s.unwrap().load_state_dict(_start(s))
    s.train(2)


@habit(THEME, "the best weights kept and loaded at the end: `best = copy.deepcopy(model.state_dict())`")
def keep_best(s: Script) -> None:
    s.train()
    best = copy.deepcopy(s.model.state_dict())
    s.train()
    s.model.load_state_dict(best)
    s.train()


@habit(
    THEME,
    "`booster.save_model`, `save_optimizer` and the `load_*` of both, in the middle of training",
    engine=False,
)
def booster_round(s: Script) -> None:
    def save(booster: Any, folder: Path) -> None:
        booster.save_model(s.model, folder / "model.pt")
        booster.save_optimizer(s.optimizer, folder / "optimizer.pt")

    def load(booster: Any, folder: Path) -> None:
        booster.load_model(s.model, folder / "model.pt")
        booster.load_optimizer(s.optimizer, folder / "optimizer.pt")

    _go_back(s, save, load)


def _go_back(s: Script, save: Callable[[Any, Path], None], load: Callable[[Any, Path], None]) -> None:
    """Train, go back to where a booster has saved, and train again; plain PyTorch goes back by its state
    dicts.
    """
    s.train()
    if s.serial:
        kept = copy.deepcopy((s.model.state_dict(), s.optimizer.state_dict()))
        s.train()
        s.model.load_state_dict(kept[0])
        s.optimizer.load_state_dict(kept[1])
    else:
        booster = s.booster  # type: ignore[attr-defined]
        save(booster, s.folder)
        s.train()
        load(booster, s.folder)
    s.train()


@habit(
    THEME,
    "`booster.save(path)` and `booster.load(path)` in the middle of training",
    optimizer="adam",
    engine=False,
)
def booster_save_load(s: Script) -> None:
    _go_back(s, lambda b, folder: b.save(folder / "run"), lambda b, folder: b.load(folder / "run"))


@habit(THEME, "`model.save_pretrained(folder)`", model="gpt2")
def save_pretrained(s: Script) -> None:
    s.train()
    _pretrained(s, s.model)
    s.train()


@habit(THEME, "`model.unwrap().save_pretrained(folder)`", model="gpt2")
def save_pretrained_unwrapped(s: Script) -> None:
    s.train()
    _pretrained(s, s.unwrap())
    s.train()


def _pretrained(s: Script, model: Any) -> None:
    from safetensors.torch import load_file

    folder = s.folder / "pretrained"
    model.save_pretrained(folder)
    writes = dist.get_rank() == 0  # transformers asks torch, also in the serial script
    s.state(
        "file",
        load_file(folder / "model.safetensors") if writes else (model.state_dict() if s.serial else None),
    )


@habit(THEME, "`torch.save(optimizer.state_dict(), path)` on every rank", optimizer="adam")
def save_optimizer(s: Script) -> None:
    s.train()
    torch.save(s.optimizer.state_dict(), _path(s, "optimizer.pt"))
    s.train()
    s.optimizer.load_state_dict(torch.load(_path(s, "optimizer.pt"), weights_only=False))
    s.train()


@habit(THEME, "`nn.Module.load_state_dict(torch.load(path))` of another run before `boost`", prepares=True)
def load_before(s: Script) -> None:
    model = s.build()
    state = {name: p.detach() + 0.01 for name, p in model.state_dict().items()}
    nn.Module.load_state_dict(model, state)
    s.prepare(model)
    s.train(2)
