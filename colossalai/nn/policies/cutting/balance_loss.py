"""The loss by which models of transformers balance their experts, over the tokens of all ranks.

With ``output_router_logits`` such a model multiplies, for each expert, the share of tokens that chose it with
its mean score, and adds up.  Ranks of data and experts have other tokens, and the mean of what each would
compute is not what the serial model does; so they add up their counts and scores before.

The function is a global name of the model's module, ``load_balancing_loss_func``.  There it is replaced,
once, by one that does what it did, except while a model that ``parallelize`` has cut runs.
"""

from __future__ import annotations

import functools
import sys
import warnings
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colossalai.mesh import Mesh
from colossalai.mesh.mesh import DATA_AXES
from colossalai.nn.layer.moe.tokens import TokenOrder
from colossalai.nn.policies.wrap_forward import Forward, ForwardWrapper, native_class, wrap_forward

M = TypeVar("M", bound=nn.Module)
NAME = "load_balancing_loss_func"
_WITHOUT_GRADIENT = (
    "the scores of routers have no gradient, so the loss that balances the experts trains nothing: layers are"
    " in checkpoints with use_reentrant=True, which hide them, as in transformers alone; call"
    " model.gradient_checkpointing_enable({'use_reentrant': False}). Or all routers are frozen, with what"
    " comes before them; then set config.output_router_logits=False"
)
_mesh: ContextVar[Mesh | None] = ContextVar("the mesh whose ranks have the other tokens", default=None)


def balances_experts(model: nn.Module, mesh: Mesh) -> bool:
    """Whether ``model`` may add a loss that depends on tokens of other ranks of ``mesh``."""
    ranks = mesh.group_size(*(axis for axis in mesh.size if axis in DATA_AXES))
    return ranks > 1 and hasattr(_home(model), NAME)


def balance_over_ranks(model: M, base: nn.Module, mesh: Mesh) -> M:
    """Let ``base``, the model below the adapters of ``model``, balance its experts by the tokens of all ranks
    of ``mesh``; returns ``model``.
    """
    home = _home(base)
    if not isinstance(getattr(home, NAME), _Balance):
        setattr(home, NAME, _Balance(getattr(home, NAME)))
    if not isinstance(base, BalancedOverRanks):
        wrap_forward(base, BalancedOverRanks)
    base.balanced_over = mesh  # type: ignore[assignment]
    return model


def _home(model: nn.Module) -> Any:
    return sys.modules.get(native_class(model).__module__)


class BalancedOverRanks(ForwardWrapper):
    """A model that balances its experts by the tokens of all ranks."""

    balanced_over: Mesh

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        token = _mesh.set(self.balanced_over)
        try:
            return forward(*args, **kwargs)
        finally:
            _mesh.reset(token)


class _Balance:
    """``load_balancing_loss_func`` of transformers, or what takes its place."""

    def __init__(self, native: Any) -> None:
        functools.update_wrapper(self, native)
        self.native = native
        self.is_known = self._agrees()

    def __call__(
        self,
        gate_logits: Any,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # without a backward pass it is the value of this rank's batch, as its loss is: it asks no other
        mesh = _mesh.get() if torch.is_grad_enabled() else None
        logits = gate_logits if isinstance(gate_logits, tuple) and gate_logits else None
        if mesh is None or logits is None or num_experts is None:
            return self.native(gate_logits, num_experts, top_k, attention_mask, *args, **kwargs)
        if not self.is_known or args or kwargs:
            raise ValueError(
                f"{self.native.__module__}.{NAME} is not the loss that parallelize knows, so its value over"
                " the tokens of all ranks cannot be told; set config.output_router_logits=False"
            )
        if not any(layer.requires_grad for layer in logits):
            warnings.warn(_WITHOUT_GRADIENT, stacklevel=2)
        return balance_loss(logits, num_experts, top_k, attention_mask, mesh)

    def _agrees(self) -> bool:
        """Whether the function computes on a few numbers what ours does."""
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            logits = tuple(torch.randn(6, 5) for _ in range(2))
            for mask in (None, torch.tensor([[1, 1, 0], [1, 1, 1]])):
                own = balance_loss(logits, 5, 2, mask, None)
                try:
                    native = torch.as_tensor(self.native(logits, 5, 2, mask))
                    if not torch.allclose(own.double(), native.double()):
                        return False
                except Exception:
                    return False
        return True


def balance_loss(
    logits: tuple[Tensor, ...], experts: int, top_k: int, mask: Tensor | None, mesh: Mesh | None
) -> Tensor:
    """Over all experts, the share of choices times the mean score, times the number of experts; each of
    ``logits`` (tokens, experts) are the scores of one layer.

    Tokens where ``mask`` is 0 do not count.  The means are over the tokens of all ranks of ``mesh`` that read
    other samples.
    """
    device, wide = logits[0].device, torch.promote_types(logits[0].dtype, torch.float32)
    real = torch.ones(len(logits[0]), device=device, dtype=wide)
    if mask is not None:
        real = mask.reshape(-1).to(device, wide)
    counts = torch.zeros(experts, device=device, dtype=wide)
    scores = torch.zeros_like(counts)
    for layer in logits:
        shares = F.softmax(layer.to(device), -1)
        chosen = shares.topk(top_k, -1).indices
        counts = counts.scatter_add(0, chosen.flatten(), real.repeat_interleave(top_k))
        scores = scores + (shares.to(wide) * real[:, None]).sum(0)
    rows = (len(logits) * real.sum())[None]
    order = TokenOrder((1, 1), device, mesh)
    counts, scores, rows = order.total(torch.cat([counts.detach(), scores, rows])).split(
        [experts, experts, 1]
    )
    return (counts / rows * (scores / rows)).sum() * experts
