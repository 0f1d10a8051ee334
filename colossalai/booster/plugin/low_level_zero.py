"""``LowLevelZeroPlugin``: data parallelism whose optimizer states, and in stage 2 gradients, are cut over the
ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from colossalai._numeric import ceil_div
from colossalai.amp.casting import CastModel, is_batch_norm
from colossalai.amp.loss_scale import LossScaleOptions
from colossalai.auto_parallel.checkpoint.share import ModelShare, gradient_bytes, state_bytes, weight_bytes
from colossalai.booster.plugin.dp import check_backend
from colossalai.booster.plugin.half_weight_plugin import HalfWeightPlugin
from colossalai.checkpoint_io import CheckpointIO, GatheredCheckpointIO
from colossalai.interface import user_module
from colossalai.interface.foreign_parameters import strangers
from colossalai.interface.holding import RestingPlace
from colossalai.interface.nest import tensors
from colossalai.mesh import own_grad, set_own_grad
from colossalai.mesh.backward import before_backward
from colossalai.mesh.weights.deferred import fill_deferred, recording_of
from colossalai.utils import is_using_pp
from colossalai.utils.parallel import pieces_over_rows, start_alike
from colossalai.zero import LowLevelZeroOptimizer
from colossalai.zero.absent_tensors import KeptGradients

IN_FLIGHT = 2  # buckets of gradients: one is filled while another travels


class LowLevelZeroModel(CastModel):
    """A model whose inputs are cast to its precision; ``no_sync`` is passed on to its optimizer."""

    keeps_parameters = True
    optimizer: LowLevelZeroOptimizer | None = None
    left_out: LeftOut | None = None

    def __init__(self, module: nn.Module, dtype: torch.dtype, ranks: int = 1) -> None:
        half = dtype if dtype != torch.float32 else None
        # between stages half precision travels; the pipeline casts the output of the last one
        super().__init__(module, half, torch.float32 if half is not None and not is_using_pp() else None)
        self._local = self._is_kept_local = False
        self._ranks = ranks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.optimizer is not None and torch.is_grad_enabled():
            # as with torch's DDP, the forward pass decides for the backward pass that follows; kept here, as
            # a compiled forward pass may change its module, but not an optimizer
            self._is_kept_local = self._local
        output = super().forward(*args, **kwargs)
        if self.optimizer is None and self._ranks > 1 and any(p.requires_grad for p in self.parameters()):
            before_backward((t for t in tensors(output) if t.requires_grad), _refuse_backward)
        return output

    def resting_places(self) -> dict[int, RestingPlace]:
        def states(p: Tensor) -> str:
            ranks = self._ranks // pieces_over_rows(p)
            return "whole" if ranks == 1 else f"cut over {ranks} ranks"

        return {
            **super().resting_places(),
            **{
                id(p): RestingPlace(
                    numel=p.numel(), dtype=p.dtype, tier=str(p.device), words=f"states {states(p)}"
                )
                for p in self.parameters()
                if p.requires_grad
            },
        }

    def __getstate__(self) -> dict[str, Any]:
        # a copy has weights of its own, which this optimizer knows nothing of
        return {**self.__dict__, "optimizer": None, "left_out": None}

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)
            if self.left_out is not None:
                self.left_out.zero_grad()
        else:
            super().zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._local = self._local, True
        self._is_kept_local = True
        try:
            yield
        finally:
            self._local = before


class LowLevelZeroPlugin(HalfWeightPlugin):
    """ZeRO-1 (optimizer states are cut) and ZeRO-2 (gradients too).

    Args:
        stage: 1 or 2.
        precision: ``'fp16'``, ``'bf16'`` or ``'fp32'``, of weights, gradients and operations; by default the
            booster's, or fp16.  Optimizers keep the digits that half precision lacks.
        initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale: the
            loss scale of ``'fp16'``.
        max_norm: the largest norm of all gradients; 0 does not clip.
        norm_type: which norm that is.
        reduce_bucket_size_in_m: millions of elements whose gradients travel together.
        communication_dtype: in which gradients travel, by default in ``precision``.
        overlap_communication: reduce gradients while the backward pass goes on.
        cpu_offload: states stay in host memory, and the step is made there.
        verbose: log how the parameters were cut, and changes of the loss scale.
        process_group: the ranks that are replicas of each other; if left out, the data-parallel ranks of the
            launched config.
    """

    model_type = LowLevelZeroModel
    fills_parameters = True

    def __init__(
        self,
        stage: int = 1,
        precision: str | None = None,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        reduce_bucket_size_in_m: float = 12,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = True,
        cpu_offload: bool = False,
        verbose: bool = False,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(precision, max_norm, norm_type, process_group)
        if stage not in (1, 2):
            raise ValueError(
                f"LowLevelZeroPlugin has the stages 1 and 2, got stage={stage!r}; GeminiPlugin is ZeRO-3"
            )
        if not reduce_bucket_size_in_m > 0:
            raise ValueError(
                "LowLevelZeroPlugin needs reduce_bucket_size_in_m of more than 0, got"
                f" {reduce_bucket_size_in_m!r}"
            )
        self.stage = stage
        self._given_group = process_group
        scale = LossScaleOptions.of(locals()).arguments()
        self.options: dict[str, Any] = {
            **scale,
            "clip_grad_norm": max_norm,
            "norm_type": norm_type,
            "reduce_bucket_size": max(1, round(reduce_bucket_size_in_m * 1024 * 1024)),
            "communication_dtype": communication_dtype,
            "overlap_communication": overlap_communication,
            "cpu_offload": cpu_offload,
            "verbose": verbose,
            "partition_grad": stage == 2,
            "process_group": self._group,
        }

    def get_checkpoint_io(self) -> CheckpointIO:
        # not of the replicas: these may hold pieces of a model, which others complete
        return GatheredCheckpointIO(self._given_group)

    def share_of(self, model: nn.Module, optimizer: Optimizer | None) -> ModelShare:
        dtype, ranks = self.half, len(self.divided_over())
        gradients = gradient_bytes(model, dtype)
        states = 0 if self.options["cpu_offload"] else state_bytes(model, optimizer, dtype)
        travelling = min(gradients, IN_FLIGHT * self.options["reduce_bucket_size"] * self.dtype.itemsize)
        fixed = weight_bytes(model, dtype) + ceil_div(states + gradients, ranks) + travelling
        return ModelShare(fixed, gradients=self.stage == 1, dtype=dtype)

    def wrap(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
        module, dtype = user_module(model), self.dtype
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                "LowLevelZeroPlugin averages gradients itself, but the model is a DistributedDataParallel;"
                " give the model inside it"
            )
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        check_backend(device)
        trained = set() if optimizer is None else {p for g in optimizer.param_groups for p in g["params"]}
        waiting = {p for p in trained if p.requires_grad and recording_of(p) is not None}
        rest = [p for p in module.parameters() if p not in waiting]  # of the others, the buckets take care
        fill_deferred(rest)
        start_alike((*rest, *module.buffers()), self._group)
        boosted = LowLevelZeroModel(model, dtype, len(self.divided_over()))
        kept = [m for m in module.modules() if is_batch_norm(m)] if dtype != torch.float32 else []
        if optimizer is not None:
            beside = strangers(optimizer, module).held  # of a criterion, which computes in its own precision
            start_alike(beside, self._group)
            boosted.optimizer = LowLevelZeroOptimizer(
                optimizer,
                forced_dtype=dtype if dtype != torch.float32 else None,
                keep_dtype=[*beside, *(p for m in kept for p in m.parameters(recurse=False))],
                start_alike=True,
                **self.options,
            )
            boosted.optimizer.is_kept_local = lambda: boosted._is_kept_local
        _cast_rest(module, dtype, kept)
        if boosted.optimizer is not None and len(self.divided_over()) > 1:
            trained = {id(piece.param) for piece in boosted.optimizer.pieces}
            boosted.left_out = LeftOut(p for p in module.parameters() if id(p) not in trained)
        return boosted, boosted.optimizer or optimizer


class LeftOut:
    """The parameters of a model that the boosted optimizer does not hold, so that nothing averages their
    gradients.

    Most are meant to stay as they are.  Another optimizer that steps them would let the replicas drift apart,
    so their gradients refuse to be read.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._params = [p for p in params if p.is_floating_point() or p.is_complex()]
        self._kept = KeptGradients(self, self._params)
        self._kept.guard()

    def keeps_gradient(self, param: Tensor) -> bool:
        return own_grad(param) is not None

    def shown_gradient(self, param: Tensor) -> Tensor | None:
        return None

    def why_no_gradient(self, param: Tensor) -> str:
        return (
            f"the gradient of a parameter of shape {tuple(param.shape)} that is not in the optimizer given to"
            " boost, so LowLevelZeroPlugin does not average it over the ranks; give all parameters to one"
            " optimizer, in groups"
        )

    def zero_grad(self) -> None:
        for p in self._params:
            set_own_grad(p, None)
        self._kept.forget()


def _refuse_backward(grad: Tensor) -> None:
    raise RuntimeError(
        "a backward pass through a model that LowLevelZeroPlugin has got without an optimizer (or through a"
        " copy of one): under ZeRO the optimizer averages the gradients, so nothing would; give the optimizer"
        " to boost, or call a model that is only evaluated under torch.no_grad()"
    )


def _cast_rest(module: nn.Module, dtype: torch.dtype, kept: list[nn.Module]) -> None:
    """Frozen parameters and buffers; what the optimizer trains has its dtype, and ``kept`` modules stay as
    they are.
    """
    if dtype == torch.float32:
        return
    for part in module.modules():
        if part in kept:
            continue
        for param in part.parameters(recurse=False):
            if param.is_floating_point() and param.dtype != dtype:
                param.data = param.data.to(dtype)
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(part, name, buffer.to(dtype))
