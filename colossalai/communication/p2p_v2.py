"""Objects between neighbouring pipeline stages: the messages of ``p2p``, with nothing said beforehand.

Tensors may lie anywhere in lists, tuples and dicts; all else in them is pickled.
"""

from __future__ import annotations

from typing import Any

from colossalai.communication import p2p


def recv_forward(prev_rank: int | None = None) -> Any:
    """Receive the object of the stage before; None on the first stage."""
    return p2p.recv_forward(prev_rank=prev_rank)


def recv_backward(next_rank: int | None = None) -> Any:
    """Receive the gradients from the next stage; None on the last stage."""
    return p2p.recv_backward(next_rank=next_rank)


def send_forward(output_object: Any, next_rank: int | None = None) -> None:
    """Send an object to the next stage; the last stage sends nothing."""
    p2p.send_forward(output_object, next_rank)


def send_backward(input_object: Any, prev_rank: int | None = None) -> None:
    """Send gradients to the stage before; the first stage sends nothing."""
    p2p.send_backward(input_object, prev_rank)
