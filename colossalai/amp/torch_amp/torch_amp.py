"""fp16 by torch's autocast and ``GradScaler``, on CUDA and on the CPU; weights and gradients stay in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.amp.autocast import AutocastModel, Criterion, autocast_criterion, device_type_of
from colossalai.amp.groups import groups_of_pieces
from colossalai.amp.scaled_optimizer import ScaledOptimizer
from colossalai.amp.torch_amp._grad_scaler import GradScaler
from colossalai.mesh import Mesh


class TorchAMPOptimizer(ScaledOptimizer):
    """An optimizer with a ``GradScaler``: the given one, or one made with ``options``.

    Under data parallelism the averaged gradients are the same on every rank, and so is the decision to skip;
    ranks with different parts of the model, or pieces of its parameters, decide together (see
    ``GradScaler``).

    Args:
        mesh: the ranks that the parameters may be cut over, by default those of a launched job.
    """

    scaler: GradScaler

    def __init__(
        self, optim: Optimizer, scaler: GradScaler | None = None, *, mesh: Mesh | None = None, **options: Any
    ) -> None:
        if scaler is None:
            device = next((p.device.type for group in optim.param_groups for p in group["params"]), None)
            scaler = GradScaler(**{"device": device, **options})
        elif options:
            raise TypeError(
                f"TorchAMPOptimizer takes a scaler or options to make one, got both: {', '.join(options)}"
            )
        super().__init__(optim, scaler.groups, mesh=mesh)
        scaler.groups += groups_of_pieces(self.parameters(), self.mesh, scaler.groups)
        self._groups = scaler.groups
        self.scaler = scaler

    @property
    def loss_scale(self) -> float:
        return self.scaler.get_scale()

    def scale_loss(self, loss: Tensor) -> Tensor:
        self._scaled = True
        return self.scaler.scale(loss)

    def unscale(self) -> bool:
        self.scaler.unscale_(self.optim)
        return self.scaler.found_overflow(self.optim)

    def update_scale(self, overflowed: bool) -> None:
        self.scaler.update()


class TorchAMPModel(AutocastModel):
    """``model`` under autocast to fp16, on the device its weights are on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, device_type_of(model), torch.float16)


class TorchAMPLoss(nn.Module):
    """``loss``, a module or a function, under autocast to fp16: torch's losses then compute in fp32.

    Args:
        device_type: where it computes; by default CUDA where it is present.
    """

    def __init__(self, loss: Criterion, device_type: str | None = None) -> None:
        super().__init__()
        device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        self.loss = autocast_criterion(loss, device_type, torch.float16)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.loss(*args, **kwargs)
