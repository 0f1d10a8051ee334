"""A metaclass for classes of which a process has one instance."""

from __future__ import annotations

from typing import Any


class SingletonMeta(type):
    """``Class()`` makes the instance at its first call and returns the same one afterwards."""

    _instances: dict[type, Any] = {}  # noqa: RUF012  (shared by all singletons on purpose)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in SingletonMeta._instances:
            SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
        elif args or kwargs:
            raise TypeError(
                f"{cls.__name__} has one instance per process and it exists already; call {cls.__name__}() "
                "without arguments to get it"
            )
        return SingletonMeta._instances[cls]
