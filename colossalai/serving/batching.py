"""Which requests of an engine's queue are computed together, and how their results are taken apart."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_SAMPLING = ("top_k", "top_p", "temperature")


@dataclass(frozen=True)
class SubmitEntry:
    """A request in the queue of an engine."""

    uid: Hashable
    data: Any


@dataclass(frozen=True)
class TaskEntry:
    """A batch: the requests in it, and what the model is given, or what it has returned."""

    uids: tuple[Hashable, ...]
    batch: Any


class BatchManager:
    """Gives the model one request at a time, as it came.  Subclasses put requests together."""

    def make_batch(self, q: deque[SubmitEntry]) -> tuple[TaskEntry, dict[str, Any]]:
        """Take requests from the left end of ``q``, which is not empty; what else ``split_batch`` needs."""
        entry = q.popleft()
        return TaskEntry((entry.uid,), entry.data), {}

    def split_batch(self, task_entry: TaskEntry, **kwargs: Any) -> Iterator[tuple[Hashable, Any]]:
        """The result of each request in a batch that was computed."""
        yield task_entry.uids[0], task_entry.batch


class BatchManagerForGeneration(BatchManager):
    """Puts prompts together that follow each other and want the same.

    The head of the queue is joined by the requests behind it, in their order, as long as their ``top_k``,
    ``top_p`` and ``temperature`` are those of the head, their ``max_tokens`` are not more than the head's,
    and the batch has fewer than ``max_batch_size`` rows.  Shorter prompts are padded on the left.  The model
    gets ``max_tokens`` as the length of a whole row, and each result is cut to the request's own.

    A request is a mapping with ``input_ids`` (a list or tensor of one row) and ``max_tokens``; the sampling
    parameters may be left out.
    """

    def __init__(self, max_batch_size: int = 1, pad_token_id: int = 0) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size!r}")
        self.max_batch_size = max_batch_size
        self.pad_token_id = pad_token_id

    def make_batch(self, q: deque[SubmitEntry]) -> tuple[TaskEntry, dict[str, Any]]:
        head = q.popleft()
        entries = [head]
        while q and len(entries) < self.max_batch_size and self._joins(q[0].data, head.data):
            entries.append(q.popleft())
        rows = [_row(entry.data) for entry in entries]
        longest = max(map(len, rows))
        batch: dict[str, Any] = {
            "input_ids": torch.tensor([[self.pad_token_id] * (longest - len(r)) + r for r in rows]),
            "attention_mask": torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows]),
            "max_tokens": longest + head.data["max_tokens"],
        }
        batch |= {name: head.data[name] for name in _SAMPLING if head.data.get(name) is not None}
        wanted = [entry.data["max_tokens"] for entry in entries]
        info = {"lengths": [len(r) for r in rows], "padded": longest, "max_tokens": wanted}
        return TaskEntry(tuple(entry.uid for entry in entries), batch), info

    def _joins(self, data: Mapping[str, Any], head: Mapping[str, Any]) -> bool:
        same = all(data.get(name) == head.get(name) for name in _SAMPLING)
        return same and data["max_tokens"] <= head["max_tokens"]

    def split_batch(self, task_entry: TaskEntry, **kwargs: Any) -> Iterator[tuple[Hashable, Any]]:
        """Each row from its first token on; the model returns padded rows, or a list of rows without
        padding.
        """
        lengths: Sequence[int] = kwargs["lengths"]
        for i, (uid, length, wanted) in enumerate(
            zip(task_entry.uids, lengths, kwargs["max_tokens"], strict=True)
        ):
            row = task_entry.batch[i]
            start = kwargs["padded"] - length if isinstance(task_entry.batch, Tensor) else 0
            yield uid, row[start : start + length + wanted]


def _row(data: Mapping[str, Any]) -> list[int]:
    ids = data["input_ids"]
    ids = ids.flatten().tolist() if isinstance(ids, Tensor) else list(ids)
    if not ids:
        raise ValueError("a request needs at least one token in input_ids")
    return ids
