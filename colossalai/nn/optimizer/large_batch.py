"""LAMB and LARS: learning rates per tensor, for batches so large that one rate for all diverges."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from colossalai.kernel import _compat
from colossalai.kernel.optimizer.lamb import LambLists, LambOptions, lamb_
from colossalai.kernel.optimizer.lars import LarsLists, LarsOptions, lars_
from colossalai.mesh import PIPELINE_AXIS, grad_norm
from colossalai.nn.optimizer.base import KernelBatch, MultiTensorOptimizer, check_rates
from colossalai.nn.optimizer.moments import INF, MomentsOptimizer
from colossalai.registry import OPTIMIZERS
from colossalai.utils.parallel import launched_mesh


class _Lamb(MomentsOptimizer):
    elementwise = False

    @abstractmethod
    def options(self, group: dict[str, Any]) -> dict[str, Any]:
        """What is particular to the variant of LAMB."""

    def prepare(self, batches: list[KernelBatch]) -> None:
        self._divisors: dict[torch.device, Tensor] = {}  # what gradients are divided by to clip them

    def update(self, batch: KernelBatch, group: dict[str, Any]) -> None:
        lists = LambLists(**self.columns(batch))
        options = LambOptions(**self.rates(group), **self.options(group))
        lamb_(lists, batch.step, options, self._divisors.get(lists.device))


@OPTIMIZERS.register_module
class Lamb(_Lamb):
    """LAMB as first published: no bias correction, no clipping.

    With ``adam=True`` no learning rates per tensor.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, adam=adam)

    def options(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"bias_correction": False, "adaptive": not group["adam"]}


@OPTIMIZERS.register_module
class FusedLAMB(_Lamb):
    """LAMB with bias correction, and gradients clipped together to a norm of
    ``max_grad_norm`` (0: not at all).

    ``adam_w_mode``: weight decay is a part of the step, otherwise of the gradient.  ``grad_averaging``: the
    gradient enters the first moment with the factor 1 - beta1, otherwise 1.  Groups without weight decay have
    one learning rate for all tensors unless ``use_nvlamb``.

    The norm is that of the gradients of all stages of a pipeline, so all ranks step together.  Where this
    rank steps only some of the parameters of its model, ``known_norm`` is set to the norm of all gradients
    before each step.
    """

    known_norm: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if amsgrad:
            raise ValueError("FusedLAMB has no AMSGrad variant; leave amsgrad=False")
        check_rates(self, max_grad_norm=(max_grad_norm, 0.0, INF))
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            bias_correction=bias_correction,
            grad_averaging=grad_averaging,
            max_grad_norm=max_grad_norm,
            adam_w_mode=adam_w_mode,
            use_nvlamb=use_nvlamb,
            set_grad_none=set_grad_none,
        )

    def options(self, group: dict[str, Any]) -> dict[str, Any]:
        return {
            "bias_correction": group["bias_correction"],
            "averaging": group["grad_averaging"],
            "decoupled": group["adam_w_mode"],
            "adaptive": group["use_nvlamb"] or group["weight_decay"] != 0,
        }

    def prepare(self, batches: list[KernelBatch]) -> None:
        super().prepare(batches)
        limit, norm = self.defaults["max_grad_norm"], self.known_norm  # one for all groups
        if limit == 0:
            return
        mesh = launched_mesh()
        if (
            norm is None and mesh is not None and mesh.size.get(PIPELINE_AXIS, 1) > 1
        ):  # the other stages have the rest
            norm = grad_norm((p for group in self.param_groups for p in group["params"]), mesh)
        if not batches:
            return
        if norm is None:
            norms = [norm for b in batches for norm in _compat.norm(b.grads, 2, b.weights[0].dtype)]
            norm = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
        divisor = torch.clamp(norm / limit, min=1.0)
        self._divisors = {b.weights[0].device: divisor.to(b.weights[0].device) for b in batches}


@OPTIMIZERS.register_module
class Lars(MultiTensorOptimizer):
    """LARS: SGD with momentum, where each tensor's rate is lr * eeta * |w| /
    (|g| + weight_decay |w| + epsilon).
    """

    elementwise = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0,
        eeta: float = 1e-3,
        weight_decay: float = 0,
        epsilon: float = 0.0,
    ) -> None:
        check_rates(
            self,
            lr=(lr, 0.0, INF),
            momentum=(momentum, 0.0, INF),
            eeta=(eeta, 0.0, INF),
            weight_decay=(weight_decay, 0.0, INF),
            epsilon=(epsilon, 0.0, INF),
        )
        defaults = {"lr": lr, "momentum": momentum, "eeta": eeta}
        super().__init__(params, defaults | {"weight_decay": weight_decay, "epsilon": epsilon})

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def update(self, batch: KernelBatch, group: dict[str, Any]) -> None:
        lists = LarsLists(
            weights=batch.weights,
            grads=batch.grads,
            halves=batch.halves,
            buffers=batch.states["momentum_buffer"],
        )
        options = LarsOptions(
            lr=float(group["lr"]),
            momentum=group["momentum"],
            eeta=group["eeta"],
            weight_decay=group["weight_decay"],
            epsilon=group["epsilon"],
        )
        lars_(lists, options)
