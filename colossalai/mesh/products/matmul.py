"""One matrix product for every tensor-parallel mode: fetch what the plan says, multiply, send the result
home.

The backward pass is the same with the transposed plan.  This is the only place (with ``summa``, the streamed
form) where communication and products overlap.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossalai._numeric import autocast_dtype
from colossalai.mesh.collectives import Pending
from colossalai.mesh.first_order import check_first_order
from colossalai.mesh.mesh import Mesh
from colossalai.mesh.movement import move, start_move
from colossalai.mesh.products.plan import MatmulPlan, Order, Stored
from colossalai.mesh.products.summa import Panels, stream_product


class _Matmul(torch.autograd.Function):
    # Saves x and w at rest and fetches them again in backward, so the gathered operands never outlive the
    # product; unless the plan keeps them, which costs memory and spares the second fetch.

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, plan: MatmulPlan, mesh: Mesh, stored: Stored
    ) -> Tensor:
        finish_x = start_move(x, plan.x, plan.x_use, mesh)
        w_use = start_move(w, stored.layout(plan.w), stored.layout(plan.w_use), mesh, stored.shape)()
        x_use = finish_x()
        ctx.save_for_backward(*((x_use, w_use) if plan.keep_operands else (x, w)))
        ctx.plan, ctx.mesh, ctx.stored = plan, mesh, stored
        now = bias if plan.y_use == plan.y else None
        y = F.linear(x_use, stored.out_in(w_use), now)
        # not in place: selective activation checkpointing keeps the product itself
        y = move(y, plan.y_use, plan.y, mesh, stored.whole_y(y, plan.y_use, mesh))
        return y if bias is None or now is not None else y + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        check_first_order("a product")
        (x, w), p, mesh, stored = ctx.saved_tensors, ctx.plan, ctx.mesh, ctx.stored
        db = dw = None
        finish_dx: Pending | None = None
        # whatever has to be fetched travels while something is computed
        fetch_w = fetch_x = None
        if not p.keep_operands and ctx.needs_input_grad[0]:
            fetch_w = start_move(w, stored.layout(p.w), stored.layout(p.w_use), mesh, stored.shape)
        if ctx.needs_input_grad[2]:
            db = dy.flatten(0, -2).sum(0)
        dy = move(dy, p.y.dual(), p.y_use.dual(), mesh, stored.whole_y(dy, p.y, mesh))
        if not p.keep_operands and ctx.needs_input_grad[1]:
            fetch_x = start_move(x, p.x, p.x_use, mesh)
        if ctx.needs_input_grad[0]:
            w = fetch_w() if fetch_w else w
            finish_dx = start_move(dy @ stored.out_in(w), p.x_use.dual(), p.x.dual(), mesh)
        if ctx.needs_input_grad[1]:
            x = fetch_x() if fetch_x else x
            dw = stored.gradient(x.flatten(0, -2), dy.flatten(0, -2))
            dw = start_move(
                dw, stored.layout(p.w_use.dual()), stored.layout(p.w.dual()), mesh, stored.shape
            )()
        return finish_dx() if finish_dx else None, dw, db, None, None, None


def matmul(
    x: Tensor,
    w: Tensor,
    plan: MatmulPlan,
    mesh: Mesh,
    *,
    bias: Tensor | None = None,
    order: Order = "io",
    shape: tuple[int, ...] | None = None,
) -> Tensor:
    """``x @ w + bias`` by ``plan``; x, w and the result lie in the plan's resting layouts.

    ``order`` says how w is stored: (in, out), or (out, in) as torch's layers do; the plan's layouts are
    written (in, out) in both cases.  ``shape`` is w's whole shape as it is stored, needed where pieces differ
    in length.  ``bias`` is ready to be used by this rank's rows (see :func:`colossalai.mesh.parameter.use`).
    """
    x, w, bias = _autocast(x, w, bias)
    stored = Stored(order, shape)
    panels = Panels.of(plan, mesh)
    if panels is not None:
        return stream_product(x, w, bias, plan, mesh, stored, panels)
    return _Matmul.apply(x, w, bias, plan, mesh, stored)


def _autocast(x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    # Cast outside of the autograd function: what travels is then in the lower precision as well.
    if (dtype := autocast_dtype(x.device)) is None:
        return x, w, bias
    return x.to(dtype), w.to(dtype), None if bias is None else bias.to(dtype)
