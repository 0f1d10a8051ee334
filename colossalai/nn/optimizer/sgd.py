"""Stochastic gradient descent with one kernel for all parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from colossalai.kernel.optimizer.sgd import SgdLists, SgdOptions, sgd_
from colossalai.nn.optimizer.base import KernelBatch, MultiTensorOptimizer, check_rates
from colossalai.registry import OPTIMIZERS

INF = float("inf")


@OPTIMIZERS.register_module
class FusedSGD(MultiTensorOptimizer):
    """SGD with momentum.  With ``wd_after_momentum`` the decay of the weights does not enter the momentum."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
    ) -> None:
        check_rates(
            self, lr=(lr, 0.0, INF), momentum=(momentum, 0.0, INF), weight_decay=(weight_decay, 0.0, INF)
        )
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"FusedSGD with nesterov needs a momentum and no dampening; got momentum={momentum},"
                f" dampening={dampening}"
            )
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"nesterov": nesterov, "wd_after_momentum": wd_after_momentum})

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for parameter, state in list(self.state.items()):
            if state.get("momentum_buffer", 0) is None:
                del self.state[parameter]

    def start(self, parameter: Tensor, state: dict[str, Any], names: Iterable[str]) -> None:
        # torch.optim.SGD does not count steps, but there has been one if there is a momentum
        is_loaded = "momentum_buffer" in state
        super().start(parameter, state, names)
        if is_loaded and "step" in names:
            state["step"] += 1

    def update(self, batch: KernelBatch, group: dict[str, Any]) -> None:
        lists = SgdLists(
            weights=batch.weights,
            grads=batch.grads,
            halves=batch.halves,
            buffers=batch.states["momentum_buffer"],
            is_first=batch.step == 1,
        )
        options = SgdOptions(
            lr=float(group["lr"]),
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            decay_after_momentum=group["wd_after_momentum"],
        )
        sgd_(lists, options)
