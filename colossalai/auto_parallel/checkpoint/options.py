"""Checks the options of ``auto_checkpoint``, and fills in what follows from the model's device."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from colossalai.device.presets import DEVICES, DevicePreset, device_preset
from colossalai.utils.text import bytes_of


def check_options(
    stored: int, autocast: torch.dtype | None, optimizer: Any, plugin: Any, **switches: bool
) -> None:
    """Refuse arguments of ``auto_checkpoint`` that are none; ``switches`` are true or not, by their names."""
    wrong = {
        "stored is a number of micro-batches, at least 1": (
            stored,
            isinstance(stored, int) and not isinstance(stored, bool) and stored > 0,
        ),
        "autocast is a dtype such as torch.bfloat16, or None": (
            autocast,
            autocast is None or (isinstance(autocast, torch.dtype) and autocast.is_floating_point),
        ),
        "optimizer is an optimizer of this model, not its class": (
            optimizer,
            optimizer is None or isinstance(optimizer, Optimizer),
        ),
        "plugin is a plugin of colossalai.booster": (
            plugin,
            plugin is None or hasattr(plugin, "share_of"),
        ),
    }
    wrong |= {
        f"{name} is True or False": (value, isinstance(value, bool)) for name, value in switches.items()
    }
    for what, (value, is_right) in wrong.items():
        if not is_right:
            raise ValueError(f"auto_checkpoint: {what}, got {value!r}")


def check_batch(batch: Any, criterion: Any) -> None:
    """Refuse what is no batch, and what is no loss."""
    if isinstance(batch, DataLoader) or hasattr(batch, "__next__"):
        raise ValueError(
            f"auto_checkpoint: batch is one batch, got a {type(batch).__name__}, which gives many; pass"
            " next(iter(loader))"
        )
    if isinstance(criterion, type):
        raise ValueError(
            f"auto_checkpoint: criterion is called with the output and the label, got the class"
            f" {criterion.__name__}; pass an instance, {criterion.__name__}()"
        )
    if criterion is not None and not callable(criterion):
        raise ValueError(
            f"auto_checkpoint: criterion is called with the output and the label, got {criterion!r}; pass a"
            " function or a module, or leave it out if the model returns its loss"
        )


def bytes_of_option(name: str, size: int | str) -> int:
    """The bytes that an option asks for, as a number or a text."""
    try:
        return bytes_of(size)
    except ValueError as error:
        raise ValueError(f"auto_checkpoint: {name}: {error}") from error


def preset_of(device: str | DevicePreset | None, place: torch.device) -> DevicePreset:
    """The device whose speed and kernels a plan is for: the one that was named, or that of the model."""
    if isinstance(device, DevicePreset):
        return device
    if device is not None:
        return device_preset(str(device))
    if place.type != "cuda":
        return DEVICES["cpu"]
    try:
        return device_preset(torch.cuda.get_device_name(place))
    except ValueError:
        return DEVICES["a100"]  # its times are measured


def whether_measured(measure: bool | None, place: torch.device, plugin: Any, *, compiled: bool) -> bool:
    """Whether steps are run on the GPU: by default, where the model lies there and no plugin divides it."""
    measures = (place.type == "cuda" and plugin is None) if measure is None else measure
    if measures and place.type != "cuda":
        raise ValueError(f"auto_checkpoint: measure=True needs the model on a GPU, it lies on {place}")
    if measures and plugin is not None:
        raise ValueError(
            "auto_checkpoint: measure=True runs the model as it is, and not as a plugin will hold it;"
            " leave one of the two out"
        )
    if compiled and not measures:
        raise ValueError(
            "auto_checkpoint: compiled=True compiles steps and runs them, so it needs the model on a GPU,"
            " and neither a plugin nor measure=False; without it, regions=False makes a plan that"
            " torch.compile can take, whose compiled steps may need more or less than was planned"
        )
    return measures
