"""Tokens to the ranks that hold their experts, and back.

Rows, one for each choice of a token, are sorted by the expert that they go to, sent to its rank, computed
there, sent back, and added up with the weights of the choices.  Nothing is padded: a rank sends as many rows
as there are choices of experts elsewhere.  The local experts of all ranks are taken in a few pieces, and the
rows of one piece travel while those of another are computed, in both passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from colossalai.kernel import expert_rows
from colossalai.mesh import Axes, Mesh, start_exchange
from colossalai.mesh.layout import piece as share
from colossalai.nn.layer.moe.products import RowsPerExpert
from colossalai.nn.layer.moe.tokens import gather_over

# The outputs of the local experts from the first to before the second number, for their rows, expert by
# expert.
ExpertFunction = Callable[[Tensor, RowsPerExpert, slice], Tensor]


@dataclass(frozen=True)
class _Piece:
    """The rows of some of the local experts of each rank."""

    experts: slice
    rows: RowsPerExpert
    """Of each local expert, from all ranks."""
    send: tuple[int, ...]
    """How many rows go to each rank."""
    receive: tuple[int, ...]
    by_expert: Tensor | None = None
    """The order of received rows by expert; None if they come so."""


@dataclass(frozen=True)
class Dispatch:
    """Which rows go where: a plan without a gradient, which a recomputation takes from the first run."""

    token: Tensor
    """The token of each row, (rows,)."""
    row: Tensor
    """The row of each choice of a token, (tokens, k); of choices that are not kept, any."""
    kept: Tensor | None
    """Which choices go to their experts, (tokens, k); None if all do."""
    pieces: list[_Piece]


class DispatchAlone(NamedTuple):
    """What one rank that has all tokens and all experts decides."""

    dispatch: Dispatch
    total: Tensor
    """How many choices fell on each expert."""
    taken: Tensor
    """How many of them find a place."""


@torch.no_grad()
def plan_alone(chosen: Tensor, experts: int, capacity: int | None = None) -> DispatchAlone:
    """Sort the choices ``chosen`` (tokens, k) by their experts, where all are on this rank.

    Of each expert the first ``capacity`` are kept, all first choices before the second ones.  There are rows
    for the others as well, after those of all experts: how many are kept is then not asked of the device,
    which would have to be waited for.
    """
    tokens, k = chosen.shape
    flat = chosen.T.flatten()
    total = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
    total.scatter_add_(0, flat, torch.ones_like(flat))
    # a sort of few bits is faster
    order = (flat.to(torch.int8) if experts <= 127 else flat).sort(stable=True).indices
    every = torch.arange(len(flat), device=chosen.device)
    row = torch.empty_like(flat).scatter_(0, order, every)
    kept, taken, ends = None, total, None
    if capacity is not None:
        place = row - (total.cumsum(0) - total)[flat]
        kept, taken = place < capacity, total.clamp(max=capacity)
        ends = taken.cumsum(0, dtype=torch.int32)
        row = (ends - taken)[flat] + place
        # those that are not kept write behind the last row; their rows are those of token 0
        behind = torch.where(kept, row, len(flat))
        order = torch.zeros(len(flat) + 1, dtype=torch.int64, device=chosen.device).scatter_(0, behind, every)
        row, order = row.clamp(max=max(len(flat) - 1, 0)), order[:-1]
        kept = kept.view(k, tokens).T.contiguous()
    piece = _Piece(slice(0, experts), RowsPerExpert(taken, ends), (), ())
    token = order % tokens if tokens else order
    return DispatchAlone(Dispatch(token, row.view(k, tokens).T.contiguous(), kept, [piece]), total, taken)


@torch.no_grad()
def plan_dispatch(
    chosen: Tensor,
    kept: Tensor | None,
    experts: int,
    mesh: Mesh | None,
    axes: Axes,
    pieces: int = 2,
) -> Dispatch:
    """Sort the choices ``chosen`` (tokens, k) of ``experts``, which lie on the ranks of ``axes`` one rank
    after the other.
    """
    ranks = 1 if mesh is None else mesh.group_size(*axes)
    if ranks == 1 and kept is None and not chosen.is_meta:
        return plan_alone(chosen, experts).dispatch
    local = experts // ranks
    pieces = 1 if ranks == 1 else max(n for n in range(1, pieces + 1) if local % n == 0)
    k, per = chosen.size(1), local // pieces
    # the place of each expert in the order (piece, rank, expert of the piece)
    place = torch.arange(experts, device=chosen.device).view(pieces, ranks, per).transpose(0, 1).flatten()
    key = place[chosen.flatten()]
    choice = None if kept is None or chosen.is_meta else kept.flatten().nonzero().squeeze(1)
    if choice is not None:
        key = key[choice]
    order = key.argsort(stable=True)
    ordered = order if choice is None else choice[order]
    row = torch.zeros(chosen.numel(), dtype=torch.int64, device=chosen.device)
    row[ordered] = torch.arange(len(ordered), device=chosen.device)
    plan = _even_pieces if chosen.is_meta else _pieces
    return Dispatch(
        token=ordered // k,
        row=row.view_as(chosen),
        kept=None if choice is None else kept,
        pieces=plan(key, (pieces, ranks, per), mesh, axes),
    )


def _pieces(key: Tensor, shape: tuple[int, int, int], mesh: Mesh | None, axes: Axes) -> list[_Piece]:
    pieces, ranks, per = shape
    counts = torch.zeros(pieces * ranks * per, dtype=torch.int64, device=key.device)
    counts.scatter_add_(0, key, torch.ones_like(key))
    if ranks == 1:
        return [_Piece(slice(0, per), RowsPerExpert(counts), (), ())]
    assert mesh is not None
    every = gather_over(counts[None], mesh, axes).view(ranks, pieces, ranks, per).cpu()
    here = mesh.ranks(*axes).index(mesh.rank)
    found = []
    for piece in range(pieces):
        arriving = every[:, piece, here]  # (ranks, per)
        expert = torch.arange(per).repeat(ranks).repeat_interleave(arriving.flatten())
        found.append(
            _Piece(
                slice(piece * per, (piece + 1) * per),
                RowsPerExpert(arriving.sum(0).tolist()),
                tuple(every[here, piece].sum(-1).tolist()),
                tuple(arriving.sum(-1).tolist()),
                None if per == 1 else expert.argsort(stable=True).to(key.device, non_blocking=True),
            )
        )
    return found


def _even_pieces(key: Tensor, shape: tuple[int, int, int], mesh: Mesh | None, axes: Axes) -> list[_Piece]:
    """The same where no values exist: every expert of every rank gets as many rows."""
    pieces, ranks, per = shape
    counts = [share(len(key), pieces * ranks * per, i)[1] for i in range(pieces * ranks * per)]
    if ranks == 1:
        return [_Piece(slice(0, per), RowsPerExpert(counts), (), ())]
    found = []
    for piece in range(pieces):
        here = counts[piece * ranks * per : (piece + 1) * ranks * per]
        send = tuple(sum(here[rank * per : (rank + 1) * per]) for rank in range(ranks))
        rows = RowsPerExpert([share(sum(send), per, i)[1] for i in range(per)])
        order = None if per == 1 else torch.empty(sum(send), dtype=torch.int64, device=key.device)
        found.append(_Piece(slice(piece * per, (piece + 1) * per), rows, send, send, order))
    return found


def run_experts(
    x: Tensor, weights: Tensor, plan: Dispatch, experts: ExpertFunction, mesh: Mesh | None, axes: Axes
) -> Tensor:
    """For each token of ``x`` (tokens, features) the outputs of its experts, added up with ``weights``
    (tokens, k).
    """
    rows = _Rows.apply(x, plan.token, plan.row, plan.kept)
    if len(plan.pieces) == 1 and not plan.pieces[0].send:
        (only,) = plan.pieces
        return _combined(experts(rows, only.rows, only.experts), weights, plan)
    assert mesh is not None
    parts = rows.split([sum(piece.send) for piece in plan.pieces])
    coming = [
        start_exchange(part, piece.send, piece.receive, axes, mesh)
        for part, piece in zip(parts, plan.pieces, strict=True)
    ]
    going = []
    for piece, arrived in zip(plan.pieces, coming, strict=True):
        made = _in_order(arrived(), piece.by_expert)
        made = experts(made, piece.rows, piece.experts)
        made = _in_order(made, None if piece.by_expert is None else _inverse(piece.by_expert))
        going.append(start_exchange(made, piece.receive, piece.send, axes, mesh))
    return _combined(torch.cat([returned() for returned in going]), weights, plan)


def _in_order(x: Tensor, order: Tensor | None) -> Tensor:
    if order is None:
        return x
    rows: Tensor = _Rows.apply(x, order, _inverse(order)[:, None], None)
    return rows


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def _combined(rows: Tensor, weights: Tensor, plan: Dispatch) -> Tensor:
    if not len(rows):  # no choice has found a place
        rows = torch.cat([rows, rows.new_zeros(1, rows.size(1))])
    combined: Tensor = _Combined.apply(rows, weights, plan.token, plan.row, plan.kept)
    return combined.to(rows.dtype)


def _fuses(rows: Tensor) -> bool:
    """Whether kernels of ours compute with ``rows``; not in a backward pass that is to be differentiated."""
    return expert_rows.available(rows) and not torch.is_grad_enabled()


def _of_choice(rows: Tensor, row: Tensor, kept: Tensor | None, j: int) -> Tensor:
    """The row of the choice number ``j`` of each token; 0 if it has none."""
    part = rows.index_select(0, row[:, j])
    return part if kept is None else part.masked_fill(~kept[:, j, None], 0)


class _Rows(torch.autograd.Function):
    """Takes the row of its token for each row.

    Its backward pass gathers, too: each token has k rows, so nothing is added up in an order by chance.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, row: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(row, kept)
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        row, kept = ctx.saved_tensors
        if not len(grad):
            return grad.new_zeros(len(row), grad.size(1)), None, None, None
        if _fuses(grad):
            return expert_rows.add_rows(grad, row, None, kept), None, None, None
        total = _of_choice(grad, row, kept, 0)
        for j in range(1, row.size(1)):
            total = total + _of_choice(grad, row, kept, j)
        return total, None, None, None


