"""Parameters that know where they lie, and the norm of their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai.mesh.collectives as collectives
from colossalai.mesh.layout import Layout, replicated, shard
from colossalai.mesh.mesh import Mesh
from colossalai.mesh.movement import redistribute


def placement(tensor: Tensor) -> Layout:
    """Where ``tensor`` lies; a tensor that was never placed is identical everywhere.

    The attribute is ``placement`` because ``Tensor.layout`` is torch's own.
    """
    layout: Layout | None = getattr(tensor, "placement", None)
    return replicated(tensor.ndim) if layout is None else layout


class PlacedParameter(nn.Parameter):
    """A parameter whose copies lie where it lies: torch's own ``deepcopy`` forgets the attributes of a parameter."""

    def __deepcopy__(self, memo: dict[int, Any]) -> PlacedParameter:
        if id(self) not in memo:
            memo[id(self)] = super().__deepcopy__(memo)
            memo[id(self)].__dict__.update(self.__dict__)
        return memo[id(self)]


def place(tensor: Tensor, layout: Layout, shape: Iterable[int], *, transposed: bool = False) -> Tensor:
    """Write on ``tensor`` that it is a piece, in ``layout``, of a tensor of ``shape``.

    ``transposed``: the serial model stores this matrix the other way round; layout and shape are as stored here.
    """
    tensor.placement, tensor.full_shape = layout, torch.Size(shape)  # type: ignore[attr-defined]
    if transposed:
        tensor.transposed = True  # type: ignore[attr-defined]
    if type(tensor) is nn.Parameter:
        tensor.__class__ = PlacedParameter
    return tensor


def full_shape(tensor: Tensor) -> torch.Size:
    """The shape of the whole tensor that ``tensor`` is a piece of."""
    shape: torch.Size = getattr(tensor, "full_shape", tensor.shape)
    return shape


def serial_form(whole: Tensor, param: Tensor) -> Tensor:
    """A whole tensor stored like ``param`` (its value, gradient or optimizer state) as the serial model stores it.

    It is its own inverse: a tensor of the serial model becomes one that ``placement(param)`` cuts.
    """
    return whole.t() if getattr(param, "transposed", False) else whole


def parameter(full: Tensor, layout: Layout, mesh: Mesh, *, uneven: bool = False) -> nn.Parameter:
    """This rank's piece of ``full`` as a placed parameter."""
    piece = nn.Parameter(shard(full.detach(), layout, mesh, uneven=uneven), requires_grad=full.requires_grad)
    place(piece, layout, full.shape)
    return piece


def use(param: Tensor, rows: Iterable[str], mesh: Mesh) -> Tensor:
    """``param`` about to be applied to rows that the axes ``rows`` cut: its gradient is summed over them."""
    rest = placement(param)
    spread = frozenset(rows).difference(rest.sharded)
    return redistribute(param, rest, _spread(rest, spread), mesh) if spread else param


@lru_cache(maxsize=1024)
def _spread(layout: Layout, axes: frozenset[str]) -> Layout:
    return replace(layout, spread=axes)


def grad_norm(params: Iterable[Tensor], mesh: Mesh, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients of the whole model: every distinct piece is counted once, replicas are not.

    Parameters are grouped by the set of axes that cut them; each group's sum needs one reduction over those axes.
    """
    norm_type = float(norm_type)
    if norm_type <= 0:
        raise ValueError(f"norm_type must be positive or inf, got {norm_type}")
    groups: dict[frozenset[str], list[Tensor]] = {}
    device = torch.device(mesh.device_type)
    for p in params:
        if p.grad is not None:
            device = p.grad.device
            groups.setdefault(frozenset(placement(p).sharded), []).append(p.grad.detach())
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    result = torch.zeros((), device=device)
    # Every rank must reduce the same groups in the same order, whatever the order of its parameters.
    for axes, grads in sorted(groups.items(), key=lambda item: sorted(item[0])):
        norms = torch.stack([torch.linalg.vector_norm(g.float(), norm_type) for g in grads])
        part = norms.amax() if math.isinf(norm_type) else norms.pow(norm_type).sum()
        for axis in mesh.in_order(tuple(axes)):
            part = collectives.all_reduce(part, mesh, axis, op)
        result = torch.maximum(result, part) if math.isinf(norm_type) else result + part
    return result if math.isinf(norm_type) else result.pow(1.0 / norm_type)


def clip_grads(params: Iterable[Tensor], max_norm: float, mesh: Mesh, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients so that their common norm is at most ``max_norm``; returns the norm before."""
    if not max_norm >= 0:
        raise ValueError(f"clip_grads needs a max_norm of at least 0, got {max_norm}")
    params = [p for p in params if p.grad is not None]
    norm = grad_norm(params, mesh, norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch's own formula, so that both clip alike
    for p in params:
        assert p.grad is not None
        p.grad.detach().mul_(scale.to(p.grad.device))
    return norm
