"""A model on the meta device, and arguments with which it runs there: shapes without values."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

BATCH, LENGTH = 2, 8


def meta_twin(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose tensors have a shape only, without the hooks of a script."""
    memo: dict[int, Any] = {}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    twin = copy.deepcopy(model, memo)
    configs = {id(c): c for m in twin.modules() if (c := getattr(m, "config", None)) is not None}
    for config in configs.values():
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = "eager"  # the only one that returns attentions
    for module in twin.modules():
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            getattr(module, hooks).clear()  # the user's: they must not see this pass
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False  # type: ignore[assignment]
    return twin.train()


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """``model`` without dropout; every module has its own mode again afterwards."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def candidate_inputs(model: nn.Module, batch: int = BATCH, length: int = LENGTH) -> Iterator[dict[str, Any]]:
    """Arguments that ``model`` may take, on the default device, the most telling first."""
    forward = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in forward.values())
    options = {"use_cache": False, "return_dict": True}
    known = {k: v for k, v in options.items() if k in forward or takes_any}
    for inputs in _main_inputs(model, batch, length):
        if set(inputs) <= set(forward):
            yield {**inputs, **known, "output_attentions": True}
            yield {**inputs, **known}


def _main_inputs(model: nn.Module, batch: int, length: int) -> Iterator[dict[str, Any]]:
    config: Any = getattr(model, "config", None)
    ids = torch.zeros(batch, length, dtype=torch.long)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    yield {"input_ids": ids}
    yield {"input_ids": ids, "decoder_input_ids": ids}
    vision = getattr(config, "vision_config", config)
    size, channels = getattr(vision, "image_size", 224), getattr(vision, "num_channels", 3)
    if isinstance(size, (int, tuple, list)) and isinstance(channels, int):
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        images = torch.zeros(batch, channels, height, width, dtype=dtype)
        yield {"pixel_values": images}
        yield {"input_ids": ids, "pixel_values": images}
    frames = 2 * getattr(config, "max_source_positions", 0) or 100
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 80)
    sound = torch.zeros(batch, bins, frames, dtype=dtype)
    yield {"input_features": sound, "decoder_input_ids": ids}
    yield {"input_features": sound.transpose(1, 2), "decoder_input_ids": ids}
    yield {"input_features": sound}
    yield {"input_features": sound.transpose(1, 2)}
    yield {"input_values": torch.zeros(batch, 2000, dtype=dtype)}
