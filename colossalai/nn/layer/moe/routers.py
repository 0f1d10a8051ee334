"""Routers: which experts a token goes to, and with which weights.

The tokens of the whole micro-batch compete for the places of an expert, in the order of the serial model: all
first choices, then all second ones.  So ranks tell each other how often each expert was chosen, and what a
router decides, keeps and balances is what it would on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from colossalai.mesh.random import normal_numbers, random_bits, uniform_numbers
from colossalai.nn.init import new_key
from colossalai.nn.layer.moe.dispatch import Dispatch, plan_alone
from colossalai.nn.layer.moe.tokens import TokenOrder
from colossalai.nn.random_streams import own_numbers
from colossalai.utils.activation_checkpoint import computed_once

SelectPolicy = Literal["first", "random"]
NoisyFunc = Callable[[Tensor], Tensor]
Number = TypeVar("Number", float, Tensor)


@dataclass(frozen=True)
class ExpertLoads:
    """How a router has shared the tokens of a micro-batch out; numbers of all ranks, on the device."""

    tokens: Tensor
    """For each expert how many choices fell on it."""
    dropped: Tensor
    """How many choices found no place."""
    entropy: Tensor
    """The mean entropy of the scores of a token: 0 where it is sure of one expert, log(experts) at most."""


@dataclass(frozen=True)
class Routing:
    """What a router has decided for the tokens of this rank."""

    chosen: Tensor
    """The experts of each token, (tokens, k)."""
    weights: Tensor
    """The weights of their outputs, (tokens, k)."""
    kept: Tensor | None
    """Whether a choice has found a place, (tokens, k); None if all have."""
    balance_loss: Tensor
    """experts / k * sum over the experts of (share of the tokens) * (mean score)."""
    z_loss: Tensor
    """The mean of the squared log-sum-exp of the logits."""
    loads: ExpertLoads
    dispatch: Dispatch | None = None
    """The rows of the choices, where this rank has all tokens and experts."""


@dataclass(frozen=True)
class _Choice:
    """The part of a routing that has no gradient."""

    chosen: Tensor
    kept: Tensor | None
    total: Tensor
    dropped: Tensor
    dispatch: Dispatch | None = None


class NormalNoiseGenerator:
    """Adds normal noise, with a standard deviation of 1 / num_experts**2, to the logits of a router."""

    def __init__(self, num_experts: int) -> None:
        if num_experts < 1:
            raise ValueError(f"NormalNoiseGenerator needs at least one expert, got num_experts={num_experts}")
        self.std = num_experts**-2

    def __call__(self, inputs: Tensor, index: Tensor | None = None) -> Tensor:
        """Noise for ``inputs``; ``index`` are the places of their rows in those of all ranks."""
        return inputs + self.std * _noise(normal_numbers, inputs, index)


class UniformNoiseGenerator:
    """Multiplies the logits of a router by uniform noise between 1 - eps and 1 + eps."""

    def __init__(self, eps: float = 1e-2) -> None:
        if not 0 <= eps < 1:
            raise ValueError(f"UniformNoiseGenerator needs 0 <= eps < 1, got {eps}")
        self.eps = eps

    def __call__(self, inputs: Tensor, index: Tensor | None = None) -> Tensor:
        return inputs * (1 - self.eps + 2 * self.eps * _noise(uniform_numbers, inputs, index))


def _noise(draw: Callable[[int, Tensor], Tensor], like: Tensor, index: Tensor | None) -> Tensor:
    """The same numbers for the same row, whichever rank holds it."""
    rows, columns = like.numel() // like.size(-1), like.size(-1)
    key = new_key()
    if like.is_meta:
        return torch.empty_like(like)
    if index is None:
        index = torch.arange(rows, device=like.device)
    every = index[:, None] * columns + torch.arange(columns, device=like.device)
    return draw(key, every.flatten()).view(like.shape).to(like.dtype)


class MoeRouter(nn.Module):
    """Chooses ``k_value`` experts for each token by the largest scores, of which a softmax is taken.

    An expert takes ``capacity_factor * k_value * tokens / experts`` choices of a micro-batch, and at least
    ``min_capacity``; what comes later in the order of the serial model is dropped.

    Args:
        capacity_factor_train, capacity_factor_eval: in training, and in evaluation.
        noisy_func: changes the logits in training, such as ``NormalNoiseGenerator``.
        drop_tks: False gives experts as many places as they need.
        normalize: divides the weights of a token by their sum.
        bias_rate: balances loads without a loss.  Experts have biases that count for the choice alone; each
            micro-batch in training changes them by this rate, down where the load is above the mean and up
            where it is below.
    """

    def __init__(
        self,
        k_value: int = 1,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        min_capacity: int = 4,
        noisy_func: NoisyFunc | None = None,
        drop_tks: bool = True,
        *,
        select_policy: SelectPolicy = "first",
        normalize: bool = False,
        bias_rate: float = 0.0,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        if isinstance(k_value, bool) or not isinstance(k_value, int) or k_value < 1:
            raise ValueError(
                f"{who}: k_value is the number of experts of a token, at least 1; got {k_value!r}"
            )
        for name, factor in (
            ("capacity_factor_train", capacity_factor_train),
            ("capacity_factor_eval", capacity_factor_eval),
        ):
            if not factor > 0:
                raise ValueError(
                    f"{who}: {name} must be more than 0, got {factor}; with drop_tks=False nothing is dropped"
                )
        if min_capacity < 0:
            raise ValueError(f"{who}: min_capacity must be at least 0, got {min_capacity}")
        if select_policy not in ("first", "random"):
            raise ValueError(f"{who}: select_policy is 'first' or 'random', got {select_policy!r}")
        if noisy_func is not None and not callable(noisy_func):
            raise TypeError(f"{who}: noisy_func must be a function of the logits, got {noisy_func!r}")
        if bias_rate < 0:
            raise ValueError(f"{who}: bias_rate must be at least 0, got {bias_rate}")
        self.k_value = k_value
        self.capacity_factor_train, self.capacity_factor_eval = capacity_factor_train, capacity_factor_eval
        self.min_capacity, self.noisy_func, self.drop_tks = min_capacity, noisy_func, drop_tks
        self.select_policy, self.normalize, self.bias_rate = select_policy, normalize, bias_rate

    def forward(
        self,
        logits: Tensor,
        order: TokenOrder | None = None,
        real: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Routing:
        """Route the tokens with ``logits`` (tokens, experts).

        Args:
            order: where they stand among those of all ranks; None if there are no others.
            real: False for tokens that are only there to fill a sequence: no expert gets them.
            bias: added to the scores of each expert for the choice.
        """
        if logits.size(-1) < self.k_value:
            raise ValueError(
                f"{type(self).__name__} chooses {self.k_value} experts for each token, but there are"
                f" {logits.size(-1)}"
            )
        if order is None:
            order = TokenOrder((len(logits), 1), logits.device)
        if self.training and self.noisy_func is not None:
            logits = self._noisy(logits, order)
        scores = logits.softmax(-1)
        choice = computed_once(lambda: self._choose(scores.detach(), order, real, bias))
        weights = scores.gather(1, choice.chosen)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if choice.kept is not None:
            weights = weights * choice.kept
        means = self._means(logits, scores, order, real)
        share = choice.total.to(scores.dtype) / means.tokens
        return Routing(
            chosen=choice.chosen,
            weights=weights,
            kept=choice.kept,
            balance_loss=(share * means.scores).sum() * (logits.size(-1) / self.k_value),
            z_loss=means.z_squared,
            loads=ExpertLoads(choice.total, choice.dropped, means.entropy.detach()),
            dispatch=choice.dispatch,
        )

    def _noisy(self, logits: Tensor, order: TokenOrder) -> Tensor:
        assert self.noisy_func is not None
        if isinstance(self.noisy_func, NormalNoiseGenerator | UniformNoiseGenerator):
            return self.noisy_func(logits, order.index)
        # a function of the user's own draws from torch's generators: other numbers for other tokens
        alone = order.mesh is None or not order.rows
        own: AbstractContextManager[Any] = nullcontext() if alone else own_numbers(order.rows, order.mesh)  # type: ignore[arg-type]
        with own:
            noisy = self.noisy_func(logits)
        if noisy.shape != logits.shape:
            raise ValueError(
                f"{type(self).__name__}: noisy_func must keep the shape of the logits, {tuple(logits.shape)}"
                f" (tokens, experts); it gave {tuple(noisy.shape)}"
            )
        return noisy

    @torch.no_grad()
    def _choose(self, scores: Tensor, order: TokenOrder, real: Tensor | None, bias: Tensor | None) -> _Choice:
        experts, k = scores.size(-1), self.k_value
        chosen = (scores if bias is None else scores + bias).topk(k, dim=-1).indices
        if scores.is_meta:  # loads do not exist there, and a dry run takes even ones
            total = scores.new_empty(experts, dtype=torch.int64)
            return _Choice(chosen, None, total, total.sum())
        if real is None and not order.rows and self.select_policy == "first":
            return self._choose_alone(scores, chosen)
        counted = torch.ones_like(chosen) if real is None else real[:, None].long().expand(-1, k)
        counts = torch.zeros(order.number_of_runs, k, experts, dtype=torch.int64, device=chosen.device)
        places = (order.runs[:, None] * k + torch.arange(k, device=chosen.device)) * experts + chosen
        counts.view(-1).scatter_add_(0, places.flatten(), counted.flatten())
        # a last column for tokens whose scores are nan, so that all ranks hear of them
        nan = torch.zeros_like(counts[..., :1])
        nan[0, 0] = (scores.isnan().any(-1) & counted[:, 0].bool()).sum()
        earlier, every = order.before(torch.cat([counts, nan], -1))
        self._refuse_nan(every[0, -1], alone=not order.rows)
        earlier, every = earlier[..., :-1], every[..., :-1]
        total = every.sum(0)
        if not self.drop_tks:
            return _Choice(chosen, None if real is None else counted.bool(), total, 0 * total.sum())
        before = every.cumsum(0) - every  # first choices of all tokens come before second ones
        if self.select_policy == "random":
            position = (
                self._random_positions(chosen, order, counted) + before.reshape(-1)[places % (k * experts)]
            )
        else:
            position = (before + earlier).reshape(-1)[places] + _ranks(places, counted)
        capacity = self._capacity(every[0].sum().double(), experts).floor().long()
        capacity = capacity.clamp(min=self.min_capacity)
        dropped = (total - total.clamp(max=capacity)).sum()
        return _Choice(chosen, (position < capacity) & counted.bool(), total, dropped)

    def _refuse_nan(self, tokens: Tensor, *, alone: bool) -> None:
        # a GPU alone need not be waited for: its loss will be nan
        if not (alone and tokens.is_cuda) and int(tokens):
            raise FloatingPointError(
                f"{type(self).__name__}: the scores of {int(tokens)} tokens of this micro-batch are nan, so"
                " no expert can be chosen; the inputs of the layer or its gate_weight have become nan or"
                " infinite: look at the steps before (a lower learning rate, clipping), or at the data"
            )

    def _choose_alone(self, scores: Tensor, chosen: Tensor) -> _Choice:
        """The same where no other rank has tokens."""
        if not scores.is_cuda:
            self._refuse_nan(scores.isnan().any(-1).sum(), alone=True)
        tokens, experts = scores.shape
        capacity = None
        if self.drop_tks:
            capacity = max(math.floor(self._capacity(tokens, experts)), self.min_capacity)
        dispatch, total, taken = plan_alone(chosen, experts, capacity)
        dropped = total.new_zeros(()) if capacity is None else (total - taken).sum()
        return _Choice(chosen, dispatch.kept, total, dropped, dispatch)

    def _capacity(self, tokens: Number, experts: int) -> Number:
        factor = self.capacity_factor_train if self.training else self.capacity_factor_eval
        return tokens * (self.k_value * factor) / experts

    def _random_positions(self, chosen: Tensor, order: TokenOrder, counted: Tensor) -> Tensor:
        """The place of each choice among those of its slot and expert, where tokens come in a random order
        that is the same on all ranks.
        """
        index, k, key = order.index, chosen.size(1), new_key()
        drawn = torch.full_like(index, key)
        every = order.gather(torch.cat([index[:, None], chosen, counted, drawn[:, None]], 1), fill=-1)
        every = every[every[:, 0] >= 0]
        if order.rows and len(every):  # ranks may have drawn other numbers, by other seeds or batches
            key = int(every[0, -1])
        every = every[every[:, 0].argsort()]  # in the serial order
        shuffled = random_bits(key, every[:, 0]).argsort(stable=True)
        groups = every[:, 1 : 1 + k] * k + torch.arange(k, device=chosen.device)
        ranks = torch.empty_like(groups)
        ranks[shuffled] = _ranks(groups[shuffled], every[shuffled, 1 + k : -1])
        return ranks[torch.searchsorted(every[:, 0].contiguous(), index)]

    def _means(self, logits: Tensor, scores: Tensor, order: TokenOrder, real: Tensor | None) -> _Means:
        z = logits.logsumexp(-1)
        entropy = z.detach() - (scores.detach() * logits.detach()).sum(-1)
        if real is None and not order.rows:
            tokens = max(len(z), 1)
            return _Means(tokens, scores.sum(0) / tokens, z.square().sum() / tokens, entropy.sum() / tokens)
        one = torch.ones_like(z) if real is None else real.to(z.dtype)
        each = torch.cat([scores, z.square()[:, None], entropy[:, None], torch.ones_like(z)[:, None]], 1)
        sums = order.total((each * one[:, None]).sum(0))
        number = sums[-1].detach().clamp(min=1)
        return _Means(number, sums[:-3] / number, sums[-3] / number, sums[-2] / number)


class _Means(NamedTuple):
    """Means over the tokens of all ranks."""

    tokens: Tensor | int
    """Their number."""
    scores: Tensor
    """Of each expert."""
    z_squared: Tensor
    """Of the log-sum-exp of the logits."""
    entropy: Tensor


def _ranks(groups: Tensor, counted: Tensor) -> Tensor:
    """For each element of a column how many before it are of the same group, of those that are counted."""
    flat = groups.T.flatten()  # groups of different columns are different
    order = flat.argsort(stable=True)
    ordered, ones = flat[order], counted.T.flatten()[order]
    before = ones.cumsum(0) - ones
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    start = torch.where(begins, before, 0).cummax(0).values if len(before) else before
    ranks = torch.empty_like(flat)
    ranks[order] = before - start
    return ranks.view(groups.size(1), -1).T


class Top1Router(MoeRouter):
    """Chooses one expert for each token.  ``select_policy``: tokens find places in their order, or in a
    random one.
    """

    def __init__(
        self,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        min_capacity: int = 4,
        select_policy: SelectPolicy = "first",
        noisy_func: NoisyFunc | None = None,
        drop_tks: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(
            1,
            capacity_factor_train,
            capacity_factor_eval,
            min_capacity,
            noisy_func,
            drop_tks,
            select_policy=select_policy,
            **options,
        )


class Top2Router(MoeRouter):
    """Chooses two experts for each token; second choices find places after all first ones."""

    def __init__(
        self,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        min_capacity: int = 4,
        noisy_func: NoisyFunc | None = None,
        drop_tks: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(
            2, capacity_factor_train, capacity_factor_eval, min_capacity, noisy_func, drop_tks, **options
        )
