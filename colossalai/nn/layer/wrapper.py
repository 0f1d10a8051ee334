"""Weights that several pipeline stages use, such as the word embedding that is also the output head.

Each of these stages holds the weight.  It starts with the values of the first stage, its gradients are summed
over the stages in each step (``PipelineSharedModuleGradientHandler``, which ``initialize`` adds by itself),
so all copies stay equal.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn

from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.mesh import PIPELINE_AXIS, full_shape, mesh_groups, placement
from colossalai.mesh.parameter import SHARED_GROUP, SHARED_MARK
from colossalai.mesh.weights.deferred import fill_deferred
from colossalai.utils.parallel import broadcast_from_first

# All ranks of a job make the same wrappers, so they agree on their numbers.
_numbers = itertools.count()


class PipelineSharedModuleWrapper:
    """One set of parameters shared by the stages ``pipeline_ranks``.

    Every rank of the job makes the wrapper; the ranks of these stages register their module, or parameters,
    in the same order.
    """

    def __init__(self, pipeline_ranks: Sequence[int]) -> None:
        size = gpc.get_world_size(ParallelMode.PIPELINE) if gpc.is_initialized(ParallelMode.PIPELINE) else 1
        self.pipeline_ranks = _checked_ranks(pipeline_ranks, size)
        self._rank = gpc.get_local_rank(ParallelMode.PIPELINE) if size > 1 else 0
        self.group = self._new_group() if len(self.pipeline_ranks) > 1 else None
        self._number, self._count = next(_numbers), 0
        # where the stages of this pipeline find the complaint of one that should not have registered anything
        self._complaint = f"PipelineSharedModuleWrapper {self._number} {self._stages}"

    @property
    def _stages(self) -> list[int]:
        piped = gpc.is_initialized(ParallelMode.PIPELINE)
        return gpc.get_ranks_in_group(ParallelMode.PIPELINE) if piped else [0]

    def _new_group(self) -> dist.ProcessGroup | None:
        own = None
        for stages in mesh_groups(gpc.mesh.size, (PIPELINE_AXIS,)):
            group = dist.new_group([stages[rank] for rank in self.pipeline_ranks])
            if gpc.get_global_rank() in stages and self._rank in self.pipeline_ranks:
                own = group
        return own

    def register_module(self, module: nn.Module) -> None:
        """Share all parameters of ``module``."""
        self._share(module.parameters(), type(module).__name__)

    def register_parameter(self, param: nn.Parameter) -> None:
        """Share ``param``."""
        self._share([param], "a parameter")

    def _share(self, params: Iterable[nn.Parameter], what: str) -> None:
        if self._rank not in self.pipeline_ranks:
            wrong = (
                f"pipeline rank {self._rank} registers {what} as shared by the pipeline ranks"
                f" {self.pipeline_ranks}, to which it does not belong; register it there, or add this rank"
            )
            if dist.is_initialized():
                _store().set(self._complaint, wrong)  # for those who wait for another rank to register it
            raise ValueError(wrong)
        params = list(params)
        if any(hasattr(p, SHARED_GROUP) for p in params):
            raise ValueError(f"{what} is shared already; register it with one PipelineSharedModuleWrapper")
        if self.group is None:
            return  # one stage: the same module is used twice
        for p in params:
            setattr(p, SHARED_GROUP, self.group)
            setattr(p, SHARED_MARK, (self._number, self._count))
            self._count += 1
        fill_deferred(params)
        if not any(p.is_meta for p in params):
            self._make_equal(params)

    @torch.no_grad()
    def _make_equal(self, params: Sequence[Tensor]) -> None:
        self._meet()
        kinds = [(tuple(full_shape(p)), p.dtype, str(placement(p))) for p in params]
        others: list[list[tuple[tuple[int, ...], torch.dtype, str]]] = [[] for _ in self.pipeline_ranks]
        dist.all_gather_object(others, kinds, group=self.group)
        if any(other != kinds for other in others):
            listed = "; ".join(f"rank {r}: {k}" for r, k in zip(self.pipeline_ranks, others, strict=True))
            raise ValueError(
                f"the pipeline ranks {self.pipeline_ranks} share parameters, but theirs differ in (shape,"
                f" dtype, layout): {listed}"
            )
        broadcast_from_first(params, self.group)

    def _meet(self) -> None:
        """Wait for the other stages to register theirs, or for the complaint of one that is none of them."""
        work = dist.all_reduce(torch.zeros(1), group=self.group, async_op=True)
        assert work is not None
        while not work.is_completed():
            if _store().check([self._complaint]):
                raise ValueError(_store().get(self._complaint).decode())
            time.sleep(0.005)
        work.wait()


def _checked_ranks(ranks: Any, size: int) -> list[int]:
    known = range(size)
    is_list = isinstance(ranks, Iterable) and not isinstance(ranks, str | bytes | Tensor)
    listed = list(ranks) if is_list else []
    if not listed or not all(type(rank) is int and rank in known for rank in listed):
        raise ValueError(
            "PipelineSharedModuleWrapper takes a list of the pipeline ranks that share a module, of 0 to"
            f" {size - 1} here, such as [0, {size - 1}]; got {ranks!r}"
        )
    return sorted(set(listed))


def _store() -> c10d.Store:
    return c10d._get_default_store()
