"""Train and serve large neural networks on PyTorch; every parallel plan equals the serial model.

The names below load on first use, so that ``import colossalai`` costs little more than ``import torch``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from colossalai._version import __version__

if TYPE_CHECKING:
    from colossalai.booster import Booster as Booster
    from colossalai.checkpoint_io import save_pretrained as save_pretrained
    from colossalai.engine.initialization import initialize as initialize
    from colossalai.launchers import get_default_parser as get_default_parser
    from colossalai.launchers import launch as launch
    from colossalai.launchers import launch_from_openmpi as launch_from_openmpi
    from colossalai.launchers import launch_from_slurm as launch_from_slurm
    from colossalai.launchers import launch_from_torch as launch_from_torch

_HOME = {
    "Booster": "colossalai.booster",
    "get_default_parser": "colossalai.launchers",
    "initialize": "colossalai.engine.initialization",
    "launch": "colossalai.launchers",
    "launch_from_openmpi": "colossalai.launchers",
    "launch_from_slurm": "colossalai.launchers",
    "launch_from_torch": "colossalai.launchers",
    "save_pretrained": "colossalai.checkpoint_io",
}

__all__ = [
    "Booster",
    "__version__",
    "get_default_parser",
    "initialize",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "save_pretrained",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    try:  # `import colossalai; colossalai.constants...`: documented use of subpackages without importing them
        return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
