"""``convert_to_amp``: mixed precision for training objects, without an engine or a booster."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from colossalai.amp.amp_type import AMP_TYPE
from colossalai.amp.apex_amp import ApexOptions, apex_amp
from colossalai.amp.autocast import Criterion
from colossalai.amp.naive_amp.convert import NaiveOptions, naive_amp
from colossalai.amp.torch_amp.convert import TorchOptions, torch_amp

AmpConfig = Mapping[str, Any] | None
Options = TypeVar("Options", NaiveOptions, TorchOptions, ApexOptions)


def convert_to_torch_amp(
    model: nn.Module,
    optimizer: Optimizer | None,
    criterion: Criterion | None = None,
    amp_config: AmpConfig = None,
) -> tuple[nn.Module, Optimizer | None, Criterion | None]:
    """Autocast to fp16; ``amp_config`` holds the options of ``torch_amp.GradScaler``."""
    return torch_amp(model, optimizer, criterion, _options(TorchOptions, amp_config, AMP_TYPE.TORCH))


def convert_to_naive_amp(
    model: nn.Module, optimizer: Optimizer | None, amp_config: AmpConfig = None
) -> tuple[nn.Module, Optimizer | None]:
    """Everything in fp16, with fp32 masters; ``amp_config`` holds the fields of ``NaiveOptions``."""
    return naive_amp(model, optimizer, _options(NaiveOptions, amp_config, AMP_TYPE.NAIVE), sync_buffer=True)


def convert_to_apex_amp(
    model: nn.Module, optimizer: Optimizer | None, amp_config: AmpConfig = None
) -> tuple[nn.Module, Optimizer | None]:
    """One of the levels O0 to O3; ``amp_config`` holds the fields of ``ApexOptions``.

    The model itself is changed and returned, so that its parameters keep their names also below
    ``DistributedDataParallel``.
    """
    model, optimizer, _ = convert_to_amp(model, optimizer, None, AMP_TYPE.APEX, amp_config)
    return model, optimizer


def convert_to_amp(
    model: nn.Module,
    optimizer: Optimizer | None,
    criterion: Criterion | None,
    mode: AMP_TYPE | str,
    amp_config: AmpConfig = None,
) -> tuple[nn.Module, Optimizer | None, Criterion | None]:
    """Model, optimizer and criterion in the mixed precision ``mode``.

    Train with ``optimizer.backward(loss)``; ``optimizer.clip_grad_norm(model, max_norm)`` clips.

    Args:
        mode: also by its value, as in a config: ``"torch"``.
        amp_config: options of the mode, such as ``dict(init_scale=2**10)``.
    """
    try:
        mode = AMP_TYPE(mode)
    except ValueError:
        modes = ", ".join(map(str, AMP_TYPE))
        raise ValueError(f"convert_to_amp does not know the mode {mode!r}; it knows {modes}") from None
    if mode is AMP_TYPE.TORCH:
        return convert_to_torch_amp(model, optimizer, criterion, amp_config)
    if mode is AMP_TYPE.NAIVE:
        return *convert_to_naive_amp(model, optimizer, amp_config), criterion
    options = _options(ApexOptions, amp_config, AMP_TYPE.APEX)
    return apex_amp(model, optimizer, criterion, options, in_place=True)


def _options(kind: type[Options], config: AmpConfig, mode: AMP_TYPE) -> Options:
    given = dict(config or {})
    # the whole `fp16` section of a config may be passed on
    if given.pop("mode", mode) not in (mode, mode.value):
        given = config["mode"]  # type: ignore[index]
        raise ValueError(f"amp_config has mode={given}, but {mode} is asked for")
    known = [field.name for field in dataclasses.fields(kind)]
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{mode} has no option {', '.join(map(repr, unknown))}; it knows {', '.join(known)}")
    return kind(**given)
