"""A pipeline stage without neighbours: what they would send arrives at once, in the right shape."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from colossalai.pipeline.schedule.base import Message, Timetable

Way = tuple[int, int]


class TensorSpec(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def make(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.requires_grad)


def spec_of(nest: Any) -> Any:
    """``nest`` with the descriptions of its tensors in their places."""
    return tree_map_only(Tensor, lambda t: TensorSpec(tuple(t.shape), t.dtype, t.requires_grad), nest)


def _made(spec: Any, *, gradients: bool) -> Any:
    def make(leaf: Any) -> Any:
        if not isinstance(leaf, TensorSpec):
            return leaf
        if not gradients:
            return leaf.make()
        return leaf._replace(requires_grad=False).make() if leaf.requires_grad else None

    return tree_map(make, spec, is_leaf=lambda leaf: isinstance(leaf, TensorSpec))


class ImaginedLink:
    """Takes the place of ``colossalai.pipeline.p2p.Link``.

    ``specs`` says what activations look like, by (source, target) of virtual stages.  What this rank sends is
    added to it, so that the ranks of a pipeline can be played one after the other.
    """

    def __init__(self, rank: int, specs: dict[Way, Any]) -> None:
        self.rank, self.specs = rank, specs

    def begin(self, timetable: Timetable) -> None:
        pass

    def send(self, message: Message, nest: Any) -> None:
        if not message.is_gradient:
            self.specs[message.source, message.target] = spec_of(nest)

    def receive(self, message: Message) -> Any:
        if message.is_gradient:
            return _made(self.specs[message.target, message.source], gradients=True)
        # a stage that comes later in the play sends what the others send
        spec = self.specs.get((message.source, message.target)) or next(iter(self.specs.values()))
        return _made(spec, gradients=False)

    def finish(self) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        pass