class _Combined(torch.autograd.Function):
    """Adds up, for each token, its rows times their weights."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, token: Tensor, row: Tensor, kept: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, token, row, kept)
        if _fuses(rows):
            return expert_rows.add_rows(rows, row, weights, kept)
        total = _of_choice(rows, row, kept, 0) * weights[:, 0, None]
        for j in range(1, row.size(1)):
            total = total + _of_choice(rows, row, kept, j) * weights[:, j, None]
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows, weights, token, row, kept = ctx.saved_tensors
        if _fuses(rows):
            return *expert_rows.spread_rows(grad, rows, row, weights, kept), None, None, None
        of_weights = torch.stack(
            [(grad * _of_choice(rows, row, kept, j)).sum(-1) for j in range(row.size(1))], 1
        )
        # the weight of each row, by the choice that it belongs to
        counted = weights if kept is None else weights * kept
        flat = torch.zeros(len(rows), dtype=weights.dtype, device=weights.device)
        flat = flat.scatter_add(0, row.flatten(), counted.flatten())
        of_rows = grad.index_select(0, token) * flat[: len(token), None]
        if len(of_rows) < len(rows):
            of_rows = torch.zeros_like(rows)
        return of_rows.to(rows.dtype), of_weights.to(weights.dtype), None, None, None
