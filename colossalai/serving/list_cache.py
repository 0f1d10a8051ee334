"""Results that were served lately, kept for the same question."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any


class MissCacheError(Exception):
    """The cache has too few results for this key."""


class ListCache:
    """Several results for each key; a random one of them is given once there are enough.

    The keys are those of the last ``cache_size`` queries (least recently used ones go first), and
    ``fixed_keys``, which stay.  A key hits as soon as it has ``list_size`` distinct results.
    """

    def __init__(self, cache_size: int, list_size: int, fixed_keys: Iterable[Hashable] = ()) -> None:
        if cache_size < 0 or list_size < 1:
            raise ValueError(
                "a ListCache needs a cache_size of at least 0 and a list_size of at least 1, got"
                f" {cache_size!r} and {list_size!r}"
            )
        self.cache_size, self.list_size = cache_size, list_size
        self._fixed: dict[Hashable, list[Any]] = {key: [] for key in fixed_keys}
        self._recent: OrderedDict[Hashable, list[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Any:
        """One of the results of ``key``, or ``MissCacheError``."""
        with self._lock:
            values = self._fixed.get(key)
            if values is None and key in self._recent:
                self._recent.move_to_end(key)
                values = self._recent[key]
            if values is None or len(values) < self.list_size:
                raise MissCacheError(key)
            return random.choice(values)

    def add(self, key: Hashable, value: Any) -> None:
        """Store a result; a key that has enough, or has this one, stays as it is."""
        with self._lock:
            values = self._fixed.get(key)
            if values is None:
                if self.cache_size == 0:
                    return
                values = self._recent.setdefault(key, [])
                self._recent.move_to_end(key)
                if len(self._recent) > self.cache_size:
                    self._recent.popitem(last=False)
            if len(values) < self.list_size and value not in values:
                values.append(value)
