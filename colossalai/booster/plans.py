"""Plans by name and from files: what ``Booster(plugin=...)`` takes besides a plugin.

``"zero2"`` is a name of the table below, ``{"plugin": "zero2", "max_norm": 1.0}`` a name with options of the
plugin, and ``"plan.yaml"`` (or ``.json``, ``.py``) a file with such a dict, which may also hold
``mixed_precision`` and ``device`` of the booster.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.context.config import Config, config_suffixes

PLANS: dict[str, Callable[..., Plugin]] = {
    "ddp": TorchDDPPlugin,
    "torch_ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "torch_fsdp": TorchFSDPPlugin,
    "zero1": partial(LowLevelZeroPlugin, stage=1),
    "zero2": partial(LowLevelZeroPlugin, stage=2),
    "zero1_cpu": partial(LowLevelZeroPlugin, stage=1, cpu_offload=True),
    "zero2_cpu": partial(LowLevelZeroPlugin, stage=2, cpu_offload=True),
    "zero3": GeminiPlugin,
    "gemini": GeminiPlugin,
    "gemini_auto": partial(GeminiPlugin, placement_policy="auto"),
    "gemini_cuda": partial(GeminiPlugin, placement_policy="cuda"),
}
OF_BOOSTER = ("mixed_precision", "device")


class Chosen(NamedTuple):
    """A plugin, and what a file says for the booster itself."""

    plugin: Plugin | None
    booster: Mapping[str, Any]


def choose_plan(plan: Plugin | str | Path | Mapping[str, Any] | None) -> Chosen:
    """Make the plugin that ``plan`` names."""
    if plan is None or isinstance(plan, Plugin):
        return Chosen(plan, {})
    if isinstance(plan, Mapping):
        return _from_dict(dict(plan), "the dict of Booster(plugin=...)")
    if isinstance(plan, Path) or (isinstance(plan, str) and plan.endswith(config_suffixes())):
        return _from_dict(dict(Config.from_file(plan)), f"the plan {str(plan)!r}")
    if isinstance(plan, str):
        return Chosen(_named(plan, {}, "Booster"), {})
    made = " (the class: call it)" if isinstance(plan, type) else ""
    raise TypeError(
        "plugin must be an instance of a colossalai Plugin, the name of a plan, or a dict or file with one,"
        f" got {plan!r}{made}"
    )


def _from_dict(content: dict[str, Any], who: str) -> Chosen:
    booster = {name: content.pop(name) for name in OF_BOOSTER if name in content}
    if "plugin" not in content:
        raise ValueError(
            f"{who} needs the key 'plugin', one of {_names()}, got {sorted(content) or 'no key'}; the"
            " sections of colossalai.launch(config=...) are for initialize, not for Booster"
        )
    name = content.pop("plugin")
    if isinstance(name, Plugin):
        if content:
            raise ValueError(
                f"{who} has a plugin and its options {sorted(content)}; give these to the plugin"
            )
        return Chosen(name, booster)
    return Chosen(_named(name, content, who), booster)


def _named(name: Any, options: dict[str, Any], who: str) -> Plugin:
    if not isinstance(name, str) or name.lower() not in PLANS:
        raise ValueError(f"{who} does not know the plan {name!r}; it is one of {_names()}")
    make = PLANS[name.lower()]
    given = make.keywords if isinstance(make, partial) else {}
    known = set(inspect.signature(make).parameters)
    for option, value in options.items():
        if option not in known or given.get(option, value) != value:
            raise ValueError(
                f"{who}: {option}={value!r} does not go with the plan {name!r}, which takes"
                f" {', '.join(sorted(known - given.keys()))}"
            )
    return make(**options)


def _names() -> str:
    return ", ".join(map(repr, PLANS))
