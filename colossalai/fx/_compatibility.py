"""Whether torch has what tracing needs, and marks for functions that need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T", bound=Callable)


def is_compatible_with_meta() -> bool:
    """Whether this torch computes shapes on the meta device for what models do; all that we run with do."""
    return True


def compatibility(is_backward_compatible: bool = False) -> Callable[[T], T]:
    """Mark a function by whether its interface stays as it is: ``function.is_backward_compatible``."""

    def mark(function: T) -> T:
        function.is_backward_compatible = is_backward_compatible  # type: ignore[attr-defined]
        return function

    return mark
