"""The private parts of torch that the contracts need, the same in torch 2.11 and 2.13."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def replace_inside(wrapped: Callable[..., Any], function: Callable[..., Any]) -> None:
    """Let ``wrapped``, a function in a decorator of torch, call ``function(native, ...)`` in the place of
    ``native(...)``.

    The decorated function itself stays, for those who hold it already.
    """
    native: Any = wrapped.__wrapped__  # type: ignore[attr-defined]
    cells = [cell for cell in wrapped.__closure__ or () if cell.cell_contents is native]
    if len(cells) != 1:
        raise RuntimeError(
            f"torch.nn.utils.{wrapped.__name__} is not made as in the versions of torch that are supported"
        )
    cells[0].cell_contents = functools.partial(function, native)
