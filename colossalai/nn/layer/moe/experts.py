"""Experts: the weights of all of them are one tensor for each kind, ``(experts, ...)``, cut over ranks.

So norms, ZeRO, checkpoints and the numbers of an optimizer follow from its layout, and the values of an
expert do not depend on the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import dropout, gelu

from colossalai.mesh import PIPELINE_AXIS, Axes, Layout, Mesh, place, random_key, use
from colossalai.mesh.rows import expert_axes, row_axes
from colossalai.nn.init import new_key, trunc_normal_, zeros_
from colossalai.nn.layer.base import ParallelLayer
from colossalai.nn.layer.dropout import exact_stream
from colossalai.nn.layer.moe.products import Activation, RowsPerExpert, activated, grouped_product, of_experts
from colossalai.nn.modes import TensorParallel, current
from colossalai.nn.random_streams import forked, own_numbers, seed

COMMUNICATIONS = ("all_to_all", "all_gather")


class MoeExperts(ParallelLayer):
    """Base of experts that lie on the ranks of a job with ``parallel.moe``.

    Args:
        comm_name: ``"all_to_all"``, where ranks hold different experts and tokens go to them, or
            ``"all_gather"``, where each rank holds a part of every expert and sees the tokens of all.
        num_experts: of all ranks together.
    """

    def __init__(
        self,
        comm_name: str,
        num_experts: int,
        *,
        tp: TensorParallel | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(tp, mesh)
        if comm_name not in COMMUNICATIONS:
            raise ValueError(f"comm_name is one of {', '.join(COMMUNICATIONS)}, got {comm_name!r}")
        if isinstance(num_experts, bool) or not isinstance(num_experts, int) or num_experts < 1:
            raise ValueError(f"num_experts is a positive integer, got {num_experts!r}")
        self.comm_name, self.num_total_experts = comm_name, num_experts
        cuts = (
            expert_axes(self.mesh, None if comm_name == "all_gather" else num_experts) if self._mesh else ()
        )
        self.axes: Axes = tuple(axis for axis in cuts if self.mesh.size[axis] > 1)
        """Those over which the experts, or their parts, are shared out."""
        ranks = self.mesh.group_size(*self.axes) if self._mesh else 1
        self.num_local_experts = num_experts if comm_name == "all_gather" else num_experts // ranks
        self.plain = self.plain and not self.axes

    leaves_rows_alone = False
    """Whether ``x`` may have more rows than the experts, whose outputs then have no meaning."""

    @property
    def summed(self) -> Axes:
        """The tensor axes over which the outputs are partial sums."""
        return ()

    def forward(self, x: Tensor, rows: RowsPerExpert, experts: slice | None = None) -> Tensor:
        """The outputs of the local ``experts`` (all by default), of which each takes the next ``rows`` of
        ``x``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what its experts compute")

    def extra_repr(self) -> str:
        return f"num_experts={self.num_total_experts}, here {self.num_local_experts} ({self.comm_name})"


