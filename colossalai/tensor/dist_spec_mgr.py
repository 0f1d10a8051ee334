"""Changing how a tensor lies among the tp ranks, with or without a trace in autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from colossalai.mesh import Layout, Mesh, move, redistribute


class DistSpecManager:
    """Converts pieces from one layout to another when the user asks for it.

    Conversions are recorded by autograd, as any operation is.
    """

    _recorded = True
    may_gather = False
    """Whether functions bring tensors together that are cut, see ``colo_tensor`` [Note: who may gather]."""

    @classmethod
    @contextmanager
    def no_grad(cls) -> Iterator[None]:
        """Conversions inside the block are not recorded: their results have no history.

        This is about ``redistribute``, ``set_dist_spec`` and the like; what functions do by themselves is
        recorded.
        """
        before, cls._recorded = cls._recorded, False
        try:
            yield
        finally:
            cls._recorded = before

    @classmethod
    @contextmanager
    def implicit_gathers(cls) -> Iterator[None]:
        """Inside the block every function may gather tensors that are cut; all tp ranks must run the block.

        The backward pass belongs into it where activations are computed again.
        """
        before, cls.may_gather = cls.may_gather, True
        try:
            yield
        finally:
            cls.may_gather = before

    @classmethod
    def is_recording(cls) -> bool:
        return cls._recorded and torch.is_grad_enabled()

    @classmethod
    def convert(cls, piece: Tensor, src: Layout, dst: Layout, mesh: Mesh) -> Tensor:
        """``piece``, which lies in ``src``, in ``dst``."""
        if cls._recorded:
            return redistribute(piece, src, dst, mesh)
        return move(piece.detach(), src, dst, mesh)
