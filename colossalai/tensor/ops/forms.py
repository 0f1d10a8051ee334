"""Operations that are more than the same call on pieces: products, lookups, losses, random numbers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from colossalai.mesh import Layout, MatmulPlan, matmul, redistribute, reduce, shard
from colossalai.mesh.row_loss import Classes, row_losses
from colossalai.tensor.colo_tensor import ColoTensor, cut_dim, gathered, whole_result, wrap
from colossalai.tensor.distspec import cut_along
from colossalai.tensor.ops.dispatch import (
    RANDOM,
    WEIGHTS,
    Call,
    Cut,
    choose,
    finished,
    on_pieces,
    placed,
    run,
    runs_as,
)
from colossalai.tensor.ops.rows import lookup, outside, row_loss
from colossalai.tensor.pieces import as_piece, plain_torch
from colossalai.tensor.process_group import TP


@runs_as("linear", "mm", "matmul", "addmm")
def _product(call: Call) -> Any:
    """``x @ weight + bias`` by a ``MatmulPlan``, whose role follows from the letter."""
    cut, number = choose(call), WEIGHTS[call.name]
    x, weight = call.tensors[number - 1], call.tensors[number]
    if cut is None or weight.ndim != 2 or x.ndim < 2:
        return NotImplemented
    turned, rows = call.name == "linear", cut.operands[number - 1]
    if cut_dim(weight) is None and cut_dim(x) != rows:
        return NotImplemented
    if cut_dim(weight) is None and (rows is None or rows == x.ndim - 1):
        return NotImplemented  # only the weight could be cut, which is free
    x, w = _at_rest(call, number - 1, rows), cut_along(cut.operands[number], 2)
    y_dim = None if cut.summed else cut.outputs[0]
    plan = _plan(cut_along(rows, x.ndim), w.transposed() if turned else w, cut_along(y_dim, x.ndim))
    y = matmul(x, as_piece(weight), plan, call.pg.mesh, order="oi" if turned else "io")
    given = call.given
    bias = given.get("bias") if call.name == "linear" else given.get("self") if call.name == "addmm" else None
    if call.name == "addmm" and given["alpha"] != 1:
        y = y * given["alpha"]
    result: Tensor = wrap(y, call.pg, plan.y)
    if bias is not None:
        bias = bias if given.get("beta", 1) == 1 else bias * given["beta"]
        result = run(torch.add, (result, bias.to(y.dtype)), {})
    return whole_result(result, call.pg) if cut.spec is not None and cut.spec.output_replicate else result


def _at_rest(call: Call, number: int, dim: int | None) -> Tensor:
    """An operand as plans take it: a whole one stays in state I."""
    tensor = call.tensors[number]
    if cut_dim(tensor) is None or cut_dim(tensor) == dim:
        return as_piece(tensor) if cut_dim(tensor) == dim else placed(call, number, dim)
    assert isinstance(tensor, ColoTensor)
    return redistribute(as_piece(tensor), tensor.placement, cut_along(dim, tensor.ndim), call.pg.mesh)


@lru_cache(maxsize=256)
def _plan(x: Layout, w: Layout, y: Layout) -> MatmulPlan:
    return MatmulPlan(x, w, y)


# ---- lookups ----


@runs_as("embedding", "embedding_renorm_")
def _embedding(call: Call) -> Any:
    """A table that is cut along its rows or its features."""
    given = call.given
    weight: Any = given["self" if call.name == "embedding_renorm_" else "weight"]
    if cut_dim(weight) is None:
        return NotImplemented
    if call.name == "embedding_renorm_" or given["scale_grad_by_freq"]:
        raise ValueError(
            f"an embedding table of shape {tuple(weight.full_shape)} that is cut as {weight.dist_spec} cannot"
            " be used with max_norm or scale_grad_by_freq, which look at whole rows; leave the table whole"
        )
    ids, size = as_piece(gathered(given["indices"], call.func)), weight.size_global(0)
    padding = given["padding_idx"]
    padding = None if padding is None or padding == -1 else padding % size
    sparse, mesh = given["sparse"], call.pg.mesh
    if cut_dim(weight) == 0:
        rows = lookup(ids, as_piece(weight), size, (TP,), padding, mesh, sparse=sparse)
        return whole_result(reduce(rows, TP, mesh), call.pg)
    rows = torch.nn.functional.embedding(ids, as_piece(weight), padding, sparse=sparse)
    cut = Cut("n", (1, None), (ids.ndim,), False, weight.compute_spec)
    return finished(call, cut, rows)


# ---- losses ----


@runs_as("cross_entropy_loss", "nll_loss", "nll_loss_nd")
def _cross_entropy(call: Call) -> Any:
    given = call.given
    x = call.tensors[0]
    dim = cut_dim(x)
    of_rows = given.get("weight") is None and not call.tensors[1].is_floating_point()
    if call.name == "cross_entropy_loss" and of_rows and dim is not None and dim == min(1, x.ndim - 1):
        return _of_cut_classes(call, x, dim)
    cut = choose(call)
    if cut is None or not cut.summed or given["reduction"] != 1:
        return NotImplemented
    number = cut.operands[1]
    total = on_pieces(_summing(call), cut)
    target = placed(call, 1, number)
    counted = row_loss(
        torch.ones((), dtype=total.dtype, device=target.device),
        target,
        given["ignore_index"],
        (TP,),
        call.pg.mesh,
    )
    return run(torch.mul, (total, counted), {})


def _summing(call: Call) -> Call:
    """The same loss, added up instead of its mean."""
    named = [a.name for a in call.operation.op._schema.arguments]
    args = [call.given[name] for name in named]
    args[named.index("reduction")] = 2
    return Call(call.operation, tuple(args), {}, call.func)


def _of_cut_classes(call: Call, x: Tensor, dim: int) -> Tensor:
    """Rows of scores of which each rank holds some classes: two exchanges of one number per row."""
    assert isinstance(x, ColoTensor)
    given = call.given
    target, ignored = as_piece(gathered(call.tensors[1], call.func)), given["ignore_index"]
    valid = target != ignored
    classes = Classes(x.size_global(dim), (TP,), call.pg.mesh)
    if (wrong := outside(target.masked_fill(~valid, 0), classes.number)) is not None:
        raise IndexError(f"cross_entropy: target {wrong} is not one of {classes.number} classes")
    rows = as_piece(x).movedim(dim, -1).reshape(-1, classes.range()[1])
    losses = row_losses(rows, target.masked_fill(~valid, -1).flatten(), classes, given["label_smoothing"])
    losses = losses.view(target.shape).to(x.dtype)
    if given["reduction"] != 0:
        losses = losses.sum() / valid.sum() if given["reduction"] == 1 else losses.sum()
    return whole_result(losses, call.pg)


# ---- random numbers ----
#
# Those of the whole tensor, of which each rank keeps its piece. So they do not depend on the number of ranks,
# and the generators of the tp ranks, which must agree for whole tensors, stay in step. The price is that
# every rank draws numbers for the whole tensor.


@runs_as("dropout", "dropout_")
def _dropout(call: Call) -> Any:
    x, given = call.tensors[0], call.given
    assert isinstance(x, ColoTensor)
    if not given["train"]:
        return x
    mask = shard(torch.dropout(_like_whole(x, 1), given["p"], True), x.placement, call.pg.mesh)
    with plain_torch():
        if call.name == "dropout_":
            return x.mul_(mask)
        return wrap(as_piece(x) * mask, call.pg, x.placement)


def _like_whole(x: ColoTensor, value: float) -> Tensor:
    return torch.full(x.full_shape, value, dtype=x.dtype, device=x.device)


@runs_as(RANDOM)
def _draw_whole(call: Call) -> Any:
    """An operation with random numbers: one that fills a tensor fills the whole; others run on wholes."""
    op, x = call.operation, call.tensors[0]
    if call.name == "scaled_dot_product_attention" and call.given["dropout_p"] == 0:
        return NotImplemented
    fills = len(call.tensors) == 1 and (call.written or call.name.endswith("_like"))
    if not fills or not isinstance(x, ColoTensor):
        return call.on_wholes()
    whole = op.op(*call.with_tensors([_like_whole(x, 0)])[0], **call.kwargs)
    piece = shard(whole, x.placement, call.pg.mesh)
    if not call.written:
        return wrap(piece, call.pg, x.placement)
    with plain_torch():
        return x.copy_(piece)
