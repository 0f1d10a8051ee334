"""What Adam and LAMB share: two moments of each gradient, and the options that go with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from colossalai.nn.optimizer.base import KernelBatch, MultiTensorOptimizer, check_betas, check_rates

INF = float("inf")


class MomentsOptimizer(MultiTensorOptimizer):
    """An optimizer of the mean and the mean square of gradients."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        **defaults: Any,
    ) -> None:
        check_rates(self, lr=(lr, 0.0, INF), eps=(eps, 0.0, INF), weight_decay=(weight_decay, 0.0, INF))
        check_betas(self, betas)
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options | defaults)

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq"

    @staticmethod
    def columns(batch: KernelBatch) -> dict[str, list[Tensor]]:
        """The tensors of a batch, by the names that the kernels give them."""
        return {
            "weights": batch.weights,
            "grads": batch.grads,
            "halves": batch.halves,
            "tails": batch.tails,
            "exp_avgs": batch.states["exp_avg"],
            "exp_avg_sqs": batch.states["exp_avg_sq"],
        }

    @staticmethod
    def rates(group: dict[str, Any]) -> dict[str, Any]:
        """The numbers of a group, by the names that the kernels give them."""
        beta1, beta2 = group["betas"]
        names = ("eps", "weight_decay")
        return {"lr": float(group["lr"]), "beta1": beta1, "beta2": beta2, **{n: group[n] for n in names}}
