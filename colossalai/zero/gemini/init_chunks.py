"""A chunk manager for a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from colossalai.logging import get_dist_logger
from colossalai.zero.gemini.chunk_manager import ChunkManager, data_ranks
from colossalai.zero.gemini.search import (
    HIDDEN,
    MB,
    check_search,
    data_parallel_size,
    model_mesh,
    search_chunk_configuration,
)


def init_chunk_manager(
    model: nn.Module,
    init_device: torch.device | str | None = None,
    hidden_dim: int | None = None,
    verbose: bool = False,
    *,
    search_range_mb: float = 32,
    min_chunk_size_mb: float = 32,
    filter_exlarge_params: bool = True,
    strict_ddp_flag: bool = False,
    dtype: torch.dtype = torch.float16,
    **manager: Any,
) -> ChunkManager:
    """A chunk manager with the chunk size that wastes least for ``model``; ``manager`` goes to ``ChunkManager``."""
    interval = HIDDEN if hidden_dim is None else hidden_dim
    check_search(search_range_mb, interval, min_chunk_size_mb)
    config, total, wasted = search_chunk_configuration(
        model,
        search_range_mb,
        interval,
        min_chunk_size_mb,
        filter_exlarge_params,
        strict_ddp_flag,
        dtype=dtype,
    )
    if verbose:
        size = config[data_parallel_size(model)]["chunk_size"]
        mb = size * dtype.itemsize / MB
        get_dist_logger().info(
            f"chunks of {mb:.1f} MB for {total * dtype.itemsize / MB:.1f} MB of parameters;"
            f" {wasted * dtype.itemsize / MB:.2f} MB ({wasted / max(total + wasted, 1):.2%}) are wasted"
        )
    if manager.get("ranks") is None:
        manager["ranks"] = data_ranks(model_mesh(model), manager.get("device"))
    return ChunkManager(config, init_device, **manager)
