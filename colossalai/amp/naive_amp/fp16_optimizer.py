"""``FP16Optimizer``: scaled losses, fp32 masters and clipping for a model with fp16 weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from colossalai.amp._compat import unscale_and_check
from colossalai.amp.groups import group_of, groups_of_pieces, maximum_over
from colossalai.amp.master_weights import MasterWeights
from colossalai.amp.naive_amp.grad_scaler import BaseGradScaler, ConstantGradScaler
from colossalai.amp.scaled_optimizer import ScaledOptimizer
from colossalai.context import ParallelMode
from colossalai.interface.holding import MASTERS_KEY, Holding
from colossalai.logging import get_dist_logger
from colossalai.mesh import Mesh, clip_grads, grad_zeros
from colossalai.utils.parallel import row_mode


class FP16Optimizer(ScaledOptimizer):
    """An optimizer of a model some or all of whose weights are in half precision.

    After ``step``, ``grad_norm`` is the norm before clipping, if ``clip_grad_norm`` is on, and
    ``num_zeros_in_grad`` the number of zeros in the gradients, if that is asked for; both ``None`` after a
    skipped step.

    Args:
        optimizer: its groups may hold weights of several dtypes; only those in half precision get masters.
        grad_scaler: the loss scale.
        verbose: log at construction how many masters there are.
        clip_grad_norm: clip gradients to this norm in every step; 0 for no clipping.
        dp_process_group: ranks with the same weights, by default those of ``averaging_group`` in a launched
            job.
        mp_process_group: ranks with other parts of the model, by default those of ``ParallelMode.MODEL``.
            Both groups decide together.  Without a mesh, the norm is taken over ``mp_process_group`` too.
        log_num_zeros_in_grad: count and log the zeros in the gradients in every step.
        master_weights: ``False``: step the half-precision weights themselves.
        master_values: fp32 values of weights that were rounded just before.
        report: warn of skipped steps.
        mesh: the ranks that the parameters may be cut over, by default those of a launched job.
    """

    scaler: BaseGradScaler

    def __init__(
        self,
        optimizer: Optimizer,
        grad_scaler: BaseGradScaler,
        verbose: bool = False,
        clip_grad_norm: float = 0,
        dp_process_group: dist.ProcessGroup | None = None,
        mp_process_group: dist.ProcessGroup | None = None,
        *,
        log_num_zeros_in_grad: bool = False,
        master_weights: bool = True,
        master_values: Mapping[Tensor, Tensor] | None = None,
        report: bool = True,
        mesh: Mesh | None = None,
    ) -> None:
        if not isinstance(grad_scaler, BaseGradScaler):
            raise TypeError(
                f"{type(self).__name__} needs a grad_scaler such as DynamicGradScaler(), got {grad_scaler!r}"
            )
        if clip_grad_norm < 0:
            raise ValueError(
                f"{type(self).__name__} needs clip_grad_norm >= 0 (0: no clipping), got {clip_grad_norm}"
            )
        self._model_groups = group_of(ParallelMode.MODEL, mp_process_group)
        groups = group_of(row_mode(), dp_process_group) + self._model_groups
        super().__init__(optimizer, groups, report, mesh)
        self._groups += groups_of_pieces(self.parameters(), self.mesh, groups)
        self.scaler = grad_scaler
        self.masters = MasterWeights(optimizer, master_values) if master_weights else None
        self.grad_norm: Tensor | None = None
        self.num_zeros_in_grad: int | None = None
        self._max_norm, self._count_zeros = clip_grad_norm, log_num_zeros_in_grad
        if verbose:
            get_dist_logger("colossalai.amp").info(
                f"{type(self).__name__}: {len(self.masters.weights()) if self.masters else 0} master weights"
                f" of {len(self.parameters())} parameters, loss scale {self.loss_scale:g},"
                f" {len(self._groups)} groups decide together",
                ranks=[0],
            )

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        self._scaled = True
        return loss.float() * self.scaler.scale  # a scaled loss in fp16 would overflow at once

    @contextmanager
    def stepping(self) -> Iterator[None]:
        self.grad_norm = self.num_zeros_in_grad = None
        yield

    def collect(self) -> None:
        if self.masters:
            self.masters.adopt({})
            self.masters.take_gradients()

    def unscale(self) -> Tensor:
        return maximum_over(self._multiply(self.parameters(), self.scaler.inv_scale), self._groups)

    def _multiply(self, parameters: Sequence[Tensor], factor: float) -> Tensor:
        """Multiply the gradients of ``parameters`` by ``factor``; returns 1 if one of them is inf or nan."""
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for p in parameters:
            if p.grad is not None:
                values = p.grad._values() if p.grad.is_sparse else p.grad
                by_kind.setdefault((values.device, values.dtype), []).append(values)
        home = next((p.device for p in self.parameters()), torch.device("cpu"))
        overflow = torch.zeros((), device=home)
        for (device, _), grads in by_kind.items():
            found = torch.zeros((), device=device)
            unscale_and_check(grads, found, torch.full((), factor, device=device))
            overflow = torch.maximum(overflow, found.to(home))
        return overflow

    def update_scale(self, overflowed: bool) -> None:
        self.scaler.update(overflowed)
        self._drop_master_gradients()

    def clip(self) -> None:
        if self._count_zeros:
            self._log_zeros()
        if self._max_norm > 0:
            self.grad_norm = self.clip_grad_by_norm(self._max_norm)

    def refresh_masters(self, *, is_step: bool = False) -> None:
        if self.masters:
            self.masters.refresh(is_step=is_step)

    def publish(self) -> None:
        if self.masters:
            self.masters.write_back()

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip to a norm that is taken over the parts of the model on all ranks; returns the norm before."""
        self.unscale_grad()
        return clip_grads(
            self.parameters(),
            max_norm,
            self.mesh,
            norm_type,
            error_if_nonfinite=error_if_nonfinite,
            others=self._other_parts(),
        )

    def _other_parts(self) -> list[dist.ProcessGroup]:
        """Groups whose ranks hold other parameters.

        On a mesh, the parameters themselves say where they lie.
        """
        return self._model_groups if self.mesh is None else []

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        super().zero_grad(*args, **kwargs)
        self._drop_master_gradients()
        for weight in self.masters.weights() if self.masters else []:
            weight.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        known = {id(weight) for weight in self.masters.weights()} if self.masters else set()
        if any(id(p) in known for p in params):
            raise ValueError(
                "some parameters of the new group are in another group of this optimizer already"
            )
        super().add_param_group({**param_group, "params": params})
        if self.masters:
            self.masters.adopt({})

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, MASTERS_KEY: self.masters.state_dict()} if self.masters else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load; masters that a state of another precision lacks are the weights of the model."""
        state_dict = dict(state_dict)
        saved = state_dict.pop(MASTERS_KEY, None)
        if self.masters and saved is not None:
            self.masters.check_state(saved)  # before anything is changed
        super().load_state_dict(state_dict)
        if self.masters and saved is not None:
            self.masters.load_state_dict(saved)

    def holdings(self) -> list[Holding]:
        self.refresh_masters()
        weights = self.masters.weights_by_master() if self.masters else {}
        return [Holding(weights.get(p, p), p) for p in self.parameters()]

    def weights_loaded(self) -> None:
        super().weights_loaded()
        if self.masters:
            self.masters.weights_loaded()

    def trained_parameters(self) -> list[Tensor]:
        weights = self.masters.weights_by_master() if self.masters else {}
        return [weights.get(p, p) for p in super().trained_parameters()]

    @property
    def is_scaled(self) -> bool:
        return not (isinstance(self.scaler, ConstantGradScaler) and self.scaler.scale == 1)

    def _has_grad(self) -> bool:
        weights = self.masters.weights() if self.masters else []
        return super()._has_grad() or any(w.grad is not None for w in weights)

    def _drop_master_gradients(self) -> None:
        for master in self.masters.masters() if self.masters else []:
            master.grad = None

    def _log_zeros(self) -> None:
        self.num_zeros_in_grad = grad_zeros(self.parameters(), self.mesh, others=self._other_parts())
        get_dist_logger("colossalai.amp").info(
            f"number of zeros in the gradients: {self.num_zeros_in_grad}", ranks=[0]
        )


class NaiveAMPOptimizer(FP16Optimizer):
    """The optimizer of naive AMP: ``FP16Optimizer`` by its documented name, and with its arguments."""

    def __init__(self, optim: Optimizer, *args: Any, **kwargs: Any) -> None:
        super().__init__(optim, *args, **kwargs)
