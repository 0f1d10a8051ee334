"""The options of ``save_model``, which scripts give in two orders."""

from __future__ import annotations

from typing import Any

# The two documented orders of what follows the path in `save_model`, told apart by the first value.
_BY_SHARD = ("shard", "gather_dtensor", "variant", "size_per_shard", "use_safetensors")
_BY_PREFIX = ("prefix", "shard", "size_per_shard")


def by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The options of ``save_model`` by name, whichever of the two orders they came in."""
    if args and not isinstance(args[0], bool | str | None):
        raise TypeError(
            f"save_model takes shard (a bool) or prefix (a str or None) after the path, got {args[0]!r}"
        )
    order = _BY_SHARD if args and isinstance(args[0], bool) else _BY_PREFIX
    if len(args) > len(order):
        raise TypeError(f"save_model takes at most {', '.join(order)} after the path, got {args!r}")
    options = dict(zip(order, args, strict=False))
    if twice := sorted(options.keys() & kwargs.keys()):
        raise TypeError(f"save_model got {', '.join(twice)} by position and by name")
    options |= kwargs
    if unknown := sorted(options.keys() - {*_BY_SHARD, *_BY_PREFIX}):
        raise TypeError(
            f"save_model does not know {', '.join(unknown)}; it takes prefix, {', '.join(_BY_SHARD)}"
        )
    prefix = options.pop("prefix", None)
    if prefix and options.setdefault("variant", prefix) != prefix:
        raise TypeError(
            f"save_model got prefix={prefix!r} and variant={options['variant']!r}, which mean the same"
        )
    return options
