"""``Config``: a dict whose keys are also attributes, read from a dict, a Python file or a JSON file."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


class ConfigException(ValueError):
    """The configuration cannot be used as it is written; the message says which key and what to write
    instead.
    """


class Config(dict[str, Any]):
    """A dict with attribute access; nested dicts become ``Config`` as well.

    >>> config = Config(parallel=dict(pipeline=2), BATCH_SIZE=32)
    >>> config.parallel.pipeline, config["BATCH_SIZE"], hasattr(config, "fp16")
    (2, 32, False)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.update(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the config has no key {name!r}; its keys are {list(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self:
            raise AttributeError(f"the config has no key {name!r}; its keys are {list(self)}")
        del self[name]

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, _nested(value))

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, other: Any) -> Config:  # type: ignore[override,misc]
        self.update(other)
        return self

    def copy(self) -> Config:
        return Config(self)

    @staticmethod
    def from_file(filename: str | Path) -> Config:
        """Read a ``.py`` file (its plain variables: no dunders, modules or classes), a ``.json`` or a
        ``.yaml`` file.
        """
        path = Path(filename)
        if path.suffix not in _READERS:
            raise ConfigException(
                f"cannot read the config {str(path)!r}: give a file that ends in {' or '.join(_READERS)}, or"
                " a dict"
            )
        if not path.is_file():
            raise FileNotFoundError(f"there is no config file {str(path)!r} (looked for {path.absolute()})")
        try:
            return Config(_READERS[path.suffix](path))
        except (Exception, SystemExit) as error:
            where = f", line {line}" if (line := _line_of(error, path)) else ""
            raise ConfigException(
                f"cannot read the config {str(path)!r}{where}: {type(error).__name__}: {error}"
            ) from error


def _nested(value: Any) -> Any:
    return Config(value) if isinstance(value, dict) and not isinstance(value, Config) else value


def _read_python(path: Path) -> Mapping[str, Any]:
    """Run the file as a module whose neighbours it can import, and keep its variables."""
    module = ModuleType("colossalai_config_file")
    module.__file__ = str(path)
    code = compile(path.read_bytes(), str(path), "exec")
    folder = str(path.absolute().parent)
    sys.modules[module.__name__] = module  # a dataclass in the file looks its own module up there
    sys.path.insert(0, folder)
    try:
        exec(code, module.__dict__)
    finally:
        sys.path.remove(folder)
        del sys.modules[module.__name__]
    return {name: value for name, value in vars(module).items() if _is_setting(name, value)}


def _is_setting(name: str, value: Any) -> bool:
    if name.startswith("__") or inspect.ismodule(value) or inspect.isclass(value):
        return False
    return type(value).__module__ != "__future__"  # the name that `from __future__ import ...` leaves behind


def _read_json(path: Path) -> Mapping[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise TypeError(f"the file must hold one object {{...}}, got {type(content).__name__}")
    return content


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise ImportError("a .yaml file needs the package PyYAML; install it: pip install pyyaml") from error
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise TypeError(f"the file must hold one mapping (key: value), got {type(content).__name__}")
    return content


_READERS = {".py": _read_python, ".json": _read_json, ".yaml": _read_yaml, ".yml": _read_yaml}


def config_suffixes() -> tuple[str, ...]:
    """How the names of config files end."""
    return tuple(_READERS)


def _line_of(error: BaseException, path: Path) -> int | None:
    """The line of the config file where ``error`` was raised, also when it was raised deeper."""
    if isinstance(error, (SyntaxError, json.JSONDecodeError)):
        return error.lineno
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
