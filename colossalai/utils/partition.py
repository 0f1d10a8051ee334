"""``balanced_cuts``: neighbouring items in parts of about the same weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

_Array = npt.NDArray[np.float64]


def balanced_cuts(weights: Sequence[float], parts: int) -> list[int]:
    """Where to cut ``weights``, of which each part has at least one, such that the heaviest part is as light
    as possible, and among those cuts the most even ones (by the sum of squares).

    Part ``i`` goes from the answer's element ``i`` to the next, which it does not contain.
    """
    total = np.concatenate([[0.0], np.cumsum(np.asarray(weights, dtype=np.float64))])
    # weight[start, end] of the items from start to end
    weight = total[None, :] - total[:, None]
    weight[np.tril_indices(len(total))] = np.inf
    heaviest, _ = _cheapest(weight, parts, np.maximum)
    squares = np.where(weight <= heaviest, weight, np.inf) ** 2
    return _cheapest(squares, parts, np.add)[1]


def _cheapest(cost: _Array, parts: int, join: Callable[[_Array, _Array], _Array]) -> tuple[float, list[int]]:
    """The cuts for which ``join`` of the parts' ``cost[start, end]`` is smallest: dynamic programming over
    ends.
    """
    n = len(cost) - 1
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    choices = []
    for _ in range(parts):
        joined = join(best[:, None], cost)
        choices.append(joined.argmin(axis=0))
        best = joined.min(axis=0)
    bounds = [n]
    for starts in reversed(choices):
        bounds.insert(0, int(starts[bounds[0]]))
    return float(best[n]), bounds
