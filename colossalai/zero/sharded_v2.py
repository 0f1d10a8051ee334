"""The older interface of ZeRO-3, on the chunks of Gemini.

| older name | is |
|---|---|
| ``ZeroInitContext`` | builds models on the meta device; Gemini draws their weights into chunks |
| ``ShardedModelV2`` | ``GeminiDDP`` |
| ``ShardedOptimizerV2`` | ``GeminiOptimizer``, with the model before the optimizer |
| ``convert_to_zero_v2`` | both |
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer

from colossalai.zero.gemini import GeminiDDP, GeminiOptimizer
from colossalai.zero.shard_utils import BaseShardStrategy

SEED = "_colo_zero_seed"  # the attribute of a parameter that says from which seed it is to be drawn


class ZeroInitContext:
    """Models that are built inside take no memory until ``ShardedModelV2`` gives their weights a place.

    Args:
        target_device, shard_strategy, shard_param: where weights rest and how they are cut is said by
            ``ShardedModelV2``; here it changes nothing, since no rank ever has them whole.
        seed: initial values depend on it and on the names of parameters, not on the number of ranks.
        default_dtype: of floating-point parameters, while the block lasts.
        model_numel_tensor: the number of elements of all parameters is added to it.
    """

    def __init__(
        self,
        target_device: torch.device | str,
        shard_strategy: BaseShardStrategy,
        seed: int = 1023,
        shard_param: bool = False,
        default_dtype: torch.dtype | None = None,
        model_numel_tensor: Tensor | None = None,
    ) -> None:
        torch.device(target_device)  # refuses what is none
        check_strategy(shard_strategy)
        self.seed, self.default_dtype, self.model_numel_tensor = seed, default_dtype, model_numel_tensor
        self._made: list[weakref.ref[nn.Parameter]] = []

    def __enter__(self) -> ZeroInitContext:
        self._dtype_before = torch.get_default_dtype()
        if self.default_dtype is not None:
            torch.set_default_dtype(self.default_dtype)
        self._hook = register_module_parameter_registration_hook(self._register)
        self._meta = torch.device("meta")
        self._meta.__enter__()
        return self

    def _register(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            setattr(param, SEED, self.seed)
            self._made.append(weakref.ref(param))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._meta.__exit__(kind, error, trace)
        self._hook.remove()
        torch.set_default_dtype(self._dtype_before)
        if self.model_numel_tensor is not None:
            # those that were replaced, as tied ones are, are gone
            made = {id(p): p.numel() for ref in self._made if (p := ref()) is not None}
            self.model_numel_tensor += sum(made.values())
        self._made.clear()


@contextmanager
def no_shard_zero_context(is_replicated: bool = True) -> Iterator[None]:
    """Stands for a block inside ``ZeroInitContext`` whose weights stay whole.

    ``ShardedModelV2`` lays all weights in chunks, also those that are built inside; what they compute is the
    same, so this changes nothing.
    """
    yield


no_shard_zero_decrator = no_shard_zero_context  # an older spelling; it decorates functions, too


class ShardedModelV2(GeminiDDP):
    """``GeminiDDP`` under its older name.

    Args:
        shard_strategy, reduce_scatter_bucket_size_mb, gradient_predivide_factor, reuse_fp16_shard: chunks
            have one way of each; this changes nothing.
        process_group, reduce_scatter_process_group: the data-parallel ranks are those of the launched plan:
            None.
        fp32_reduce_scatter: gradients travel in ``dtype``: False, unless that is float32.
        tensor_placement_policy: ``"cuda"``, ``"cpu"``, ``"auto"`` or ``"const"``.
        dtype, options: those of ``GeminiDDP``.
    """

    def __init__(
        self,
        module: nn.Module,
        shard_strategy: BaseShardStrategy,
        process_group: dist.ProcessGroup | None = None,
        reduce_scatter_process_group: dist.ProcessGroup | None = None,
        reduce_scatter_bucket_size_mb: float = 25,
        fp32_reduce_scatter: bool = False,
        tensor_placement_policy: str = "cuda",
        gradient_predivide_factor: float = 1.0,
        reuse_fp16_shard: bool = False,
        *,
        dtype: torch.dtype = torch.float16,
        **options: Any,
    ) -> None:
        check_strategy(shard_strategy)
        for name, group in (
            ("process_group", process_group),
            ("reduce_scatter_process_group", reduce_scatter_process_group),
        ):
            if group is not None:
                raise ValueError(
                    f"ShardedModelV2 cuts a model over the data-parallel ranks of the launched plan and"
                    f" takes no {name}; leave it out, and give the plan to colossalai.launch, or a mesh as"
                    " mesh="
                )
        if fp32_reduce_scatter and dtype is not torch.float32:
            raise ValueError(
                f"ShardedModelV2 averages gradients in its dtype, {dtype}, and not in float32 as"
                " fp32_reduce_scatter=True asks for; leave it out, or train in dtype=torch.float32"
            )
        options = {**_seed_of(module), **options}
        super().__init__(module, placement_policy=tensor_placement_policy, dtype=dtype, **options)


class ShardedOptimizerV2(GeminiOptimizer):
    """``GeminiOptimizer`` under its older name; ``options`` are its own."""

    def __init__(
        self,
        sharded_model: ShardedModelV2,
        optimizer: Optimizer,
        gpu_margin_mem_ratio: float = 0.0,
        initial_scale: float = 2**16,
        **options: Any,
    ) -> None:
        super().__init__(optimizer, sharded_model, gpu_margin_mem_ratio, initial_scale, **options)


def convert_to_zero_v2(
    model: nn.Module,
    optimizer: Optimizer,
    model_config: Mapping[str, Any],
    optimizer_config: Mapping[str, Any],
) -> tuple[ShardedModelV2, ShardedOptimizerV2]:
    """The model and its optimizer, which may have been built from the
    parameters of ``model``, under ZeRO-3.
    """
    sharded = ShardedModelV2(model, **model_config)
    return sharded, ShardedOptimizerV2(sharded, optimizer, **optimizer_config)


def _seed_of(module: Any) -> dict[str, int]:
    params = list(module.parameters()) if isinstance(module, nn.Module) else []
    seeds = {getattr(p, SEED) for p in params if hasattr(p, SEED)}
    if len(seeds) > 1:
        raise ValueError(
            f"parts of {type(module).__name__} were built under ZeroInitContext with the seeds"
            f" {sorted(seeds)}; build it under one"
        )
    return {"seed": seeds.pop()} if seeds else {}


def check_strategy(strategy: Any) -> None:
    if not isinstance(strategy, BaseShardStrategy):
        raise TypeError(
            f"shard_strategy is TensorShardStrategy() or BucketTensorShardStrategy(), got {strategy!r}"
        )
