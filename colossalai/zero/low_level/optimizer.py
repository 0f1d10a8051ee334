"""``LowLevelZeroOptimizer``: ZeRO stages 1 and 2.

Every rank computes with all weights; the optimizer's states, and with ``partition_grad`` the gradients, are
cut over the data-parallel ranks.  A step costs what it costs under plain data parallelism: one reduce-scatter
of the gradients, hidden behind the backward pass, and one gather of the updated weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from colossalai.amp.loss_scale import LossScaleOptions
from colossalai.amp.naive_amp.grad_scaler import BaseGradScaler
from colossalai.interface import OptimizerWrapper
from colossalai.logging import get_dist_logger
from colossalai.mesh import Mesh, own_grad
from colossalai.mesh.weights.deferred import fill_deferred, states_of
from colossalai.tensor.colo_tensor import cut_dim
from colossalai.utils import is_ddp_ignored
from colossalai.utils.parallel import averaging_group
from colossalai.zero.low_level.bucket import BucketOptions, make_buckets
from colossalai.zero.low_level.reducer import Reducer
from colossalai.zero.low_level.wire import start_gathering
from colossalai.zero.pieces import IN_CHUNKS, Piece
from colossalai.zero.sharded import ShardedOptimizer


class LowLevelZeroOptimizer(ShardedOptimizer):
    """ZeRO-1, and with ``partition_grad`` ZeRO-2, around any optimizer.

    Call ``backward(loss)`` in the place of ``loss.backward()``.  With ``sync_grad=False`` gradients add up on
    each rank and nothing is communicated; gradients that a later pass, or the step, finds there are reduced
    with it.

    Args:
        optimizer: its parameters are on the devices where they stay; all ranks hold the same values.
        initial_scale: the first loss scale; used if there are weights in fp16.
        min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale: see
            ``DynamicGradScaler``.
        clip_grad_norm: the largest norm of all gradients; 0 does not clip.
        verbose: log how the parameters were cut.
        reduce_bucket_size: elements that travel together.
        communication_dtype: in which gradients travel, by default in that of their parameters.
        overlap_communication: reduce gradients while the backward pass goes on.
        partition_grad: stage 2: keep only this rank's shard of the gradients.
        cpu_offload: states stay in host memory, and the step is made there.
        forced_dtype: make the weights of this dtype; the optimizer goes on with the digits they had.
        process_group: the ranks with the same weights, by default the data-parallel ones of the launched job,
            or all.
        mesh: the ranks that the parameters may be cut over, by default those of the launched job.
        norm_type: which norm ``clip_grad_norm`` means.
        keep_dtype: parameters that ``forced_dtype`` leaves as they are.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 2,
        max_scale: float = 2**24,
        clip_grad_norm: float = 0.0,
        verbose: bool = False,
        reduce_bucket_size: int = 1024 * 1024,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = False,
        partition_grad: bool = False,
        cpu_offload: bool = False,
        forced_dtype: torch.dtype | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        mesh: Mesh | None = None,
        norm_type: float = 2.0,
        keep_dtype: Iterable[Tensor] = (),
        start_alike: bool = False,
    ) -> None:
        scaler = LossScaleOptions.of(locals()).scaler(verbose)
        _check(optimizer, reduce_bucket_size, communication_dtype, forced_dtype)
        group = process_group or averaging_group()
        params = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        options = BucketOptions(
            size=reduce_bucket_size,
            everyone=group,
            offload=cpu_offload,
            dtype=forced_dtype,
            alike=start_alike,
        )
        self._frozen = [p for g in optimizer.param_groups for p in g["params"] if not p.requires_grad]
        fill_deferred([*self._frozen, *states_of(optimizer)])
        self.buckets = make_buckets(optimizer, params, options, keep_dtype)
        self._places = [(p, p.data_ptr()) for p in params]
        super().__init__(
            optimizer,
            [piece for bucket in self.buckets for piece in bucket.pieces],
            group=group,
            scaler=_scaler_for(params, scaler),
            max_norm=clip_grad_norm,
            norm_type=norm_type,
            mesh=mesh,
        )
        self.reducer = Reducer(
            self.buckets,
            self.group,
            scatter=partition_grad,
            overlap=overlap_communication,
            dtype=communication_dtype,
        )
        self._partition_grad = partition_grad
        self._local_passes = self._in_pipeline = False
        self.is_kept_local: Callable[[], bool] = lambda: (
            False
        )  # what the model says of the passes that follow
        if verbose:
            self._log()

    # Backward passes

    def backward(
        self, loss: Tensor, retain_graph: bool | Tensor | None = None, sync_grad: bool = True, **kwargs: Any
    ) -> None:
        """The backward pass of ``loss``; keywords are those of ``torch.Tensor.backward``.

        Args:
            retain_graph: as in torch; a tensor in its place is the gradient of ``loss``, which torch has
                first.
            sync_grad: average the gradients; if not, they wait on this rank for a pass that does.
        """
        self._check_not_unscaled()
        self.kept.check()
        name = "gradient" if isinstance(retain_graph, Tensor) else "retain_graph"
        kwargs[name] = retain_graph
        loss = self.scale_loss(loss)
        if not sync_grad or self._local_passes or self._in_pipeline or self.is_kept_local():
            loss.backward(**kwargs)
            return
        self.reducer.begin()
        try:
            loss.backward(**kwargs)
        except BaseException:
            self.reducer.abandon()
            raise
        self.reducer.end()

    def expect_gradients(self) -> None:
        """A pipeline begins, whose stages have a pass for each micro-batch:
        their gradients are reduced once, in the step.
        """
        super().expect_gradients()
        self._in_pipeline = self.reducer.has_local = True  # passes that are cut in two call no hooks

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside do not communicate."""
        before, self._local_passes = self._local_passes, True
        try:
            yield
        finally:
            self._local_passes = before

    def keeps_gradient(self, param: Tensor) -> bool:
        return super().keeps_gradient(param) or self.reducer.has_reduced(param)

    def shown_gradient(self, param: Tensor) -> Tensor | None:
        """Of a process alone, its own: no other rank has a part of it, and what
        is written to it is taken in the step.
        """
        if self.group is not None or self._partition_grad or self.is_scaled or self._unscaled:
            return None
        self.reducer.has_local = True
        return own_grad(param)

    def bring_gradients(self) -> None:
        self._check_places()
        self._in_pipeline = False
        self.reducer.complete()

    def publish(self) -> None:
        # all are under way before the first is waited for, those first that the next forward pass needs first
        waits = [start_gathering(b.weights, b.layout, b.group) for b in reversed(self.buckets)]
        for wait in waits:
            wait()
        increment_version(
            [piece.param for piece in self.pieces]
        )  # a graph from before the step is no longer right
        for piece in self.pieces:
            piece.seen = piece.param._version

    @torch.no_grad()
    def write_weights(self, pieces: Sequence[Piece]) -> None:
        if len(pieces) < len(self.pieces):
            super().write_weights(pieces)
            return
        for bucket in self.buckets:  # one copy for each
            bucket.write_weights()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.reducer.forget(to_zero=not set_to_none)
        super().zero_grad()
        self._in_pipeline = False

    def settle(self) -> None:
        self.reducer.settle()

    def _has_grad(self) -> bool:
        return any(bucket.grad is not None for bucket in self.buckets) or super()._has_grad()

    def _check_places(self) -> None:
        for param, where in self._places:
            if param.data_ptr() != where:
                raise RuntimeError(
                    f"a parameter of shape {tuple(param.shape)} was given new memory (by model.to(...) or"
                    f" p.data = ...) after {type(self).__name__} had laid it into its buffers; move and cast"
                    " the model before"
                )
        if free := [p for p in self._frozen if p.requires_grad]:
            raise RuntimeError(
                f"a parameter of shape {tuple(free[0].shape)} was frozen when {type(self).__name__} was"
                " built, and is not any more; unfreeze parameters before, or build the optimizer again"
            )

    def _log(self) -> None:
        elements = sum(p.numel() for p, _ in self._places)
        own = sum(piece.value.numel() for piece in self.pieces)
        get_dist_logger("colossalai.zero").info(
            f"{type(self).__name__}: {len(self.pieces)} parameters of {elements:,} elements in"
            f" {len(self.buckets)} buckets; this rank steps {own:,} of them",
            ranks=[0],
        )


def _scaler_for(params: Iterable[Tensor], scaler: BaseGradScaler) -> BaseGradScaler | None:
    """Only gradients in fp16 vanish."""
    return scaler if any(p.dtype == torch.float16 for p in params) else None


def _check(optimizer: Any, size: Any, *dtypes: torch.dtype | None) -> None:
    who = "LowLevelZeroOptimizer"
    if isinstance(optimizer, OptimizerWrapper):
        raise TypeError(
            f"{who} does mixed precision itself and takes the plain optimizer, got {type(optimizer).__name__}"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{who} wraps a torch.optim.Optimizer, got {optimizer!r}")
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise TypeError(
            f"{who} cannot cut {type(optimizer).__name__}, which needs all parameters at once or sparse"
            " gradients; use an optimizer such as HybridAdam"
        )
    if not isinstance(size, int) or size < 1:
        raise ValueError(
            f"{who} needs reduce_bucket_size as a number of elements of at least 1, got {size!r}"
        )
    for dtype in dtypes:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"{who} needs a floating-point dtype such as torch.bfloat16, got {dtype!r}")
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for p in params:
        if p.is_meta or getattr(p, IN_CHUNKS, False):
            what = (
                "has no values yet (it is on the meta device)"
                if p.is_meta
                else "lies in chunks of a GeminiDDP"
            )
            raise ValueError(
                f"{who} needs parameters of a plain model, but one of shape {tuple(p.shape)} {what}; give it"
                " the parameters of a model with values, before any other plan"
            )
        if cut_dim(p) is not None:
            raise ValueError(
                f"{who} divides whole parameters between the replicas, but one of shape {tuple(p.shape)} is a"
                " ColoParameter that is cut; use GeminiPlugin (or ZeroDDP), ColoDDP or TorchDDPPlugin"
            )
        if hasattr(p, "to_local") or is_ddp_ignored(p):
            what = (
                "is a DTensor" if hasattr(p, "to_local") else "is marked to be left alone by data parallelism"
            )
            raise ValueError(
                f"{who} averages gradients over all replicas, but a parameter of shape {tuple(p.shape)}"
                f" {what}; give it an optimizer of its own"
            )
    if not params:
        raise ValueError(f"{who} got an optimizer without parameters to train")
