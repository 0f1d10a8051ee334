"""The experts of a model of transformers, cut over ranks.

In transformers all experts of a layer are one module: its weights have a dim of experts, and it is called
with tokens, the experts that the model's router chose for each, and their weights.  So the router and all
code around it stay as they are; the module gets pieces of its weights, and sends tokens to the ranks that
have their experts (:mod:`colossalai.nn.layer.moe.dispatch`).  No token is dropped.

Such a module is known by what it has, not by its class: transformers' ``use_experts_implementation`` tells
how its weights lie, and which function stands between its two products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.mesh import Axes, Layout, Mesh, parameter, redistribute, replicated, use
from colossalai.mesh.rows import expert_axes
from colossalai.nn.layer.base import mark
from colossalai.nn.layer.moe.dispatch import plan_dispatch, run_experts
from colossalai.nn.layer.moe.products import RowsPerExpert, activated, grouped_product, of_experts
from colossalai.nn.policies.cutting.policy import Match
from colossalai.nn.policies.cutting.rules import CutContext
from colossalai.nn.policies.wrap_forward import (
    Forward,
    ForwardWrapper,
    argument_names,
    given_by_name,
    wrap_forward,
)
from colossalai.utils.activation_checkpoint import computed_once
from colossalai.utils.boosted import SHARED_EXPERTS, warn_unless_boosted

# What `use_experts_implementation` writes on a module.
_TOLD = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def holds_experts(module: nn.Module) -> bool:
    """Whether ``module`` holds all experts of a layer, and takes tokens, choices and weights."""
    number = getattr(module, "num_experts", None)
    held = [p for p in module._parameters.values() if p is not None]
    return (
        isinstance(number, int)
        and any(p.ndim == 3 for p in held)
        and all(p.ndim > 1 and len(p) == number for p in held)
        and len(argument_names(module.forward)) >= 3
    )


def find_experts(model: nn.Module) -> Iterator[Match]:
    """The modules of ``model`` that hold experts, with the rule for them."""
    for name, module in model.named_modules():
        if holds_experts(module):
            yield name, module, CutExperts()


@dataclass(frozen=True)
class CutExperts:
    """A module of transformers with all experts of a layer.

    Ranks of the expert axes (``parallel.moe``) hold different experts, and in 1D the tensor-parallel ranks
    different inner features of each.
    """

    def cut(self, module: nn.Module, context: CutContext) -> nn.Module:
        over = _Shares.of(module, context) if _is_told(module, context) else None
        if over is None or (not over.experts and not over.inner):
            return module
        for name, native in module._parameters.items():
            if native is None:
                continue
            layout = over.layout(name, native.ndim)
            piece = parameter(native, layout, context.mesh)
            mark(piece, context.mesh.group_size(*over.inner) if over.cuts(name) else 1)
            module._parameters[name] = context.one(native, piece)
        wrap_forward(module, ExpertsElsewhere)
        module.shares = over  # type: ignore[assignment]
        return module


@dataclass(frozen=True)
class _Shares:
    """How the experts of one module are shared out."""

    mesh: Mesh
    experts: Axes
    """The axes whose ranks hold different experts."""
    inner: Axes
    """The axes whose ranks hold different inner features of each."""
    number: int
    blocks: int
    """Gates and other inner features lie one behind the other in the first product: 2, else 1."""
    transposed: bool
    """Whether a matrix is (features in, features out)."""

    @classmethod
    def whole(cls, module: Any, mesh: Mesh) -> _Shares:
        """Those of a rank that holds all of ``module``."""
        blocks = 2 if module.has_gate and module.is_concatenated else 1
        return cls(mesh, (), (), module.num_experts, blocks, bool(module.is_transposed))

    @classmethod
    def of(cls, module: Any, context: CutContext) -> _Shares:
        mesh = context.mesh
        if context.stream_is_cut:
            raise ValueError(
                f"experts are cut in mode '1d' and by parallel.moe, not in mode {context.tp.mode!r}; use one"
                " of these"
            )
        shared = tuple(axis for axis in expert_axes(mesh, module.num_experts) if mesh.size[axis] > 1)
        inner = tuple(axis for axis in context.tp.inner.dims[-1] if mesh.size[axis] > 1)
        if getattr(module, "has_post_expert_norm", False):
            inner = ()  # the norm needs all features of an output
        own = replace(cls.whole(module, mesh), experts=shared, inner=inner)
        width = module._parameters["down_proj"].shape[1 if own.transposed else 2]
        parts = mesh.group_size(*inner)
        if width % parts:
            raise ValueError(
                f"the inner features of its experts, {width}, cannot be shared by {parts} tensor-parallel"
                f" ranks; choose a multiple of {parts}"
            )
        return own

    def cuts(self, name: str) -> bool:
        """Whether the parameter ``name`` has inner features."""
        return bool(self.inner) and name != "down_proj_bias"

    def layout(self, name: str, ndim: int) -> Layout:
        first = not name.startswith("down_proj")
        blocks = self.blocks if first else 1
        if ndim == 2:  # a bias
            return Layout((self.experts, self.inner if first else ()), fused=(1, blocks))
        # the first product makes inner features, the second one takes them
        last = first == self.transposed
        dims = ((), self.inner) if last else (self.inner, ())
        return Layout((self.experts, *dims), fused=(1, 1, blocks) if last else (1, blocks, 1))


def _tells(module: nn.Module) -> bool:
    """Whether ``module`` tells what its experts compute."""
    names = {name for name, p in module._parameters.items() if p is not None}
    known = {"gate_up_proj", "up_proj", "down_proj"}
    known |= {f"{name}_bias" for name in known}
    return all(hasattr(module, name) for name in _TOLD) and "down_proj" in names and names <= known


def _is_told(module: nn.Module, context: CutContext) -> bool:
    """Whether it is known what the experts of ``module`` compute; if not, ranks cannot share them out."""
    if _tells(module):
        return True
    if context.mesh.group_size(*expert_axes(context.mesh)) > 1:
        kind = type(module)
        raise ValueError(
            f"a {kind.__module__}.{kind.__name__} holds experts, but does not tell what they compute, as"
            " those of transformers with use_experts_implementation do; train it without parallel.moe"
        )
    return False


class ExpertsElsewhere(ForwardWrapper):
    """Holds some of the experts of a layer, or a part of each, and takes tokens for all of them."""

    shares: _Shares

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, chosen, weights = list(given_by_name(forward, args, kwargs).values())[:3]
        over, width = self.shares, x.size(-1)
        module: Any = self
        if module.training and over.experts and torch.is_grad_enabled() and not x.is_meta:
            warn_unless_boosted(module, *SHARED_EXPERTS)
        tokens, chosen, weights = (t.reshape(-1, t.size(-1)) for t in (x, chosen, weights))
        if over.inner:  # each rank computes a part of every output
            tokens, weights = (use(t, over.inner, over.mesh) for t in (tokens, weights))
        plan = computed_once(lambda: plan_dispatch(chosen, None, over.number, over.mesh, over.experts))
        y = run_experts(tokens, weights, plan, self._outputs, over.mesh, over.experts).to(x.dtype)
        if over.inner:
            partial = replace(replicated(2), partial=frozenset(over.inner))
            y = redistribute(y, partial, replicated(2), over.mesh)
        return y.view(*x.shape[:-1], width)

    def _outputs(self, x: Tensor, rows: RowsPerExpert, some: slice) -> Tensor:
        """The outputs of ``some`` of the local experts, of which each takes the next ``rows`` of ``x``."""
        module: Any = self
        first = "gate_up_proj" if module.has_gate else "up_proj"
        wide = self._product(first, x, rows, some)
        wide = module._apply_gate(wide) if module.has_gate else module.act_fn(wide)
        y = self._product("down_proj", wide, rows, some)
        return module.post_expert_norm(y) if getattr(module, "has_post_expert_norm", False) else y

    def _product(self, name: str, x: Tensor, rows: RowsPerExpert, some: slice) -> Tensor:
        weight: Tensor = of_experts(getattr(self, name), some)
        over = self.shares
        y = grouped_product(x, weight if over.transposed else weight.transpose(1, 2), rows)
        bias: Tensor | None = getattr(self, f"{name}_bias", None)
        if bias is None:
            return y
        if over.inner and not over.cuts(f"{name}_bias"):  # one of the ranks whose outputs are summed adds it
            first = not any(over.mesh.coord[axis] for axis in over.inner)
            bias = use(bias, over.inner, over.mesh) * float(first)
        return activated(y, of_experts(bias, some), rows, None)


class GeneratesTogether(ForwardWrapper):
    """A model whose ranks have different experts: one that has written its last word goes on with the passes
    of the others.
    """

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers does it; every rank of the job calls it."""
        return super().generate(*args, **{"synced_gpus": True, **kwargs})  # type: ignore[misc]


class WithoutExperts(ForwardWrapper):
    """Experts on the meta device, where no token has a choice: an output of the right form."""

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, _, weights = list(given_by_name(forward, args, kwargs).values())[:3]
        return x + weights.sum().to(x.dtype)


def leave_experts_out(twin: nn.Module) -> None:
    """Let the experts of ``twin``, a model without values, compute nothing: their code reads values."""
    for _, module, _ in list(find_experts(twin)):
        wrap_forward(module, WithoutExperts)


def play_even_loads(model: nn.Module, mesh: Mesh) -> None:
    """Let the experts of ``model``, on the meta device, take equally many tokens each: their own code reads
    choices, which have no values there.  Those that ranks share out do so already.
    """
    for _, module, _ in list(find_experts(model)):
        if _tells(module) and not isinstance(module, ExpertsElsewhere):
            wrap_forward(module, ExpertsElsewhere)
            module.shares = _Shares.whole(module, mesh)  # type: ignore[assignment]
