"""Products with a weight, by the plan of :mod:`colossalai.mesh.products.matmul`.

A weight with a ``ComputeSpec`` that is cut along its columns gives results that are cut along their last dim
(role N); one that is cut along its rows takes inputs that are cut along their last dim and gives sums (role
K).  A whole weight and an input of which each rank holds some rows is role M.  Whatever else meets is brought
together first.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from colossalai._numeric import autocast_dtype
from colossalai.mesh import Layout, MatmulPlan, matmul, redistribute
from colossalai.tensor.colo_tensor import ColoTensor, as_whole, cut_dim, on_wholes, whole_result, wrap
from colossalai.tensor.compute_spec import ComputePattern
from colossalai.tensor.distspec import cut_along
from colossalai.tensor.op_wrapper import colo_op_impl
from colossalai.tensor.pieces import as_piece
from colossalai.tensor.process_group import ProcessGroup


def is_planned(x: Any, weight: Any) -> bool:
    """Whether ``x @ weight`` has a plan; without one, both are brought together."""
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or weight.ndim != 2 or x.ndim < 2:
        return False
    if isinstance(weight, ColoTensor) and cut_dim(weight) is not None:
        return weight.has_compute_pattern(ComputePattern.TP1D)
    dim = cut_dim(x)
    return dim is not None and dim < x.ndim - 1


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, turned: bool = False) -> Tensor:
    """``x @ weight + bias`` of whole tensors, computed where the pieces of ``weight`` or the rows of ``x``
    lie.

    ``turned`` says that the weight is stored as (out, in).
    """
    if isinstance(weight, ColoTensor) and cut_dim(weight) is not None:
        pg, w = weight.process_group, weight.placement.transposed() if turned else weight.placement
        replicate = weight.compute_spec is None or weight.compute_spec.output_replicate
    else:
        assert isinstance(x, ColoTensor)
        pg, w, replicate = x.process_group, cut_along(None, 2), False
    x, at_rest = _input(x, w, pg)
    plan = _plan(at_rest, w)
    x, weight, bias = _autocast(x, weight, bias)
    y = matmul(x, as_piece(weight).t() if turned else as_piece(weight), plan, pg.mesh)
    if not plan.y.sharded:
        return whole_result(y if bias is None else y + as_piece(as_whole(bias)), pg)
    result: Tensor = wrap(y, pg, plan.y)
    if bias is not None:
        result = result + bias
    return whole_result(result, pg) if replicate else result


@lru_cache(maxsize=256)
def _plan(x: Layout, w: Layout) -> MatmulPlan:
    return MatmulPlan(x, w, Layout((*x.dims[:-1], w.dims[1])))


def _input(x: Tensor, w: Layout, pg: ProcessGroup) -> tuple[Tensor, Layout]:
    """``x`` as a product with a weight in ``w`` takes it."""
    dim = cut_dim(x)
    if dim is None:
        return as_piece(x), cut_along(None, x.ndim)
    assert isinstance(x, ColoTensor)
    if x.process_group != pg:
        raise ValueError(
            f"the input of a product lies on {x.process_group}, its weight on {pg}; bring one to the other's"
            " process group with redistribute(dist_spec, pg)"
        )
    # a weight that is cut takes its input whole (N) or cut along the features (K); one that is whole takes
    # rows as they are (M)
    layout = cut_along(x.ndim - 1 if w.dims[0] else None, x.ndim) if w.sharded else x.placement
    return redistribute(as_piece(x), x.placement, layout, pg.mesh), layout


def _autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What autocast does to the operands of a product; it does not look into an autograd function."""
    if (dtype := autocast_dtype(x.device)) is None:
        return x, weight, bias
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


@colo_op_impl(torch.nn.functional.linear)
def _(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if is_planned(input, weight):
        return product(input, weight, bias, turned=True)
    return on_wholes(torch.nn.functional.linear, (input, weight, bias), {})


def _addmm(func: Any) -> Any:
    def implementation(
        input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1, **kwargs: Any
    ) -> Any:
        if kwargs or not is_planned(mat1, mat2):
            return on_wholes(func, (input, mat1, mat2), {"beta": beta, "alpha": alpha, **kwargs})
        if alpha != 1:
            mat1 = mat1 * alpha
        return product(mat1, mat2, input if beta == 1 else input * beta)

    return implementation


def _matmul(func: Any) -> Any:
    def implementation(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 2 and not kwargs and is_planned(*args):
            return product(*args)
        return on_wholes(func, args, kwargs)

    return implementation


_PRODUCTS: dict[Any, Any] = {
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.__matmul__: _matmul,
}
for _func, _make in _PRODUCTS.items():
    colo_op_impl(_func)(_make(_func))
