"""The variables of a config file such as ``opt_config.py``, with their defaults."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from colossalai.context import Config

DEFAULTS: dict[str, Any] = {
    "model_class": None,
    "model_type": None,
    "host": "localhost",
    "port": 29500,
    "half": False,
    "checkpoint": None,
    "backend": None,
    "tp_init_size": 1,
    "pp_init_size": 1,
    "engine_server": None,
    "tokenizer_path": None,
    "server_host": "0.0.0.0",
    "server_port": 8005,
    "log_level": "critical",
    "allow_cors": False,
    "executor_max_batch_size": 32,
    "cache_size": 0,
    "cache_list_size": 1,
    "timeout_keep_alive": 180,
    "executor_max_queue_size": 0,
    "fixed_cache_keys": (),
    "max_batch_size": 32,
    "rm_padding": False,
    "seed": 1024,
    "verbose": True,
    "trt_sample": None,
    "rpc_port": 0,
    "model_kwargs": {},
}
_HERE = ("localhost", "127.0.0.1", "0.0.0.0")
_NEUTRAL = {"rm_padding": False, "trt_sample": None}
"""What is not offered; another value is refused."""


class ConfigError(ValueError):
    """A config file that cannot be used."""


class ServiceConfig:
    """The variables as attributes; one that is unknown, or would be of no effect, is refused."""

    def __init__(self, values: dict[str, Any], origin: str = "the config") -> None:
        # what a config file imports or helps itself with is no setting
        given = {name: value for name, value in values.items() if name in DEFAULTS or not _is_helper(value)}
        if unknown := sorted(given.keys() - DEFAULTS.keys()):
            raise ConfigError(f"{origin} has unknown variables {unknown}; there are {', '.join(DEFAULTS)}")
        for name, neutral in _NEUTRAL.items():
            if given.get(name, neutral) != neutral:
                raise ConfigError(f"{origin}: {name}={given[name]!r} is not offered; leave it out")
        self.values: dict[str, Any] = {**DEFAULTS, **given}
        if not callable(self.model_class):
            raise ConfigError(
                f"{origin} needs model_class, a function that returns a model, such as opt_125M"
            )
        if "max_batch_size" in given and self.max_batch_size < self.executor_max_batch_size:
            raise ConfigError(
                f"{origin}: batches have up to executor_max_batch_size={self.executor_max_batch_size}"
                f" prompts, more than max_batch_size={self.max_batch_size}; make the first one smaller"
            )
        if self.host not in _HERE:
            raise ConfigError(
                f"{origin}: host={self.host!r} is where the ranks meet, all on this machine: leave it out; an"
                " address for clients is server_host"
            )
        if self.tokenizer_path is None:
            raise ConfigError(f"{origin} needs tokenizer_path, a folder with a tokenizer")

    @classmethod
    def from_file(cls, path: str | Path) -> ServiceConfig:
        return cls(read_variables(Path(path)), str(path))

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def lines(self) -> list[str]:
        return [f"{name}\t:\t{value}" for name, value in self.values.items()]

    def arguments_of(self, function: Callable[..., Any]) -> dict[str, Any]:
        """The variables that ``function`` has parameters for."""
        parameters = inspect.signature(function).parameters
        return {name: value for name, value in self.values.items() if name in parameters}


def _is_helper(value: Any) -> bool:
    return inspect.ismodule(value) or callable(value)


def read_variables(path: Path) -> dict[str, Any]:
    """The variables of a Python file; it is the user's own, and is executed."""
    if not path.is_file():
        raise ConfigError(f"there is no config file {path}")
    if path.suffix != ".py":
        return dict(Config.from_file(path))
    # what lies beside it can be imported, and what it defines be found by the ranks, which import it
    sys.path.insert(0, str(path.resolve().parent))
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules.setdefault(path.stem, module)
    exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}
