"""The table of torch functions that do something of their own with a ColoTensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Implementation = Callable[..., Any]
F = TypeVar("F", bound=Implementation)

IMPLEMENTATIONS: dict[Any, Implementation] = {}


def colo_op_impl(func: Callable[..., Any]) -> Callable[[F], F]:
    """Register what runs instead of ``func`` when one of its arguments is a ColoTensor; a later one replaces
    it.

    The implementation gets the arguments of the call.  ``torch.add``, ``torch.Tensor.add`` and ``+`` are
    three functions.
    """

    def register(implementation: F) -> F:
        IMPLEMENTATIONS[func] = implementation
        return implementation

    return register
