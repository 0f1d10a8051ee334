"""``MoeLayer``: a gate, a router and experts in the place of a feed-forward layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colossalai.context.moe_context import MOE_CONTEXT
from colossalai.mesh import PIPELINE_AXIS, Layout, Mesh, gather, redistribute, replicated, scatter, use
from colossalai.nn.init import WEIGHT, trunc_normal_
from colossalai.nn.layer.base import ParallelLayer
from colossalai.nn.layer.moe.dispatch import plan_dispatch, run_experts
from colossalai.nn.layer.moe.experts import Experts, MoeExperts
from colossalai.nn.layer.moe.routers import (
    ExpertLoads,
    MoeRouter,
    NoisyFunc,
    NormalNoiseGenerator,
    Routing,
    UniformNoiseGenerator,
)
from colossalai.nn.layer.moe.tokens import TokenOrder, gather_over
from colossalai.nn.modes import TensorParallel, at_rank
from colossalai.nn.sequence import SequenceParallel, current_sequence, length_before_padding
from colossalai.utils.activation_checkpoint import computed_once, is_computed_again, is_repeated
from colossalai.utils.boosted import SHARED_EXPERTS, warn_unless_boosted

if TYPE_CHECKING:
    from typing_extensions import Self


class MoeLayer(ParallelLayer):
    """Sends each token (a vector of ``dim_model`` features) to the experts that ``router`` chooses for it.

    The scores are the product of the token with ``gate_weight``, in float32 at least.  Their loss, by which
    the loads of experts are balanced, goes to ``MOE_CONTEXT``, from which ``MoeLoss`` takes it.

    ``loads`` tells how the tokens of the last micro-batch were shared out.
    """

    def __init__(
        self,
        dim_model: int,
        num_experts: int,
        router: MoeRouter,
        experts: MoeExperts,
        *,
        tp: TensorParallel | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(tp, mesh)
        if not isinstance(router, MoeRouter):
            raise TypeError(f"MoeLayer needs a router such as Top2Router(), got {type(router).__name__}")
        if not isinstance(experts, MoeExperts):
            raise TypeError(
                f"MoeLayer needs experts such as Experts(expert=MyFFN, num_experts={num_experts}), got"
                f" {type(experts).__name__}"
            )
        if experts.num_total_experts != num_experts:
            raise ValueError(
                f"MoeLayer has num_experts={num_experts}, but its experts are {experts.num_total_experts}"
            )
        if router.k_value > num_experts:
            raise ValueError(
                f"{type(router).__name__} chooses {router.k_value} experts for each token, but there are"
                f" {num_experts}"
            )
        if getattr(experts, "d_model", dim_model) != dim_model:
            raise ValueError(
                f"MoeLayer has dim_model={dim_model}, but its {type(experts).__name__} were built for"
                f" d_model={experts.d_model}"
            )
        self.d_model, self.num_experts = dim_model, num_experts
        draw = trunc_normal_(std=math.sqrt(0.1 / dim_model))
        self.gate_weight = self._parameter((num_experts, dim_model), replicated(2), draw, fan_in=dim_model)
        self.router, self.experts = router, experts
        self.expert_bias: Tensor | None
        bias = torch.zeros(num_experts, device=self._device()) if router.bias_rate else None
        self.register_buffer("expert_bias", bias)
        self.sequence = current_sequence() if mesh is None else None
        self.loads: ExpertLoads | None = None

    def forward(self, inputs: Tensor, real: Tensor | None = None) -> Tensor:
        """The outputs for ``inputs`` (batch, tokens, dim_model), or (tokens, dim_model).

        ``real`` (batch, tokens) is False at tokens that are padding: they go to no expert, and their output
        is 0.
        """
        self._check_input(inputs, real)
        whole = self._whole(inputs, self._layout(inputs.ndim))
        if self.sequence is not None and real is None:
            real = self._tokens_of(self.sequence, inputs)
        if real is not None:
            rows = Layout(self._layout(inputs.ndim).dims[:-1])
            real = self._whole(real.long(), rows).bool().flatten()
        tokens = whole.reshape(-1, whole.size(-1))
        shape = (len(whole), math.prod(whole.shape[1:-1]))
        order = TokenOrder(shape, whole.device, self._mesh, self.sequence)
        routing = self.router(self._scores(tokens), order, real, self._bias())
        outputs = self._through_experts(tokens, routing).to(whole.dtype)
        self._note(routing, outputs)
        return self._at_rest(outputs.view(whole.shape))

    def _check_input(self, inputs: Tensor, real: Tensor | None) -> None:
        rest = None if self.plain else self.tp.hidden.dims[-1]
        width = self.d_model // (self.mesh.group_size(*rest) if rest else 1)
        if inputs.ndim < 2 or inputs.size(-1) != width:
            raise ValueError(
                f"MoeLayer needs an input (batch, tokens, {width}), got one of shape {tuple(inputs.shape)}"
            )
        if self.sequence is not None and inputs.ndim < 3:
            raise ValueError(
                "the launched job cuts sequences, so MoeLayer must know what is one: give it (batch, tokens,"
                f" features), got shape {tuple(inputs.shape)}"
            )
        if real is not None and real.is_floating_point():
            raise TypeError(
                f"real tells tokens (True) from padding (False), in booleans or integers, got {real.dtype};"
                " of an additive mask, such as 0 and -1e9, give mask == 0"
            )
        if real is not None and real.shape != inputs.shape[:-1]:
            raise ValueError(
                f"real must have the shape of the tokens, {tuple(inputs.shape[:-1])}, got {tuple(real.shape)}"
            )

    def _tokens_of(self, sequence: SequenceParallel, inputs: Tensor) -> Tensor | None:
        """Which tokens of this rank the sequences had before they were padded; None if all."""
        padded = inputs.size(1) * sequence.size
        length = None if self.mesh.size.get(PIPELINE_AXIS, 1) > 1 else length_before_padding(padded)
        if length is None:
            raise ValueError(
                "MoeLayer cannot see which tokens were only added to cut sequences into equal parts, and"
                " would send them to experts: give it real=, False for those, for instance"
                " current_sequence().are_tokens(length).expand(batch, -1)"
            )
        if length == padded:
            return None
        return computed_once(lambda: sequence.are_tokens(length, inputs.device).expand(inputs.shape[:2]))

    def _layout(self, ndim: int) -> Layout:
        return replicated(ndim) if self.plain else at_rank(self.tp.hidden, ndim)

    def _whole(self, x: Tensor, layout: Layout) -> Tensor:
        """``x`` whole on every tensor-parallel rank, as it is in 1D."""
        return x if self.plain else redistribute(x, layout, replicated(x.ndim), self.mesh)

    def _at_rest(self, y: Tensor) -> Tensor:
        if self.plain:
            return y
        partial = frozenset(self.experts.summed)
        return redistribute(y, replace(replicated(y.ndim), partial=partial), self._layout(y.ndim), self.mesh)

    def _scores(self, tokens: Tensor) -> Tensor:
        wide = torch.promote_types(tokens.dtype, torch.float32)
        kind = tokens.device.type
        with nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):
            return F.linear(tokens.to(wide), self.gate_weight.to(wide))

    def _bias(self) -> Tensor | None:
        if self.expert_bias is None:
            return None
        if self.training and is_computed_again() and not is_repeated():
            raise RuntimeError(
                f"{type(self.router).__name__}(bias_rate={self.router.bias_rate}) is in a checkpoint of"
                " torch, which would choose experts anew, by a bias that has changed since; use"
                " colossalai.utils.checkpoint, which keeps the choice"
            )
        # in a recomputation, as it was in the first run
        return computed_once(self.expert_bias.clone)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As in ``nn.Module``; but ``half()`` and ``bfloat16()`` leave the biases in float32, to which a rate
        of 0.001 can be added.
        """
        before = self.expert_bias
        super()._apply(fn, recurse)
        if before is not None and self.expert_bias is not None and self.expert_bias.dtype.itemsize < 4:
            self.expert_bias = before.to(self.expert_bias.device, torch.float32)
        return self

    def _note(self, routing: Routing, outputs: Tensor) -> None:
        """Hand the losses on, and note the loads."""
        if is_computed_again():
            return
        if self.training and self.experts.axes and torch.is_grad_enabled() and not outputs.is_meta:
            warn_unless_boosted(self, *SHARED_EXPERTS)
        losses = MOE_CONTEXT.add_loss(routing.balance_loss, routing.z_loss, self)
        if outputs.requires_grad:
            MOE_CONTEXT.watch(losses, outputs)
        self.loads = routing.loads
        if self.expert_bias is not None and self.training:
            load = routing.loads.tokens.to(self.expert_bias.dtype)
            self.expert_bias.add_((load.mean() - load).sign(), alpha=self.router.bias_rate)

    def _through_experts(self, tokens: Tensor, routing: Routing) -> Tensor:
        experts, weights = self.experts, routing.weights
        if experts.summed:  # each rank computes a part of every output
            weights, tokens = use(weights, experts.summed, self.mesh), use(tokens, experts.summed, self.mesh)
        if experts.comm_name == "all_gather" and experts.axes:
            return self._with_gathered_tokens(tokens, weights, routing)
        plan = routing.dispatch
        if plan is None or (plan.kept is not None and not experts.leaves_rows_alone):
            plan = computed_once(
                lambda: plan_dispatch(
                    routing.chosen, routing.kept, self.num_experts, self._mesh, experts.axes
                )
            )
        return run_experts(tokens, weights, plan, experts, self._mesh, experts.axes)

    def _with_gathered_tokens(self, tokens: Tensor, weights: Tensor, routing: Routing) -> Tensor:
        axes, mesh, here = self.experts.axes, self.mesh, len(tokens)
        longest = here
        if not tokens.is_meta:
            lengths = torch.tensor([here], device=tokens.device)
            longest = computed_once(lambda: int(gather_over(lengths, mesh, axes).max()))
        missing = longest - here
        kept = torch.ones_like(routing.chosen, dtype=torch.bool) if routing.kept is None else routing.kept
        tokens, weights = (F.pad(t, (0, 0, 0, missing)) for t in (tokens, weights))
        chosen, kept = (
            gather_over(F.pad(t, (0, 0, 0, missing)), mesh, axes) for t in (routing.chosen, kept.long())
        )
        for axis in reversed(axes):
            tokens, weights = gather(tokens, axis, mesh), gather(weights, axis, mesh)
        plan = computed_once(lambda: plan_dispatch(chosen, kept.bool(), self.num_experts, None, ()))
        outputs = run_experts(tokens, weights, plan, self.experts, None, ())
        for axis in axes:
            outputs = scatter(outputs, axis, mesh)
        return outputs[:here]


