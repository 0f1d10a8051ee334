"""Backward passes that communicate by hand have no gradient of their own."""

from __future__ import annotations

import torch


def check_first_order(what: str) -> None:
    """Refuse to be part of a graph of gradients (``create_graph=True``), where autograd would not see what
    ranks send each other.

    Autograd enables gradients inside of a backward pass in this case only.  ``what`` is cut over the ranks.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"a backward pass with create_graph=True goes through {what} that tensor parallelism has cut over"
            " ranks, whose gradient has no gradient; compute the penalty without it, or train without tensor"
            " parallelism"
        )
