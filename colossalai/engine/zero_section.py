"""The section ``zero`` of a config: which plugin it means.

``zero = dict(level=2, overlap_comm=True, clip_grad=1.0, cpu_offload=True)``: the names are those of the
documents, or the plugin's own.  Level 3, or a section with ``model_config``, is Gemini: see
``gemini_section``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from colossalai.amp.loss_scale import fix_loss_scale
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, Plugin
from colossalai.context.config import ConfigException
from colossalai.engine.gemini_section import means_gemini, read_gemini, send_to_disk

# The names in configs, and those of the plugin.
NAMES = {"overlap_comm": "overlap_communication", "clip_grad": "max_norm"}
LEVELS = (1, 2)


def check_zero(section: Mapping[str, Any]) -> None:
    """Refuse what no plugin takes, before anything is built."""
    if means_gemini(section):
        read_gemini(section)
        return
    level = section.get("level")
    known = [
        n for n in inspect.signature(LowLevelZeroPlugin).parameters if n not in ("stage", "process_group")
    ]
    of_level_3 = inspect.signature(GeminiPlugin).parameters if level not in LEVELS else ()
    for name, value in section.items():
        if name not in (*known, *NAMES, "level", "dynamic_loss_scale", *of_level_3):
            meant = f" (level={value!r} is what the plugin calls stage)" if name == "stage" else ""
            raise ConfigException(
                f"config section 'zero' does not know {name!r}{meant}; it takes level, dynamic_loss_scale,"
                f" {', '.join(NAMES)} and {', '.join(known)}"
            )
    if level not in LEVELS:
        raise ConfigException(
            f"config section 'zero' needs level=1, level=2 or level=3, or model_config, got level={level!r}"
        )


def with_clipping(config: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, float]:
    """The section ``zero``, and the norm to which the engine clips.

    A plan that updates in the backward pass should know of clipping before it: there ``clip_grad_norm`` is
    the section's.
    """
    zero, norm = config.get("zero"), float(config.get("clip_grad_norm") or 0.0)
    if zero is None or norm == 0 or not means_gemini(zero):
        return zero, norm
    options = read_gemini(zero).options
    early = options.get("update_in_backward")
    same = options.get("max_norm", norm) == norm and options.get("norm_type", 2.0) == 2.0
    if early is False or (early is None and not same):
        return zero, norm
    if options.get("max_norm", norm) != norm:
        raise ConfigException(
            f"config has clip_grad_norm={norm!r}, and its section 'zero' has {options['max_norm']!r}"
            " (clip_grad, max_norm or clipping_norm); keep one"
        )
    if options.get("norm_type", 2.0) != 2.0:
        raise ConfigException(
            f"config has clip_grad_norm={norm!r}, which is a 2-norm, and its section 'zero'"
            f" norm_type={options['norm_type']!r}; give the norm as clip_grad in the section"
        )
    return {**zero, "max_norm": norm}, 0.0


def zero_plugin(
    section: Mapping[str, Any], group: dist.ProcessGroup | None, model: nn.Module, optimizer: Optimizer
) -> Plugin:
    """The plugin of a section, over the ranks of ``group``; ``optimizer`` learns where its states go."""
    try:
        if means_gemini(section):
            options, path = read_gemini(section)
            plugin = GeminiPlugin(**options)  # its ranks are those of the launched plan
            if path is not None:
                send_to_disk(optimizer, path)
            return plugin
        return LowLevelZeroPlugin(process_group=group, **_low_level(section))
    except ConfigException:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigException(f"config section 'zero': {error}") from error


def _low_level(section: Mapping[str, Any]) -> dict[str, Any]:
    options = {NAMES.get(name, name): value for name, value in section.items()}
    options["stage"] = options.pop("level")
    if not options.pop("dynamic_loss_scale", True):
        fix_loss_scale(options)
    return options
