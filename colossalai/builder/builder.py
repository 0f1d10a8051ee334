"""Objects from configs: ``dict(type='Adam', lr=0.1)`` is a name, or a class, and its keywords."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from colossalai.registry import Registry


def build_from_config(module: Callable[..., Any], config: Mapping[str, Any]) -> Any:
    """``module(**config)``."""
    if not callable(module):
        raise TypeError(f"build_from_config needs a class or a function, got {module!r}")
    return module(**config)


def build_from_registry(config: Mapping[str, Any], registry: Registry) -> Any:
    """What ``config['type']``, looked up in ``registry``, makes of the other items of ``config``."""
    if not isinstance(config, Mapping) or "type" not in config:
        raise ValueError(
            f"build_from_registry needs a dict with a 'type', the name of a class in {registry!r}; got"
            f" {config!r}"
        )
    options = dict(config)
    kind = options.pop("type")
    return build_from_config(registry.get_module(kind) if isinstance(kind, str) else kind, options)
