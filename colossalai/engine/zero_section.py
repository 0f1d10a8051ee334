"""The section ``zero`` of a config: which plugin it means.

``zero = dict(level=2, overlap_comm=True, clip_grad=1.0, cpu_offload=True)``: the names are those of the documents, or
the plugin's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from colossalai.booster.plugin import LowLevelZeroPlugin, Plugin
from colossalai.context.config import ConfigException

# The names of the documents, by that of the plugin.
NAMES = {"overlap_comm": "overlap_communication", "clip_grad": "max_norm"}
LEVELS = (1, 2)


def check_zero(section: Mapping[str, Any]) -> None:
    """Refuse what no plugin takes, before anything is built."""
    level = section.get("level")
    if level not in LEVELS:
        raise ConfigException(f"config section 'zero' needs level=1 or level=2, got level={level!r}")
    known = [
        n for n in inspect.signature(LowLevelZeroPlugin).parameters if n not in ("stage", "process_group")
    ]
    for name in section:
        if name not in (*known, *NAMES, "level", "dynamic_loss_scale"):
            raise ConfigException(
                f"config section 'zero' does not know {name!r}; it takes level, dynamic_loss_scale, {', '.join(NAMES)} and"
                f" {', '.join(known)}"
            )


def zero_plugin(section: Mapping[str, Any], group: dist.ProcessGroup | None) -> Plugin:
    """The plugin of a section, over the ranks of ``group``."""
    options = {NAMES.get(name, name): value for name, value in section.items()}
    options["stage"] = options.pop("level")
    if not options.pop("dynamic_loss_scale", True):
        scale = options.setdefault("initial_scale", 1.0)
        options |= {"min_scale": scale, "max_scale": scale}  # it cannot move
    try:
        return LowLevelZeroPlugin(process_group=group, **options)
    except (TypeError, ValueError) as error:
        raise ConfigException(f"config section 'zero': {error}") from error