class _ResidualShares(ParallelLayer):
    """For each token two numbers that add up to 1: how much its experts count, and the module beside them."""

    def __init__(self, dim_model: int) -> None:
        super().__init__()
        self.weight = self._parameter((2, dim_model), replicated(2), WEIGHT, fan_in=dim_model)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        rest = replicated(x.ndim) if self.plain else at_rank(self.tp.hidden, x.ndim)
        whole = x if self.plain else redistribute(x, rest, replicated(x.ndim), self.mesh)
        with torch.autocast(x.device.type, enabled=False):
            shares = F.linear(whole.to(wide), self.weight.to(wide)).softmax(-1).to(x.dtype)
        if self.plain:
            return shares
        # each rank weighs its features of a token
        weighed = Layout((*rest.dims[:-1], ()), spread=frozenset(rest.dims[-1]))
        return redistribute(shares, replicated(x.ndim), weighed, self.mesh)


class MoeModule(nn.Module):
    """``MoeLayer`` with a router and experts made from numbers.

    Args:
        top_k: 1 or 2, or more.
        noisy_policy: None, ``"Jitter"`` (uniform noise) or ``"Gaussian"``.
        use_residual: adds the output of ``residual_instance``, which all tokens go through, or of one more
            expert; the two are weighted by a softmax of the token.
        expert_instance: the experts, or ``expert_cls`` with its arguments.
    """

    def __init__(
        self,
        dim_model: int,
        num_experts: int,
        top_k: int = 1,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        min_capacity: int = 4,
        noisy_policy: str | None = None,
        drop_tks: bool = True,
        use_residual: bool = False,
        residual_instance: nn.Module | None = None,
        expert_instance: MoeExperts | None = None,
        expert_cls: type[nn.Module] | None = None,
        **expert_args: Any,
    ) -> None:
        super().__init__()
        noises: dict[str | None, Callable[[], NoisyFunc | None]] = {
            None: lambda: None,
            "Jitter": UniformNoiseGenerator,
            "Gaussian": lambda: NormalNoiseGenerator(num_experts),
        }
        if noisy_policy not in noises:
            raise ValueError(
                f"MoeModule: noisy_policy is one of {', '.join(map(repr, noises))}, got {noisy_policy!r}"
            )
        if expert_instance is None and expert_cls is None:
            raise ValueError(
                "MoeModule needs its experts: pass expert_instance, or expert_cls with its arguments"
            )
        router = MoeRouter(
            top_k,
            capacity_factor_train,
            capacity_factor_eval,
            min_capacity,
            noises[noisy_policy](),
            drop_tks,
        )
        if expert_instance is None:
            assert expert_cls is not None
            if isinstance(expert_cls, type) and issubclass(expert_cls, MoeExperts):
                expert_instance = expert_cls(num_experts=num_experts, **expert_args)
            else:
                expert_instance = Experts(expert_cls, num_experts, **expert_args)
        self.use_residual = use_residual
        self.moe_layer = MoeLayer(dim_model, num_experts, router, expert_instance)
        if use_residual:
            if residual_instance is None:
                if expert_cls is None or issubclass(expert_cls, MoeExperts):
                    raise ValueError(
                        "MoeModule(use_residual=True) needs residual_instance, or the class of an expert"
                    )
                residual_instance = expert_cls(**expert_args)
            self.residual_module = residual_instance
            self.residual_combine = _ResidualShares(dim_model)

    def forward(self, inputs: Tensor, real: Tensor | None = None) -> Tensor:
        """The outputs for ``inputs`` (batch, tokens, dim_model); see ``MoeLayer``."""
        outputs: Tensor = self.moe_layer(inputs, real)
        if not self.use_residual:
            return outputs
        share = self.residual_combine(inputs)
        return outputs * share[..., :1] + self.residual_module(inputs) * share[..., 1:]
