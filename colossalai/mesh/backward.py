"""Calls a function when the backward pass of a tensor begins.

[Note: outputs that change] A hook of a tensor is a hook of the node that made it.  An operation in place on a
view gives the view, and all others of the same memory, new nodes, and the old one is in no graph any more;
what stays is the node that made the memory's owner, on which the new ones build. A linear layer with input of
three dims returns a view, so ``relu_`` behind it is enough.  So the moment at which the backward pass of a
call begins is the first of: the node of one of its outputs runs, or that of the tensor it is a view of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


def when_known(tensor: Tensor, function: Callable[[Any], None]) -> None:
    """Call ``function`` when the gradient of what ``tensor`` is now is known."""
    # torch's own register_hook does not ask for the node, and reads freed memory of a view whose memory was
    # written to
    node = tensor.grad_fn
    if node is None:
        tensor.register_hook(function)
    else:
        node.register_prehook(function)


def before_backward(tensors: Iterable[Tensor], function: Callable[[Any], None]) -> None:
    """Call ``function`` before anything behind ``tensors`` has its backward pass; see [Note: outputs that
    change].
    """
    for tensor in tensors:
        when_known(tensor, function)
        if tensor._base is not None and tensor._base.grad_fn is not None:
            when_known(tensor._base, function)


class Once:
    """A function of no arguments, to be called when the first of several gradients is known, and not
    again.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function

    def __call__(self, grads: Any) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()
