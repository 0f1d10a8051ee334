"""Parameters that are moved for an operation, and moved once more for its backward pass.

A weight that is cut over the ranks that cut the batch is gathered for its product (ZeRO-3).  Autograd would
keep what was gathered until the backward pass, and nothing would be saved; so it keeps the piece instead, and
how it was moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from colossalai.mesh import Layout, Links, Mesh, move


def without_copies(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    pieces: Sequence[Tensor],
    copies: Sequence[Tensor],
    routes: Sequence[tuple[Layout, Layout]],
    mesh: Mesh,
    links: Links,
) -> Any:
    """``function(*args, **kwargs)``, of which autograd keeps ``pieces`` instead of ``copies``.

    Args:
        copies: arguments of the function, which were ``pieces`` before they were moved.
        routes: from which layout to which each was moved.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    dropped = {
        copy.untyped_storage().data_ptr(): _DroppedCopy(piece.detach(), piece._version, *route, mesh, links)
        for piece, copy, route in zip(pieces, copies, routes, strict=True)
    }

    def pack(tensor: Tensor) -> Tensor | _Saved:
        found = dropped.get(tensor.untyped_storage().data_ptr())
        if found is None:
            return tensor
        found.uses += 1
        return _Saved(found, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    with saved_tensors_hooks(pack, _unpack):
        return function(*args, **kwargs)


@dataclass
class _DroppedCopy:
    """A copy that can be made again of its piece."""

    piece: Tensor
    version: int
    src: Layout
    dst: Layout
    mesh: Mesh
    links: Links
    uses: int = 0
    """How many tensors of the operation's backward pass are views of it."""
    left: int = 0
    again: Tensor | None = None

    def whole(self) -> Tensor:
        """The copy; it is moved when the first of its uses asks, and let go of after the last."""
        if self.piece._version != self.version:
            raise RuntimeError(
                "a parameter was changed in place between the forward pass and the backward pass, which"
                " needs what it was; call backward before optimizer.step"
            )
        if self.again is None:
            self.again = move(self.piece, self.src, self.dst, self.mesh, links=self.links)
            self.left = self.uses
        again, self.left = self.again, self.left - 1
        if not self.left:
            self.again = None
        return again


@dataclass
class _Saved:
    """A view of a dropped copy."""

    of: _DroppedCopy
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _unpack(saved: Tensor | _Saved) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a model that autoparallelize has changed cannot give gradients of gradients (create_graph=True)"
            " through parameters that are gathered for their use"
        )
    return saved.of.whole().as_strided(saved.size, saved.stride, saved.offset)
