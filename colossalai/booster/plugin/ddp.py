"""``TorchDDPPlugin``: every rank holds the whole model, and gradients are averaged during the backward pass."""

from __future__ import annotations

import inspect
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from colossalai.booster.plugin.dp import DPPluginBase, check_backend, start_alike
from colossalai.interface import ModelWrapper, user_module
from colossalai.logging import get_dist_logger


class TorchDDPModel(ModelWrapper):
    """A model inside torch's ``DistributedDataParallel``.

    A model without parameters to train has no gradients to average, and DDP refuses it; it only gets rank 0's values.
    """

    def __init__(
        self, module: nn.Module, process_group: dist.ProcessGroup | None = None, **options: Any
    ) -> None:
        super().__init__(module)
        self.gradients_are_local = False
        if any(p.requires_grad for p in module.parameters()):
            self.module = DistributedDataParallel(module, process_group=process_group, **options)
        else:
            start_alike(module, process_group)

    def unwrap(self) -> nn.Module:
        inner = self.module.module if isinstance(self.module, DistributedDataParallel) else self.module
        return user_module(inner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # here DDP decides whether the backward pass will average, so here we can tell
        if torch.is_grad_enabled() and isinstance(self.module, DistributedDataParallel):
            self.gradients_are_local = not self.module.require_backward_grad_sync
        return super().forward(*args, **kwargs)

    def warn_of_local_gradients(self, optimizer: Optimizer, *_: Any) -> None:
        """Before a step: replicas that step with gradients of their own are replicas no more."""
        params = (p for group in optimizer.param_groups for p in group["params"])
        if self.gradients_are_local and any(p.grad is not None for p in params):
            get_dist_logger().warning_once(
                "optimizer.step() with gradients that were not averaged: every pass since the last step was under no_sync, so"
                " the replicas drift apart. Let the last pass of each group, also of a shorter last one, run outside of"
                " no_sync",
                ranks=[0],
            )

    def no_sync(self) -> AbstractContextManager[None]:
        return self.module.no_sync() if isinstance(self.module, DistributedDataParallel) else nullcontext()


class TorchDDPPlugin(DPPluginBase):
    """Data parallelism by ``torch.nn.parallel.DistributedDataParallel``.

    Every rank computes with its own part of the batch; gradients are averaged, so that a step equals a serial step with
    the ranks' batches joined.  Layers with batch statistics (BatchNorm) see their own rank's part.

    Args:
        broadcast_buffers: at each forward pass, take the buffers of rank 0.
        bucket_cap_mb: gradients are averaged in buckets of this size, while the backward pass goes on.
        find_unused_parameters: needed if a part of the model may take no part in a step.
        check_reduction: without effect in torch; a warning says so.
        gradient_as_bucket_view: let gradients be views of the buckets, which saves their memory.
        static_graph: promise that the same parameters are used in every step.
        process_group: the ranks that are replicas of each other; if left out, the data-parallel ranks of the launched config.
    """

    model_type = TorchDDPModel

    def __init__(
        self,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        if check_reduction:
            warnings.warn("check_reduction has no effect: torch ignores it", stacklevel=2)
        # torch 2.13 renamed the option
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        self.ddp_options: dict[str, Any] = {
            buffers: broadcast_buffers,
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "process_group": self._group,
        }

    def wrap(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
        device = next((p.device for p in model.parameters()), None)
        if device is not None:
            check_backend(device)
        # with its device named, DDP also moves the inputs there
        device_ids = [device] if device is not None and device.type == "cuda" else None
        ddp_model = TorchDDPModel(model, device_ids=device_ids, **self.ddp_options)
        if optimizer is not None and self.world_size > 1:
            optimizer.register_step_pre_hook(ddp_model.warn_of_local_gradients)
        return ddp_model, optimizer
