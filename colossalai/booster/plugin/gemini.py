"""``GeminiPlugin``: ZeRO-3 whose weights, gradients and optimizer states lie in chunks, on the device, the
host, or both.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from colossalai._numeric import ceil_div
from colossalai.amp.loss_scale import LossScaleOptions
from colossalai.auto_parallel.checkpoint.share import ModelShare, state_bytes, weight_bytes
from colossalai.booster.plugin.dp import check_backend
from colossalai.booster.plugin.half_weight_plugin import HalfWeightPlugin
from colossalai.interface import OptimizerWrapper
from colossalai.zero.gemini import GeminiDDP, GeminiOptimizer, MemStats, PlacementPolicyFactory
from colossalai.zero.gemini.chunk import default_device
from colossalai.zero.gemini.chunk_filling import check_shares
from colossalai.zero.gemini.chunk_manager import check_disk
from colossalai.zero.gemini.chunk_search import search_chunk_configuration
from colossalai.zero.gemini.placement import ConstPlacementPolicy
from colossalai.zero.gemini.speculative import UNDO_RATIO
from colossalai.zero.gemini.tiers import check_capacity

# the arguments of the plugin that GeminiDDP and GeminiOptimizer take under the same names
MODEL_OPTIONS = (
    "placement_policy",
    "pin_memory",
    "force_outputs_fp32",
    "strict_ddp_mode",
    "search_range_mb",
    "hidden_dim",
    "min_chunk_size_mb",
    "memstats",
    "compute_capacity",
    "host_capacity",
    "prefetch",
    "host_buffers",
    "disk_dir",
    "disk_capacity",
    "seed",
)
OPTIMIZER_OPTIONS = ("gpu_margin_mem_ratio", "norm_type", "verbose", "update_in_backward", "undo_ratio")


class GeminiPlugin(HalfWeightPlugin):
    """ZeRO-3 with chunks over memory tiers.

    Args:
        device: where the model computes, by default the current GPU, or the CPU.
        placement_policy: ``"cpu"``, ``"cuda"``, ``"auto"`` or ``"const"``: where chunks rest.
        pin_memory: page-locked host memory, for copies that overlap with computation.
        force_outputs_fp32: floating-point outputs are cast to float32.
        strict_ddp_mode: chunks stay whole on the device from the forward pass to the end of the backward
            pass.
        search_range_mb, hidden_dim, min_chunk_size_mb: the search for the chunk size.
        memstats: what an earlier run measured.
        gpu_margin_mem_ratio: the share of what the first step leaves free of the device for chunks to rest
            there.
        initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale: the
            loss scale of fp16.
        max_norm, norm_type: the largest norm of all gradients, 0 does not clip; and which norm.
        verbose: tell the chunk size, and changes of the loss scale.
        precision: ``"fp16"``, ``"bf16"`` or ``"fp32"``, of weights, gradients and operations; by default the
            booster's, or fp16.
        update_in_backward: whether chunks are updated on the host while the backward pass goes on: None
            where that can be rolled back when the step, or the script, needs it; True also where it cannot,
            False not at all.
        undo_ratio: the share of the weights and states on the host that snapshots may take, to roll such
            updates back.
        compute_capacity, host_capacity: bytes that model data may take of the device and of the host.
        prefetch: chunks to fetch ahead.
        host_buffers: gradient buffers on the host; by default as many as there are chunks.
        disk_dir, disk_capacity: a directory on a disk for what does not fit into ``host_capacity``, and the
            bytes it may take.
        seed: of the initial values of a model that was built on the meta device.
    """

    model_type = GeminiDDP
    fills_parameters = True

    def __init__(
        self,
        device: torch.device | str | None = None,
        placement_policy: str = "cpu",
        pin_memory: bool = True,
        force_outputs_fp32: bool = False,
        strict_ddp_mode: bool = False,
        search_range_mb: float = 32,
        hidden_dim: int | None = None,
        min_chunk_size_mb: float = 32,
        memstats: MemStats | None = None,
        gpu_margin_mem_ratio: float = 0.0,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        verbose: bool = False,
        *,
        precision: str | None = None,
        update_in_backward: bool | None = None,
        undo_ratio: float = UNDO_RATIO,
        compute_capacity: int | None = None,
        host_capacity: int | None = None,
        prefetch: int = 2,
        host_buffers: int | None = None,
        disk_dir: str | os.PathLike[str] | None = None,
        disk_capacity: int | None = None,
        seed: int = 1024,
    ) -> None:
        given = dict(locals())
        super().__init__(precision, max_norm, norm_type)
        PlacementPolicyFactory.create(placement_policy)
        check_shares(gpu_margin_mem_ratio=gpu_margin_mem_ratio, undo_ratio=undo_ratio)
        check_disk(disk_dir, disk_capacity, host_capacity)
        for tier, capacity in (
            ("compute", compute_capacity),
            ("host", host_capacity),
            ("disk", disk_capacity),
        ):
            check_capacity(tier, capacity)
        self.device: torch.device = torch.device(device) if device is not None else default_device()
        scale = LossScaleOptions.of(locals()).arguments()
        self.model_options: dict[str, Any] = {
            **{name: given[name] for name in MODEL_OPTIONS},
            "device": self.device,
            "verbose": verbose and dist.get_rank(self._group) == 0,
        }
        self.optimizer_options: dict[str, Any] = {
            **scale,
            **{name: given[name] for name in OPTIMIZER_OPTIONS},
            "clipping_norm": max_norm,
        }

    @property
    def updates_early(self) -> bool:
        """Whether weights are updated in the backward pass for good; with clipping and in fp16, updates can
        be rolled back.
        """
        options = self.optimizer_options
        may_be_rejected = self.precision == "fp16" or options["clipping_norm"] > 0
        return bool(options["update_in_backward"]) and not may_be_rejected

    def control_device(self) -> bool:
        return True

    def share_of(self, model: nn.Module, optimizer: Optimizer | None) -> ModelShare:
        options, size, ranks = self.model_options, self.dtype.itemsize, len(self.divided_over())
        interval = options["hidden_dim"] or 1024
        config, *_ = search_chunk_configuration(
            model, options["search_range_mb"], interval, options["min_chunk_size_mb"], dtype=self.dtype
        )
        largest = max(p.numel() for p in model.parameters())
        chunk = size * max(largest, *(found["chunk_size"] for found in config.values()))
        weights = weight_bytes(model, self.dtype)
        # of chunks that come and go, those in use and ahead; of gradients, what is filled and what travels
        passing = min(weights, (options["prefetch"] + 2) * chunk) + min(weights, 2 * chunk)
        states = state_bytes(model, optimizer, self.dtype)
        pieces = ceil_div(2 * weights + states, ranks)
        wholes = weights if options["strict_ddp_mode"] else 0
        policy = options["placement_policy"]
        if policy == "const":
            passing += round(ConstPlacementPolicy._accessed_memory_boundary)
        if policy == "cuda":
            return ModelShare(weights + pieces + wholes, dtype=self.half)
        movable = travels = 0
        if (
            policy == "auto"
        ):  # wholes stay where there is room; what rests there is up to gpu_margin_mem_ratio
            rests = self.optimizer_options["gpu_margin_mem_ratio"] > 0
            movable = weights - wholes + (pieces if rests else 0)
            travels = 3 * weights if rests else 2 * weights  # weights for each pass, gradients back
        return ModelShare(
            wholes + passing, movable=movable, travels=travels / max(1, movable), dtype=self.half
        )

    def take_room(self, nbytes: int) -> None:
        given = self.model_options["compute_capacity"]
        self.model_options["compute_capacity"] = nbytes if given is None else min(given, nbytes)

    def wrap(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
        check_backend(self.device)
        self.tell_default()
        boosted = GeminiDDP(model, dtype=self.dtype, **self.model_options)
        if optimizer is not None:
            raw = optimizer.unwrap() if isinstance(optimizer, OptimizerWrapper) else optimizer
            optimizer = GeminiOptimizer(raw, boosted, **self.optimizer_options)
        return boosted, optimizer