class Experts(MoeExperts):
    """``num_experts`` modules of one class, built one after the other as a list of them would be.

    Args:
        expert_cls: the class (or ``expert``, its older name), of modules that map rows (rows, features) to
            rows.  ``expert_args`` are the arguments of its constructor.
    """

    def __init__(
        self,
        expert_cls: type[nn.Module] | Callable[..., nn.Module] | None = None,
        num_experts: int = 1,
        *,
        expert: type[nn.Module] | Callable[..., nn.Module] | None = None,
        tp: TensorParallel | None = None,
        mesh: Mesh | None = None,
        **expert_args: Any,
    ) -> None:
        super().__init__("all_to_all", num_experts, tp=tp, mesh=mesh)
        build = expert if expert_cls is None else expert_cls
        if build is None or (expert is not None and expert_cls is not None):
            raise TypeError(
                "Experts needs the class of its experts: Experts(expert=MyFFN, num_experts=4, ...)"
            )
        held: dict[str, list[Tensor]] = {}
        template = None
        for number in range(num_experts):
            module = build(**expert_args)
            self._check(module)
            for name, p in module.named_parameters():
                if self._first <= number < self._first + self.num_local_experts:
                    held.setdefault(name, []).append(p)
            template = template or module
            if template is not module:
                self._refuse_shared(module, template)
            if repr(module) != repr(template):
                raise ValueError(
                    "the experts of a layer differ in their weights alone, but the first is\n"
                    f"{template!r}\nand number {number} is\n{module!r}"
                )
        assert template is not None
        for name, pieces in held.items():
            layout = Layout((self.axes, *((),) * pieces[0].ndim))
            self.register_parameter(name.replace(".", "__"), self._stacked(pieces, layout))
        # every name, also those of a weight that an expert uses twice, and the name that it is held by
        first = {id(p): name for name, p in template.named_parameters()}
        every = template.named_parameters(remove_duplicate=False)
        self._names = {name: first[id(p)].replace(".", "__") for name, p in every}
        self._key = 0
        self._template = (template.to("meta"),)  # in a tuple, since it is no child: its weights are not used

    @property
    def _first(self) -> int:
        if not self.axes:
            return 0
        return self.mesh.ranks(*self.axes).index(self.mesh.rank) * self.num_local_experts

    def _stacked(self, pieces: list[Tensor], layout: Layout) -> nn.Parameter:
        param = nn.Parameter(torch.stack([p.detach() for p in pieces]), pieces[0].requires_grad)
        if self.axes:
            place(param, layout, (self.num_total_experts, *pieces[0].shape))
        return param

    @staticmethod
    def _refuse_shared(module: nn.Module, first: nn.Module) -> None:
        theirs = {id(p) for p in first.parameters()}
        for name, p in module.named_parameters():
            if id(p) in theirs:
                raise ValueError(
                    f"all experts share {name}, of which each would get a copy of its own; build it in the"
                    " constructor of the expert, or put what is shared before or behind the layer"
                )

    @staticmethod
    def _check(module: nn.Module) -> None:
        name = type(module).__name__
        if not isinstance(module, nn.Module):
            raise TypeError(f"an expert must be a module, got {name}")
        if next(module.buffers(), None) is not None:
            raise ValueError(
                f"{name} has buffers, such as those of a batch norm, which experts would have to keep apart;"
                " use modules with parameters alone"
            )
        if any(hasattr(p, "placement") for p in module.parameters()):
            raise ValueError(
                f"{name} has layers of colossalai.nn that tensor parallelism cuts; use those of torch.nn, or"
                " FFNExperts, whose weights are cut"
            )

    def forward(self, x: Tensor, rows: RowsPerExpert, experts: slice | None = None) -> Tensor:
        numbers = range(self.num_local_experts)[experts or slice(None)]
        weights = {name: getattr(self, held) for name, held in self._names.items()}
        outputs = []
        template = self._template[0].train(self.training)
        with self._numbers(numbers.start) if self.training else nullcontext():
            for number, part in zip(numbers, x.split(rows.sizes), strict=True):
                if len(part):
                    own = {name: weight[number] for name, weight in weights.items()}
                    outputs.append(self._checked(functional_call(template, own, (part,)), part))
            if not outputs:  # of the dtype that others send: autocast may have chosen it
                own = {name: weight[0] for name, weight in weights.items()}
                row = x.new_ones(1, x.size(1))
                with torch.no_grad():
                    outputs.append(self._checked(functional_call(template, own, (row,)), row)[:0])
        # rows and weights without any have a gradient of zero, as those of an expert without tokens have on
        # one rank
        nothing = [each.reshape(-1)[:0].sum().to(outputs[0].dtype) for each in (x, *weights.values())]
        outputs[0] = outputs[0] + sum(nothing)
        return torch.cat(outputs)

    def _checked(self, made: Any, rows: Tensor) -> Tensor:
        if not isinstance(made, Tensor) or made.shape != rows.shape:
            what = f"shape {tuple(made.shape)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
            raise ValueError(
                f"an expert, {type(self._template[0]).__name__}, must map rows to rows: for an input of shape"
                f" {tuple(rows.shape)} it gave {what}; wrap it in a module that gives one tensor of the same"
                " shape"
            )
        return made

    @contextmanager
    def _numbers(self, first: int) -> Iterator[None]:
        """Random numbers of this rank's rows, for dropout in an expert.

        How many it draws depends on its rows; whatever draws next must not hear of that, since ranks would
        get out of step.  So a micro-batch takes one number of torch's generator, on one rank as on many.
        """
        if first == 0:
            self._key = new_key()
        axes = {*row_axes(self.mesh), PIPELINE_AXIS} if self._mesh else set()
        places = [self.mesh.coord[a] for a in self.mesh.size if a in axes] if self._mesh else []
        with forked():
            seed(random_key(self._key, first, *places))
            yield


