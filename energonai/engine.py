"""``InferenceEngine`` and ``Executor``: the oldest names, on ``AsyncEngine``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from colossalai.serving import AsyncEngine, BatchManager, BatchManagerForGeneration, launch_engine


class Result:
    """What ``run`` returns before it is computed."""

    def __init__(self, engine: AsyncEngine, uid: Any) -> None:
        self._engine, self._uid = engine, uid

    def to_here(self) -> Any:
        """Wait for the output of the model and return it; once."""
        return self._engine.get(self._uid)


class InferenceEngine:
    """A model behind ranks: ``engine.run(inputs).to_here()``.

    Args:
        model_class: called on each rank with ``model_config`` as keywords; returns its model.
        model_type: of no effect; the model says itself what it computes.
        max_batch_size: of no effect here: a batch is what ``run`` is given.
        tp_init_size, pp_init_size: ranks that share layers, stages; -1 is 1.
        auto_pp: of no effect: a model that is whole is cut into stages in any case.
        host, port: where the ranks meet, on this machine; port 0 is one of the system's choice.
        dtype: given to ``model_class``, if it is not None.
    """

    def __init__(
        self,
        model_class: Callable[..., Any],
        model_config: Mapping[str, Any] | None,
        model_type: str,
        max_batch_size: int = 1,
        tp_init_size: int = -1,
        pp_init_size: int = -1,
        auto_pp: bool = False,
        host: str = "localhost",
        port: int = 29500,
        dtype: torch.dtype | None = None,
        *,
        batch_manager: BatchManager | None = None,
        queue_size: int = 0,
    ) -> None:
        more = {} if dtype is None else {"dtype": dtype}
        engine = launch_engine(
            max(1, tp_init_size),
            max(1, pp_init_size),
            host,
            port,
            0,
            model_class,
            batch_manager=batch_manager,
            queue_size=queue_size,
            **{**(model_config or {}), **more},
        )
        assert engine is not None
        self.engine = engine
        self._uids = itertools.count()

    def run(self, inputs: Any) -> Result:
        """Have ``inputs`` computed: a mapping as keywords of the model, a tuple or list as arguments."""
        uid = ("run", next(self._uids))
        self.engine.submit(uid, inputs)
        return Result(self.engine, uid)

    def shutdown(self) -> None:
        self.engine.shutdown()


class Executor:
    """A queue of prompts in front of an ``InferenceEngine``, in batches by the documented rules.

    It gives the engine a batch manager of its own, so the engine is for this executor alone.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        pad_token_id: int = 0,
        max_batch_size: int = 1,
        max_queue_size: int = 0,
    ) -> None:
        self._engine = AsyncEngine(
            engine.engine.service,
            BatchManagerForGeneration(max_batch_size, pad_token_id),
            queue_size=max_queue_size,
        )
        self._uids = itertools.count()

    def start(self) -> None:
        """Of no effect: it works from the beginning."""

    def submit(
        self,
        inputs: Mapping[str, Any],
        max_tokens: int,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float | None = None,
    ) -> Any:
        """Put a prompt (what a tokenizer returned) into the queue; what to ``wait`` for."""
        uid = next(self._uids)
        wanted = {"max_tokens": max_tokens, "top_k": top_k, "top_p": top_p, "temperature": temperature}
        self._engine.submit(uid, {"input_ids": inputs["input_ids"], **wanted})
        return uid

    async def wait(self, handle: Any) -> Any:
        """The tokens of a prompt and what follows."""
        return await self._engine.wait(handle)

    def get(self, handle: Any) -> Any:
        """As ``wait``, for threads."""
        return self._engine.get(handle)

    def teardown(self) -> None:
        """End the ranks."""
        self._engine.shutdown()
