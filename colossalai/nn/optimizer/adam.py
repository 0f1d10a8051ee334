"""Adam and AdamW on GPU, on CPU, or on both in one optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from colossalai.kernel.optimizer.adam import adam_
from colossalai.kernel.optimizer.adam_lists import AdamLists, AdamOptions
from colossalai.kernel.optimizer.snapshot import TensorSnapshot
from colossalai.nn.optimizer.base import KernelBatch
from colossalai.nn.optimizer.moments import MomentsOptimizer
from colossalai.nn.optimizer.nvme_optimizer import NVMeOptimizer
from colossalai.registry import OPTIMIZERS


class _Adam(MomentsOptimizer):
    splits = True
    divides = True
    _div_scale = -1.0
    _kept: TensorSnapshot | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # a subclass of another author may change more than the kernel knows of
        cls.keeps = cls.__module__ == __name__

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        bias_correction: bool,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adamw_mode: bool,
        **defaults: Any,
    ) -> None:
        modes = {"bias_correction": bias_correction, "adamw_mode": adamw_mode}
        super().__init__(params, lr, betas, eps, weight_decay, **modes, **defaults)

    def step(self, closure: Callable[[], Any] | None = None, div_scale: float = -1) -> Any:
        """Update all parameters that have a gradient.

        ``closure`` computes the loss again, and is called first.

        Gradients are divided by ``div_scale`` if it is positive; whether what is
        left in ``.grad`` is the divided gradient depends on the kernel.
        """
        self._div_scale = div_scale
        return super().step(closure)

    def step_on(
        self, parameters: Iterable[Tensor], div_scale: float = -1, kept: TensorSnapshot | None = None
    ) -> None:
        """The base class's; what parameters and moments were before goes to ``kept``."""
        self._div_scale, self._kept = div_scale, kept
        try:
            super().step_on(parameters)
        finally:
            self._kept = None

    def update(self, batch: KernelBatch, group: dict[str, Any]) -> None:
        options = AdamOptions(
            **self.rates(group),
            decoupled=group["adamw_mode"],
            bias_correction=group["bias_correction"],
            div_scale=self._div_scale,
        )
        adam_(AdamLists(**self.columns(batch)), batch.step, options, self._kept)


@OPTIMIZERS.register_module
class FusedAdam(_Adam):
    """AdamW (``adamw_mode``) or Adam with one kernel for all parameters.

    Without ``bias_correction`` the moments are used as they are.  With ``set_grad_none``,
    ``zero_grad`` frees the gradients; otherwise it sets them to zero.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise ValueError("FusedAdam has no AMSGrad variant; use torch.optim.AdamW(amsgrad=True)")
        super().__init__(
            params, lr, bias_correction, betas, eps, weight_decay, adamw_mode, set_grad_none=set_grad_none
        )

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        grads: None = None,
        output_params: None = None,
        scale: None = None,
        grad_norms: None = None,
        div_scale: float = -1,
    ) -> Any:
        """``step`` of the other Adams.  The arguments between are those of an Apex that took gradients from
        outside; they are refused.
        """
        given = {"grads": grads, "output_params": output_params, "scale": scale, "grad_norms": grad_norms}
        if named := [name for name, value in given.items() if value is not None]:
            raise RuntimeError(
                f"FusedAdam.step takes no {', '.join(named)}: it steps the gradients in p.grad. A loss scale"
                " goes into div_scale, or to colossalai.amp"
            )
        return super().step(closure, div_scale)


@OPTIMIZERS.register_module
class HybridAdam(_Adam, NVMeOptimizer):
    """AdamW (``adamw_mode``) or Adam whose parameters may be on CPU and on GPU, each updated where it is.

    ``nvme_offload_fraction`` of the states of parameters on the CPU, from 0 to 1, rest on a disk: in
    ``nvme_offload_dir``, or, if that is None, in the directory for temporary files.  ``defaults`` are further
    entries of every parameter group.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | os.PathLike[str] | None = None,
        **defaults: Any,
    ) -> None:
        super().__init__(model_params, lr, bias_correction, betas, eps, weight_decay, adamw_mode, **defaults)
        self.offload_states(nvme_offload_fraction, nvme_offload_dir)


@OPTIMIZERS.register_module
class CPUAdam(_Adam, NVMeOptimizer):
    """AdamW (``adamw_mode``) or Adam for parameters on the CPU.

    ``nvme_offload_fraction`` of the states, from 0 to 1, rest on a disk: in
    ``nvme_offload_dir``, or, if that is None, in the directory for temporary files.
    """

    devices = ("cpu",)

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(model_params, lr, bias_correction, betas, eps, weight_decay, adamw_mode)
        self.offload_states(nvme_offload_fraction, nvme_offload_dir)
