"""``TorchDDPPlugin``: every rank holds the whole model, and gradients are averaged during the backward
pass.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from colossalai.auto_parallel.checkpoint.share import ModelShare, gradient_bytes, state_bytes, weight_bytes
from colossalai.booster.plugin.dp import DPPluginBase, check_backend
from colossalai.booster.plugin.gradient_watch import GradientWatch
from colossalai.interface import ModelWrapper, OptimizerWrapper, user_module
from colossalai.interface.hooks import tell_of_local_hooks
from colossalai.interface.optimizer import local_gradients
from colossalai.utils import is_ddp_ignored
from colossalai.utils.parallel import is_cut_over_rows, start_alike

# torch 2.13 renamed the option
_KNOWN = inspect.signature(DistributedDataParallel.__init__).parameters
BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers"


class TorchDDPModel(ModelWrapper):
    """A model inside torch's ``DistributedDataParallel``.

    A model without parameters to train has no gradients to average, and DDP refuses it; it only gets rank 0's
    values. Gradients that DDP does not see are averaged by ``GradientWatch``: so are those of experts, which
    only some of the replicas have.
    """

    keeps_parameters = True

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        refuse: Callable[[list[str]], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(module)
        self.watch: GradientWatch | None = None  # of several replicas
        self._in_pipeline = False
        ddp = None
        _leave_alone(module)
        everyone: Any = process_group or dist.group.WORLD
        apart = [p for p in module.parameters() if is_cut_over_rows(p) and not is_ddp_ignored(p)]
        if any(p.requires_grad and not _is_left_alone(p) for p in module.parameters()):
            start_alike(apart, everyone)
            alone = dist.get_world_size(process_group) == 1
            if alone:
                options = {**options, "static_graph": False}
            self.module = ddp = DistributedDataParallel(module, process_group=process_group, **options)
            if alone:  # it averages nothing, and would wait for the gradients of parts that are unused
                ddp.require_backward_grad_sync = False
        else:
            start_alike((*module.parameters(), *module.buffers()), everyone)
        if dist.get_world_size(process_group) > 1:
            ignored = ddp.parameters_to_ignore if ddp is not None else set()
            watched = [
                p for name, p in module.named_parameters() if name not in ignored and not _is_left_alone(p)
            ]
            self.watch = GradientWatch(
                module,
                [*watched, *apart],
                everyone,
                ddp=ddp,
                broadcast_buffers=options.get(BUFFERS, True),
                refuse=refuse,
            )

    @property
    def _called(self) -> nn.Module:
        """The module that is called: DDP, or the user's where there is nothing to average."""
        return cast(nn.Module, self._modules["module"])  # ``self.module`` may be another, see ColoDDP

    def unwrap(self) -> nn.Module:
        inner = self._called
        return user_module(inner.module if isinstance(inner, DistributedDataParallel) else inner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inner = self._called
        if self._in_pipeline and isinstance(inner, DistributedDataParallel):
            inner = inner.module
        return inner(*args, **kwargs)

    @contextmanager
    def in_pipeline(self) -> Iterator[None]:
        """Inside, calls bypass DDP, and nothing is averaged: the pipeline averages, and calls
        ``gradients_were_averaged``.

        DDP averages after every backward pass, and wants all gradients from each.  A step of a pipeline has a
        pass for every micro-batch and chunk, and some schedules do it in two halves.
        """
        if self.watch is not None:
            self.watch.share_buffers()
        self._in_pipeline = True
        try:
            with self.no_sync(), nullcontext() if self.watch is None else self.watch.undivided():
                yield
        finally:
            self._in_pipeline = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        watch, inner = self.watch, self._called
        with inner.no_sync() if isinstance(inner, DistributedDataParallel) else nullcontext():
            if watch is not None:
                watch.no_sync_depth += 1
            try:
                yield
            finally:
                if watch is not None:
                    watch.no_sync_depth -= 1

    def gradients_were_averaged(self) -> None:
        """Note that other code, such as a pipeline, has averaged all gradients."""
        if self.watch is not None:
            self.watch.all_averaged()


def _is_left_alone(p: Tensor) -> bool:
    """Whether DDP leaves ``p`` alone: nothing averages it, or other ranks do."""
    return is_ddp_ignored(p) or is_cut_over_rows(p)


def _leave_alone(module: nn.Module) -> None:
    """Tell DDP of the parameters that it leaves alone."""
    names = [
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        for name, p in part.named_parameters(recurse=False)
        if _is_left_alone(p)
    ]
    names += [name for name, p in module.named_parameters() if _is_left_alone(p)]
    if names:
        before = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [*before, *names])


