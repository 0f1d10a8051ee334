"""A ring among the ranks of a ``ParallelMode``."""

from __future__ import annotations

from torch import Tensor

from colossalai.communication.collective import without_gradient
from colossalai.communication.exchange import exchange
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc


def ring_forward(tensor_send_next: Tensor, parallel_mode: ParallelMode) -> Tensor:
    """Send a tensor to the next rank of the group, and return that of the rank before; the last rank sends to
    the first.
    """
    if gpc.get_world_size(parallel_mode) == 1:
        return tensor_send_next
    target, source = gpc.get_next_global_rank(parallel_mode), gpc.get_prev_global_rank(parallel_mode)
    (received,) = exchange([(tensor_send_next.detach(), target)], [source], parallel_mode)
    return without_gradient("ring_forward", tensor_send_next, received)
