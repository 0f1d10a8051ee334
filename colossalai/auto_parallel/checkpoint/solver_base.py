"""What the solvers of chains have in common: they take a chain, or make one of a traced graph."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

from torch import fx

from colossalai.auto_parallel.checkpoint.graph_chain import GraphStages, stages_of
from colossalai.auto_parallel.checkpoint.operation import Chain


class CheckpointSolverBase(ABC):
    """Decides which activations of a chain are computed again.

    Args:
        graph: a ``Chain``, or a ``torch.fx.Graph`` whose nodes know their values (``meta["val"]``).
        free_memory: bytes for what the solver decides about; -1 for any number.
        requires_linearize: whether the solver needs a chain; kept for scripts, a chain is always made.
        cnode: names of nodes that all stages may read, such as a mask.
        optim_multiplier: how many times the bytes of the parameters of a graph the optimizer needs; they are
            taken off ``free_memory``.
    """

    def __init__(
        self,
        graph: Any,
        free_memory: float = -1.0,
        requires_linearize: bool = False,
        cnode: list[str] | None = None,
        optim_multiplier: float = 1.0,
    ) -> None:
        if isinstance(graph, fx.GraphModule):
            graph = graph.graph
        if not isinstance(graph, (Chain, fx.Graph)):
            raise TypeError(
                f"{type(self).__name__} takes a Chain, or a torch.fx.Graph whose nodes have meta['val'], got"
                f" {type(graph).__name__}"
            )
        is_number = isinstance(free_memory, (int, float)) and math.isfinite(free_memory)
        if not is_number or (free_memory != -1 and free_memory <= 0):
            raise ValueError(
                f"{type(self).__name__}: free_memory is a number of bytes, or -1 for any, got {free_memory!r}"
            )
        self.graph, self.cnode, self.optim_multiplier = graph, cnode or [], optim_multiplier
        self.stages: GraphStages | None = None
        if isinstance(graph, Chain):
            self.chain, static = graph, 0
        else:
            self.stages = stages_of(graph, self.cnode)
            self.chain = self.stages.chain
            static = int(self.stages.parameter_bytes * (1 + optim_multiplier))
        self.free_memory = free_memory
        self.budget = None if free_memory == -1 else int(free_memory) - static
        if self.budget is not None and self.budget <= 0:
            raise ValueError(
                f"{type(self).__name__}: free_memory={free_memory} is less than the {static} bytes of the"
                " parameters and the optimizer"
            )

    @abstractmethod
    def solve(self) -> Any:
        """Decide; what is returned depends on the solver and on what it was given."""
