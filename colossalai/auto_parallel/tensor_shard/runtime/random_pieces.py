"""Random numbers of a model of which ranks hold pieces: alike where they hold the same, others where they
hold other pieces, whatever a script has seeded on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from colossalai.fx.nodes import is_random
from colossalai.mesh import Layout, Mesh, RandomStream, random_key, shard
from colossalai.nn.random_streams import forked, seed

_serial = False


@contextmanager
def serial_masks() -> Iterator[None]:
    """Inside, every rank draws what the serial model would draw from torch's generator, and takes its piece.

    This is for tests that compare a plan with the serial model: all ranks must have the same state of the
    generator, and each draws all of every mask.
    """
    global _serial
    before, _serial = _serial, True
    try:
        yield
    finally:
        _serial = before


def draws(node: fx.Node) -> bool:
    """Whether an operation draws random numbers."""
    return node.op == "call_module" or (node.op == "call_function" and is_random(node))


class RandomPieces:
    """The random numbers of one model.

    Each forward pass takes a key, and each of its operations draws from a generator seeded by the key, its
    name, and this rank's place on the axes that cut its result.
    """

    def __init__(self, number: int, mesh: Mesh) -> None:
        self.stream, self.mesh = RandomStream(number, "sharded model"), mesh
        self._furthest = 0

    def begin(self, *, draws: bool) -> int:
        """A forward pass begins; the key that all of its draws take, also when some are repeated.

        ``draws`` says whether there are any.
        """
        repeated = torch._C._current_graph_task_id() != -1  # in a backward pass
        if draws and repeated and not _serial and self.stream.step == self._furthest:
            raise RuntimeError(
                "the model runs again in a backward pass, inside torch.utils.checkpoint, which does not bring"
                " its random numbers back; use colossalai.utils.checkpoint, or let the plan recompute"
                " (activation_checkpoint=True of autoparallelize)"
            )
        key = self.stream.next_key()
        self._furthest = max(self._furthest, self.stream.step)
        return key

    @contextmanager
    def _numbers(self, key: int, name: str, layout: Layout | None = None) -> Iterator[None]:
        cut = () if layout is None else self.mesh.in_order(layout.sharded)
        with forked():
            seed(random_key(key, name, *(self.mesh.coord[axis] for axis in cut)))
            yield

    def draw_alike(self, key: int, function: Callable[..., Any], args: Any, kwargs: Any, name: str) -> Any:
        """Call ``function``, whose result every rank has whole."""
        if _serial:
            return function(*args, **kwargs)
        with self._numbers(key, name):
            return function(*args, **kwargs)

    def draw(
        self,
        key: int,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        shape: tuple[int, ...],
        layout: Layout,
        name: str,
    ) -> Any:
        """Call ``function``, whose result lies in ``layout``."""
        if _serial:
            raise NotImplementedError(f"{name}: nothing is known of its numbers in the serial model")
        with self._numbers(key, name, layout):
            return function(*args, **kwargs)

    def dropout(
        self, key: int, x: Tensor, p: float, shape: tuple[int, ...], layout: Layout, name: str
    ) -> Tensor:
        """Dropout of the piece ``x``, in ``layout``, of a tensor of ``shape``."""
        if not _serial:
            with self._numbers(key, name, layout):
                return F.dropout(x, p)
        mask = F.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), p)
        return x * shard(mask, layout, self.mesh)

    def attention(
        self, key: int, given: Mapping[str, Any], shape: tuple[int, ...], layout: Layout, name: str
    ) -> Tensor:
        """Attention with dropout of its scores, which have ``shape`` and lie in ``layout``."""
        query, keys, value, mask, p, causal, scale, grouped = given.values()
        if not _serial:
            with self._numbers(key, name, layout):
                return F.scaled_dot_product_attention(
                    query, keys, value, mask, p, causal, scale=scale, enable_gqa=grouped
                )
        kept = F.dropout(torch.ones(shape, dtype=query.dtype, device=query.device), p) != 0
        if causal:
            mask = torch.ones(shape[-2:], dtype=torch.bool, device=query.device).tril()
        if mask is not None and mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
        weights: Any = torch._scaled_dot_product_attention_math  # takes a mask of what is kept
        result, _ = weights(
            query,
            keys,
            value,
            mask,
            p,
            False,
            shard(kept, layout, self.mesh),
            scale=scale,
            enable_gqa=grouped,
        )
        found: Tensor = result
        return found
