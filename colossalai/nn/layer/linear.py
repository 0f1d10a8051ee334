"""The linear layer of all modes.

``y = x A + b`` is one planned product (:mod:`colossalai.mesh.products.plan`).  A linear either *expands* the
residual stream, from its hidden layout to the inner one, or *contracts* it back; which, is its role.  What 1D
calls column and row, and 3D the exchange of input and output groups, are these two roles.

The bias is cut like the features of y and added after the last sum, so it counts once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colossalai.nn.init as init
from colossalai.mesh import Layout, MatmulPlan, Mesh, Order, full_shape, matmul, use
from colossalai.nn.layer.base import Fill, ParallelLayer
from colossalai.nn.modes import TensorParallel, at_rank, set_stream_position, stream_position

Direction = Literal["expand", "contract"]


class Linear(ParallelLayer):
    """``torch.nn.Linear``, cut as the mode says.

    ``role`` is ``"expand"`` or ``"contract"``; without it, Linears alternate, beginning with one that
    expands. ``fused``: the output holds that many blocks of equal size (3 for query, key and value), each of
    which is cut. ``gather_output``: the output is whole on every rank along its features.
    ``parallel_input=False``: so is the input of a contracting layer.  ``skip_bias_add``: returns ``(x A, b)``
    for the caller to add. ``weight_order`` is how the weight is stored, ``"oi"`` (torch's) or ``"io"``; by
    default as the mode's documents show it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        weight_initializer: Fill | None = init.WEIGHT,
        bias_initializer: Fill | None = init.BIAS,
        *,
        role: Direction | None = None,
        fused: int = 1,
        gather_output: bool = False,
        parallel_input: bool = True,
        skip_bias_add: bool = False,
        weight_order: Order | None = None,
        tp: TensorParallel | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(tp, mesh)
        self.in_features, self.out_features, self.fused = in_features, out_features, fused
        self.skip_bias_add = skip_bias_add
        self.order: Order = weight_order or ("oi" if self.plain else self.tp.weight_order)
        self.role: Direction = self._take_role(role)
        expands = self.role == "expand"
        x, y = (self.tp.hidden, self.tp.inner) if expands else (self.tp.inner, self.tp.hidden)
        if not parallel_input:
            x = replace(x, dims=(*x.dims[:-1], ()))
        if gather_output:
            y = replace(y, dims=(*y.dims[:-1], ()))
        if fused > 1:
            y = replace(y, fused=(1, 1, fused))
        w = replace(self.tp.expand if expands else self.tp.contract, fused=(1, fused))
        self._plan = MatmulPlan(x, w, y, keep_operands=self.tp.keep_operands)
        self._plans = {3: self._plan}
        self._check_size("in_features", in_features, (x.dims[-1], w.dims[0]))
        self._check_size("out_features", out_features, (w.dims[1], y.dims[-1]), fused)
        shape, io = (out_features, in_features), self.order == "io"
        self.weight = self._parameter(
            shape[::-1] if io else shape,
            w if io else w.transposed(),
            weight_initializer,
            fan_in=in_features,
            fan_out=out_features,
            dtype=dtype,
            # a layer that stores (in, out) by choice of its mode still has (out, in) in checkpoints
            transposed=io and weight_order is None,
        )
        self.bias = None
        if bias:
            along = Layout((y.dims[-1],), fused=(fused,))
            self.bias = self._parameter(
                (out_features,), along, bias_initializer, fan_in=in_features, dtype=dtype
            )
        self._local_in = in_features if self.plain else in_features // self.mesh.group_size(*x.dims[-1])
        # last: a layer that was refused leaves the stream where it was
        if role is None and self._follows_cursor():
            hidden = not expands or y.dims == self.tp.hidden.dims  # 1D's hidden is what gather_output gives
            set_stream_position("hidden" if hidden else "inner", self.mesh)

    def _take_role(self, role: Direction | None) -> Direction:
        if role not in (None, "expand", "contract"):
            raise ValueError(f"{type(self).__name__}: role is 'expand' or 'contract', got {role!r}")
        if role is not None or not self._follows_cursor():
            return role or "expand"
        return "expand" if stream_position(self.mesh) == "hidden" else "contract"

    def _follows_cursor(self) -> bool:
        return not self.plain and self.tp.hidden != self.tp.inner

    @classmethod
    def from_native(
        cls,
        module: nn.Module,
        role: Direction,
        *,
        tp: TensorParallel,
        mesh: Mesh | None,
        fused: int = 1,
        gather_output: bool = False,
        parallel_input: bool = True,
    ) -> Linear:
        """This rank's piece of an ``nn.Linear``, or of Hugging Face's ``Conv1D``, under the same parameter
        names.

        The weight keeps the native order of its dims.  A module on the meta device stays there, to be loaded
        later.
        """
        weight, bias = module.weight, module.bias
        assert isinstance(weight, Tensor)
        assert bias is None or isinstance(bias, Tensor)
        native: Order = "io" if type(module).__name__ == "Conv1D" else "oi"
        n_in, n_out = weight.shape if native == "io" else weight.shape[::-1]
        with torch.device("meta"):
            layer = cls._bare(
                n_in,
                n_out,
                bias is not None,
                role=role,
                fused=fused,
                gather_output=gather_output,
                parallel_input=parallel_input,
                weight_order=native,
                tp=tp,
                mesh=mesh,
            )
        layer._adopt("weight", weight)
        layer._adopt("bias", bias)
        return layer.train(module.training)

    @classmethod
    def _bare(cls, n_in: int, n_out: int, bias: bool, **how: object) -> Linear:
        return Linear(n_in, n_out, bias, None, None, None, **how)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        if self.plain:
            weight = self.weight if self.order == "oi" else self.weight.t()
            if not self.skip_bias_add:
                return F.linear(x, weight, self.bias)
            return F.linear(x, weight), self.bias
        if x.size(-1) != self._local_in:
            raise ValueError(
                f"{type(self).__name__}({self.in_features}, {self.out_features}), which {self.role}s, needs"
                f" this rank's {self._local_in} of {self.in_features} features, got an input of shape"
                f" {tuple(x.shape)}"
            )
        plan = self._plans.get(x.ndim) or self._new_plan(x.ndim)
        bias = None if self.bias is None else use(self.bias, plan.y.rows, self.mesh)
        now = None if self.skip_bias_add else bias
        y = matmul(x, self.weight, plan, self.mesh, bias=now, order=self.order)
        return (y, bias) if self.skip_bias_add else y

    def _new_plan(self, ndim: int) -> MatmulPlan:
        x, w, y = self._plan.x, self._plan.w, self._plan.y
        fused = (*((1,) * (ndim - 1)), self.fused) if y.fused else ()
        plan = MatmulPlan(
            at_rank(x, ndim),
            w,
            replace(at_rank(replace(y, fused=()), ndim), fused=fused),
            keep_operands=self._plan.keep_operands,
        )
        self._plans[ndim] = plan
        return plan

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None},"
            f" role={self.role}, weight={tuple(full_shape(self.weight))} as {self._plan.w}"
        )