class FFNExperts(MoeExperts):
    """Experts of two linear layers with an activation between them, whose products are computed together.

    In the tensor mode ``1d`` the inner features of every expert are cut over the tensor-parallel ranks.
    """

    leaves_rows_alone = True

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_ff: int,
        activation: Activation | None = None,
        drop_rate: float = 0.0,
        *,
        gated: bool = False,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        tp: TensorParallel | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(self._communication(), num_experts, tp=tp, mesh=mesh)
        inner = self._inner_axes()
        self._check_size("d_ff", d_ff, [inner])
        self.activation, self.gated, self.drop_rate = activation or gelu, gated, drop_rate
        self.d_model, self.d_ff = d_model, d_ff
        own, blocks = self._expert_axes(), 2 if gated else 1
        fused = (1, 1, 2) if gated else ()
        first, second = math.sqrt(0.1 / d_model), math.sqrt(0.1 / d_ff)
        wide = Layout((own, (), inner), fused=fused)
        self.w1 = self._weight((num_experts, d_model, blocks * d_ff), wide, first, dtype)
        self.w2 = self._weight((num_experts, d_ff, d_model), Layout((own, inner, ())), second, dtype)
        self.b1 = self.b2 = None
        if bias:
            wide = Layout((own, inner), fused=fused[1:])
            self.b1 = self._weight((num_experts, blocks * d_ff), wide, 0.0, dtype)
            self.b2 = self._weight((num_experts, d_model), Layout((own, ())), 0.0, dtype)

    def _communication(self) -> str:
        return "all_to_all"

    def _expert_axes(self) -> Axes:
        return self.axes

    def _inner_axes(self) -> Axes:
        return self.summed

    def _dropped(self, wide: Tensor) -> Tensor:
        if not self.training or self.drop_rate == 0:
            return wide
        if exact_stream() is not None:
            raise ValueError(
                f"{type(self).__name__} has drop_rate={self.drop_rate}, and the rows of experts have other"
                " places under each plan: inside of plan_independent_dropout, build it with drop_rate=0"
            )
        if self._mesh is None:
            return dropout(wide, self.drop_rate)
        # ranks hold other rows, or other features, along all axes but those of tensor modes that cut neither
        others = {*row_axes(self.mesh), *self.summed, PIPELINE_AXIS}
        with own_numbers(self.mesh.in_order([a for a in self.mesh.size if a in others]), self.mesh):
            return dropout(wide, self.drop_rate)

    @property
    def summed(self) -> Axes:
        axes = self.tp.inner.dims[-1] if self.tp.mode == "1d" else ()
        return tuple(axis for axis in axes if self.mesh.size[axis] > 1) if self._mesh else ()

    def _weight(
        self, shape: tuple[int, ...], layout: Layout, std: float, dtype: torch.dtype | None
    ) -> nn.Parameter:
        fill = trunc_normal_(std=std) if std else zeros_()
        return self._parameter(shape, layout, fill, fan_in=shape[-1], dtype=dtype)

    def forward(self, x: Tensor, rows: RowsPerExpert, experts: slice | None = None) -> Tensor:
        some = slice(None) if experts is None else experts
        wide = grouped_product(x, of_experts(self.w1, some), rows)
        b1 = None if self.b1 is None else of_experts(self.b1, some)
        wide = self._dropped(activated(wide, b1, rows, self.activation, self.gated))
        y = grouped_product(wide, of_experts(self.w2, some), rows)
        if self.b2 is None:
            return y
        b2: Tensor = self.b2
        cut = self._inner_axes()
        if cut:  # outputs are added up over these ranks: one of them adds the bias
            b2 = use(b2, self.summed, self.mesh) * float(not any(self.mesh.coord[axis] for axis in cut))
        return activated(y, of_experts(b2, some), rows, None)


class TPExperts(FFNExperts):
    """``FFNExperts`` whose inner features are cut over the ranks of ``parallel.moe``, for fewer experts than
    ranks: each rank computes a part of all experts for the tokens of all these ranks.
    """

    def _communication(self) -> str:
        return "all_gather"

    def _expert_axes(self) -> Axes:
        return ()

    def _inner_axes(self) -> Axes:
        return (*self.axes, *self.summed)


def build_ffn_experts(
    num_experts: int, d_model: int, d_ff: int, activation: Activation | None = None, drop_rate: float = 0.0
) -> FFNExperts:
    """Experts that fit the ranks of ``parallel.moe``: ``FFNExperts`` if these divide ``num_experts``, and
    ``TPExperts`` if they divide ``d_ff``.
    """
    mesh = current().mesh
    ranks = 1 if mesh is None else mesh.group_size(*expert_axes(mesh))
    if num_experts % ranks == 0:
        return FFNExperts(num_experts, d_model, d_ff, activation, drop_rate)
    if d_ff % ranks == 0:
        return TPExperts(num_experts, d_model, d_ff, activation, drop_rate)
    raise ValueError(
        f"{ranks} ranks (parallel.moe.size) share neither num_experts={num_experts} nor d_ff={d_ff} evenly;"
        f" choose a multiple of {ranks} for one of them"
    )
