"""What griffe, which reads the sources for the reference, leaves out and takes in."""

from __future__ import annotations

import re
from typing import Any

import griffe


class LeaveOutPlainAttributes(griffe.Extension):
    """Members without the attributes that methods merely assign, which have no words of their own.

    A class that has ``__new__`` alone has its arguments.
    """

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if isinstance(new := cls.members.get("__new__"), griffe.Function) and "__init__" not in cls.members:
            init = griffe.Function(
                "__init__", parameters=new.parameters, lineno=new.lineno, endlineno=new.endlineno
            )
            cls.set_member("__init__", init)
        if _has_fields(cls):
            return
        for name, member in list(cls.members.items()):
            if (
                not member.is_alias
                and member.is_attribute
                and not member.has_docstring
                and "class-attribute" not in member.labels
                and "property" not in member.labels
            ):
                cls.del_member(name)


def _has_fields(cls: griffe.Class) -> bool:
    """Whether the attributes are the arguments: a dataclass or a ``NamedTuple``."""
    words = [str(decorator.value) for decorator in cls.decorators] + [str(base) for base in cls.bases]
    return any(re.match(r"(dataclasses\.)?dataclass\b|(typing\.)?NamedTuple$", word) for word in words)
