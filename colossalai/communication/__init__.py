"""Messages between the ranks of a ``ParallelMode``, by the documented names.

They are fronts: groups come from the launched context, point-to-point messages are those of the pipeline's
wire.  None of them carries gradients; a model that is cut computes with ``colossalai.mesh``.
"""

from colossalai.communication.collective import (
    all_gather,
    all_reduce,
    broadcast,
    reduce,
    reduce_scatter,
    scatter_object_list,
)
from colossalai.communication.p2p import (
    recv_backward,
    recv_forward,
    send_backward,
    send_backward_recv_backward,
    send_backward_recv_forward,
    send_forward,
    send_forward_backward_recv_forward_backward,
    send_forward_recv_backward,
    send_forward_recv_forward,
)
from colossalai.communication.ring import ring_forward
from colossalai.communication.utils import (
    gather_split_1d_tensor,
    recv_obj_meta,
    send_obj_meta,
    split_tensor_into_1d_equal_chunks,
)

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "gather_split_1d_tensor",
    "recv_backward",
    "recv_forward",
    "recv_obj_meta",
    "reduce",
    "reduce_scatter",
    "ring_forward",
    "scatter_object_list",
    "send_backward",
    "send_backward_recv_backward",
    "send_backward_recv_forward",
    "send_forward",
    "send_forward_backward_recv_forward_backward",
    "send_forward_recv_backward",
    "send_forward_recv_forward",
    "send_obj_meta",
    "split_tensor_into_1d_equal_chunks",
]
