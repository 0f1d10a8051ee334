"""``Generator``: a model, cut or not, writes text for many requests at once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from torch import nn

from colossalai.inference.requests import Completion, Event, GeneratorStats, Sampling
from colossalai.mesh import Mesh


class Generator:
    """A model that generates.  Every rank of a launched job makes one, on its part of the model."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        max_requests: int = 64,
        max_length: int | None = None,
        page_size: int = 16,
        pages: int | None = None,
        memory: float | None = None,
        chunk: int = 2048,
        prefix_reuse: bool = True,
        exact: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        raise NotImplementedError

    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling = Sampling(),  # noqa: B008
        *,
        uid: Hashable | None = None,
    ) -> Hashable:
        raise NotImplementedError

    def cancel(self, uid: Hashable) -> None:
        raise NotImplementedError

    def step(self) -> list[Event]:
        raise NotImplementedError

    def follow(self) -> None:
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        raise NotImplementedError

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008
    ) -> list[Completion]:
        raise NotImplementedError

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling = Sampling(),  # noqa: B008
    ) -> Iterator[Event]:
        raise NotImplementedError

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        raise NotImplementedError

    def stats(self) -> GeneratorStats:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
