"""A model on the meta device, and arguments with which it runs there: shapes without values."""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import CellType
from typing import Any

import torch
from torch import nn

from colossalai.mesh._compat import without_modes
from colossalai.nn.policies.cutting.adapters import base_of
from colossalai.nn.policies.cutting.experts import leave_experts_out

BATCH, LENGTH = 2, 8
CACHED = type(lru_cache(lambda: None))  # functions with a cache


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
    detach_from_script(twin)
    leave_experts_out(twin)
    return twin.train()


def detach_from_script(twin: nn.Module) -> None:
    """Remove from a copy of modules what would reach the script, or the modules themselves, when it runs."""
    for module in twin.modules():
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            getattr(module, hooks).clear()
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False  # type: ignore[assignment]


@contextmanager
def looking_at(model: nn.Module, device: str = "meta") -> Iterator[None]:
    """The code of ``model`` may be run on ``device``, by copies: nothing of it is left behind.

    Code may keep tensors that it has made in caches of functions (BEiT keeps an index of positions), which
    the model itself must not find.
    """
    with without_modes(), torch.random.fork_rng(devices=[]), torch.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            _clear_caches(model)


def _clear_caches(model: nn.Module) -> None:
    classes = {c for m in model.modules() for c in type(m).__mro__ if not c.__module__.startswith("torch.")}
    files = {sys.modules.get(c.__module__) for c in classes} - {None, sys.modules["builtins"]}
    functions = [value for holder in (*classes, *files) for value in vars(holder).values()]
    functions += [value for module in model.modules() for value in vars(module).values()]
    for function in functions:
        function = getattr(function, "__func__", function) if isinstance(function, staticmethod) else function
        cells = (function.__closure__ or ()) if inspect.isfunction(function) else ()
        for cached in (function, *(cell.cell_contents for cell in cells if _is_filled(cell))):
            if isinstance(cached, CACHED):
                cached.cache_clear()


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that its function has not set yet
        return False


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
    forward = inspect.signature(base_of(model).forward).parameters  # that of a PeftModel may name none
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in forward.values())
    options = {"use_cache": False, "return_dict": True}
    known = {k: v for k, v in options.items() if k in forward or takes_any}
    asked = [p.name for p in forward.values() if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    for inputs in (*_main_inputs(model, batch, length), *_images(model, batch, asked)):
        if set(inputs) <= set(forward):
            yield {**inputs, **known, "output_attentions": True}
            yield {**inputs, **known}


def _images(model: nn.Module, batch: int, asked: list[str]) -> Iterator[dict[str, Any]]:
    """Images for a model without a config, such as those of timm and torchvision, that ``asked`` for one
    argument.
    """
    if hasattr(model, "config") or len(asked) != 1:
        return
    patches, known = getattr(model, "patch_embed", None), getattr(model, "default_cfg", None) or {}
    sizes = (getattr(patches, "img_size", None), getattr(model, "image_size", None))
    channels, *form = known.get("input_size") or (3, 224, 224)
    for size in (*sizes, tuple(form)):
        if isinstance(size, (int, tuple)) and size:
            height, width = size if isinstance(size, tuple) else (size, size)
            yield {asked[0]: torch.zeros(batch, channels, height, width, dtype=_dtype(model))}


def _dtype(model: nn.Module) -> torch.dtype | None:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def _main_inputs(model: nn.Module, batch: int, length: int) -> Iterator[dict[str, Any]]:
    config: Any = getattr(model, "config", None)
    ids = torch.zeros(batch, length, dtype=torch.long)
    dtype = _dtype(model)
    yield {"input_ids": ids}
    yield {"input_ids": ids, "decoder_input_ids": ids}
    vision = getattr(config, "vision_config", config)
    size, channels = getattr(vision, "image_size", 224), getattr(vision, "num_channels", 3)
    if isinstance(size, (int, tuple, list)) and isinstance(channels, int):
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        images = torch.zeros(batch, channels, height, width, dtype=dtype)
        yield {"pixel_values": images}
        yield {"input_ids": ids, "pixel_values": images}
        shots = getattr(vision, "num_frames", None)
        if isinstance(shots, int):
            yield {"pixel_values": torch.zeros(batch, shots, channels, height, width, dtype=dtype)}
    frames = 2 * getattr(config, "max_source_positions", 0) or 100
    bins = int(getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", None) or 80)
    sound = torch.zeros(batch, bins, frames, dtype=dtype)
    yield {"input_features": sound, "decoder_input_ids": ids}
    yield {"input_features": sound.transpose(1, 2), "decoder_input_ids": ids}
    yield {"input_features": sound}
    yield {"input_features": sound.transpose(1, 2)}
    columns = getattr(config, "max_length", None)
    if isinstance(columns, int) and hasattr(config, "num_mel_bins"):  # a spectrogram that is cut into patches
        yield {"input_values": torch.zeros(batch, columns, bins, dtype=dtype)}
    yield {"input_values": torch.zeros(batch, 2000, dtype=dtype)}
