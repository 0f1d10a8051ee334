"""The reserved words of a config, what each may hold, and the refusal of everything that looks like one but
is not.

A config holds features (the lower-case words of ``FEATURES``) and hyper-parameters (every other name).  A
misspelt feature would silently train without it, so a near miss of a reserved word is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colossalai.context.config import Config, ConfigException
from colossalai.context.spelling import misspelt
from colossalai.logging import get_dist_logger


@dataclass(frozen=True)
class ReservedWord:
    """The value that a reserved word takes, in words and as a test.  ``None`` always means: not set."""

    words: str
    holds: Callable[[Any], bool]


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_list_of_handlers(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(h, Mapping) and "type" in h for h in value)


def _is_shape(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(map(is_positive_int, value))


_DICT = ReservedWord("a dict", lambda value: isinstance(value, Mapping))
_BOOL = ReservedWord("True or False", lambda value: isinstance(value, bool))
_COUNT = ReservedWord("a positive integer", is_positive_int)
_HANDLERS = ReservedWord("a list of dicts that have a 'type'", _is_list_of_handlers)
_ANYTHING = ReservedWord("anything", lambda value: True)

FEATURES: dict[str, ReservedWord] = {
    "parallel": _DICT,
    "fp16": _DICT,
    "zero": _DICT,
    "torch_ddp": _DICT,
    "gradient_handler": _HANDLERS,
    "gradient_handlers": _HANDLERS,
    "gradient_accumulation": _COUNT,
    "clip_grad_norm": ReservedWord(
        "a number that is not negative", lambda value: is_number(value) and value >= 0
    ),
    "cudnn_benchmark": _BOOL,
    "cudnn_deterministic": _BOOL,
    "model": _ANYTHING,
}

_SHAPE = ReservedWord("a tuple of positive integers", _is_shape)

# The hyper-parameters whose meaning is ours as well: the pipeline schedule reads them.
READ_BY_FEATURES: dict[str, ReservedWord] = {
    "NUM_MICRO_BATCHES": _COUNT,
    "NUM_CHUNKS": _COUNT,
    "TENSOR_SHAPE": _SHAPE,
}

# What other libraries call a feature of ours.
OTHER_NAMES = dict.fromkeys(
    (
        "clip_grad",
        "clip_norm",
        "grad_clip",
        "grad_clipping",
        "gradient_clip",
        "gradient_clipping",
        "max_grad_norm",
    ),
    "clip_grad_norm",
)

# What belongs inside ``parallel``; one level up it would be taken for a hyper-parameter and do nothing.
_SIZES_OF_PARALLEL = ("tensor", "pipeline", "sequence")


def load_config(config: Config | Mapping[str, Any] | str | Path | None) -> Config:
    """The checked ``Config`` for any form a user may give: a dict, the path of a file, or nothing."""
    if isinstance(config, (str, Path)):
        loaded = Config.from_file(config)
    elif config is None or isinstance(config, Mapping):
        loaded = Config(config or {})
    else:
        raise ConfigException(
            "config must be a dict, a Config or the path of a .py or .json file, got"
            f" {type(config).__name__}: {config!r}"
        )
    check_config(loaded)
    return loaded


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse misspelt reserved words and reserved words of a wrong type.

    The ``parallel`` dict has its own check.
    """
    for key, value in config.items():
        if not isinstance(key, str):
            raise ConfigException(f"config keys are names, got the {type(key).__name__} {key!r}")
        meant = OTHER_NAMES.get(key.lower()) or misspelt(key, tuple(FEATURES))
        if meant is not None and _is_by_custom_a_hyper_parameter(key, value):
            _say_that_it_does_nothing(key, meant)
        elif meant is not None:
            raise ConfigException(
                f"config key {key!r} is not a feature; did you mean {meant!r}? "
                f"If it is a hyper-parameter of yours, give it a name less like {meant!r}"
            )
        is_size = _has_size(value) or (key != "sequence" and is_positive_int(value))  # a length, perhaps
        if key in _SIZES_OF_PARALLEL and is_size:
            raise ConfigException(
                f"config key {key!r} stands one level too high: write parallel=dict({key}={value!r})"
            )
        rule = FEATURES.get(key) or READ_BY_FEATURES.get(key)
        if rule is not None and value is not None and not rule.holds(value):
            comma = "; is there a comma at the end of the line?" if _is_stray_tuple(rule, value) else ""
            raise ConfigException(
                f"config key {key!r} must be {rule.words}, got {type(value).__name__} {value!r}{comma}"
            )
    if config.get("gradient_handler") is not None and config.get("gradient_handlers") is not None:
        raise ConfigException(
            "config has both 'gradient_handler' and 'gradient_handlers', two names of one thing; keep one"
        )


def _is_by_custom_a_hyper_parameter(key: str, value: Any) -> bool:
    """In capitals (GRADIENT_ACCUMULATION = 4); but a whole section is not one."""
    return key.isupper() and not isinstance(value, Mapping)


def _say_that_it_does_nothing(key: str, meant: str) -> None:
    if FEATURES[meant] is not _ANYTHING:  # MODEL = "vit" is a common hyper-parameter
        get_dist_logger().warning_once(
            f"config key {key!r} is a hyper-parameter, by its capitals, and switches nothing on; the feature"
            f" is {meant!r}",
            ranks=[0],
        )


def _has_size(value: Any) -> bool:
    return isinstance(value, Mapping) and "size" in value


def _is_stray_tuple(rule: ReservedWord, value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 1 and rule.holds(value[0])