class TorchDDPOptimizer(OptimizerWrapper):
    """An optimizer of the parameters of replicas: what it steps must have been averaged.

    Parameters that are not in the model (of a criterion, of a layer added later) start alike and are averaged
    too.
    """

    def __init__(self, optim: Optimizer, watch: GradientWatch) -> None:
        super().__init__(optim)
        self._watch = watch
        self._watch.add(self._averaged())
        optim.register_step_pre_hook(partial(_refuse_local_gradients, watch))
        tell_of_local_hooks(optim, self._averaged(), "TorchDDPPlugin")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._watch.add(self._averaged())

    def _averaged(self) -> list[Tensor]:
        return [p for p in self.trained_parameters() if not is_ddp_ignored(p)]

    def torch_may_clip(self, *, elementwise: bool) -> bool:
        # what was written by hand is not averaged yet
        return not self._watch.written(self._averaged()) and super().torch_may_clip(elementwise=elementwise)

    def unscale_grad(self) -> None:
        self._watch.average_written(self._averaged())
        super().unscale_grad()

    def clip_grad_by_value(self, clip_value: float) -> None:
        self._watch.average_written(self._averaged())
        super().clip_grad_by_value(clip_value)

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        self._watch.average_written(self._averaged())
        return super().clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if missing := self._watch.missing():
            raise RuntimeError(
                f"optimizer.step() before all gradients are there: {len(missing)} parameters have got none in"
                f" the backward pass ({', '.join(missing[:3])}{', ...' * (len(missing) > 3)}), and DDP"
                " averages when it has all. Pass TorchDDPPlugin(find_unused_parameters=True) if a part of"
                " the model may be unused in a step, or freeze it before boost"
            )
        for p in self._averaged():
            if p.grad is not None and not self._watch.knows(p):
                raise RuntimeError(
                    f"optimizer.step() with a gradient of a parameter of shape {tuple(p.shape)} that came"
                    " into the groups after boost, so it was not averaged; add it with add_param_group of"
                    " the boosted optimizer"
                )
        self._watch.average_written(self._averaged())
        result = super().step(*args, **kwargs)
        self._watch.stepped()
        return result


def _refuse_local_gradients(watch: GradientWatch, optimizer: Optimizer, *_: Any) -> None:
    """Before a step: replicas that step with gradients of their own are replicas no more."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    if watch.local and any(p.grad is not None for p in params):
        raise local_gradients()


class TorchDDPPlugin(DPPluginBase):
    """Data parallelism by ``torch.nn.parallel.DistributedDataParallel``.

    Every rank computes with its own part of the batch; gradients are averaged, so that a step equals a serial
    step with the ranks' batches joined.  Layers with batch statistics (BatchNorm) see their own rank's part.

    Args:
        broadcast_buffers: at each forward pass, take the buffers of rank 0.
        bucket_cap_mb: gradients are averaged in buckets of this size, while the backward pass goes on.
        find_unused_parameters: needed if a part of the model may be unused in a step.
        check_reduction: without effect in torch; a warning says so.
        gradient_as_bucket_view: let gradients be views of the buckets, which saves their memory.
        static_graph: promise that the same parameters are used in every step.
        process_group: the ranks that are replicas of each other; if left out, the data-parallel ranks of the
            launched config.
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
        self.ddp_options: dict[str, Any] = {
            BUFFERS: broadcast_buffers,
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "process_group": self._group,
        }

    def share_of(self, model: nn.Module, optimizer: Optimizer | None) -> ModelShare:
        held = weight_bytes(model) + state_bytes(model, optimizer)
        # the buckets are there from the beginning; gradients beside them, unless they are views of these
        are_views = bool(self.ddp_options["gradient_as_bucket_view"])
        return ModelShare(held + gradient_bytes(model), gradients=not are_views)

    def wrap(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
        device = next((p.device for p in model.parameters()), None)
        if device is not None:
            check_backend(device)
        # with its device named, DDP also moves the inputs there
        device_ids = [device] if device is not None and device.type == "cuda" else None
        ddp_model = TorchDDPModel(model, device_ids=device_ids, **self.ddp_options)
        if optimizer is not None and ddp_model.watch is not None:
            optimizer = TorchDDPOptimizer(optimizer, ddp_model.watch)
        return ddp_model, optimizer
