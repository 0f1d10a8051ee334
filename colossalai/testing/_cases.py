"""Many generated cases, of which CI runs a sample that is the same every time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import pytest

Case = TypeVar("Case")
_GOLDEN = (math.sqrt(5) - 1) / 2


def sample_cases(cases: Sequence[Case], n: int) -> list[Case]:
    """``n`` of ``cases``, in their order: one from each of ``n`` equal stretches.

    Where in its stretch varies by the golden ratio: a fixed step through a product of lists, say every eighth
    case, would meet the same element of an inner list each time.
    """
    if n < 1:
        raise ValueError(f"a sample has at least one case, got n={n}")
    if n >= len(cases):
        return list(cases)
    bounds = [i * len(cases) // n for i in range(n + 1)]
    return [cases[a + int(i * _GOLDEN % 1 * (b - a))] for i, (a, b) in enumerate(itertools.pairwise(bounds))]


def parametrize_sample(
    names: str, cases: Sequence[Any], n: int, *, ids: Sequence[str] | None = None
) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` over all ``cases``; those outside a sample of ``n`` are marked ``slow``."""
    import pytest  # only tests need it

    if ids is not None and len(ids) != len(cases):
        raise ValueError(f"{len(cases)} cases need as many ids, got {len(ids)}")
    chosen = set(sample_cases(range(len(cases)), n))
    single = "," not in names
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(
                *((case,) if single else case),
                marks=() if i in chosen else pytest.mark.slow,
                id=None if ids is None else ids[i],
            )
            for i, case in enumerate(cases)
        ],
    )
