"""Outputs of a unit that FSDP2 does not see: views that are changed in place, and what the unit writes into
its arguments.

FSDP2 gathers the weights of a unit again when the gradient of its output is known, by a hook that an
operation in place on a view loses.  Then the backward pass finds weights that are not there, and torch warns
that it may be wrong.  So the same moment is also seen where the memory of the view was made; see [Note:
outputs that change] in ``mesh.backward``.  FSDP2 also gives a unit copies of the lists and dicts among its
arguments; what the unit writes into them goes back to the caller, as outputs do.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from colossalai.booster.plugin.fsdp_lockstep import fsdp_params
from colossalai.interface.arguments import Copies
from colossalai.interface.nest import tensors
from colossalai.mesh.backward import Once, before_backward
from colossalai.mesh.uncounted_writes import is_watched, sums_of_bits

VERSION = "_colo_version"


def see_outputs(unit: nn.Module) -> None:
    """Let ``unit``, which ``fully_shard`` was applied to, gather its weights for all its outputs."""
    calls = _Calls()
    unit.register_forward_pre_hook(calls.given, prepend=True, with_kwargs=True)
    unit.register_forward_pre_hook(calls.passed, with_kwargs=True)  # after the hook of FSDP2
    unit.register_forward_hook(calls.returned, prepend=True, always_call=True)


class _Calls:
    """The calls of one unit that are under way, the last one last."""

    def __init__(self) -> None:
        self._open: list[Any] = []
        self._trained = 0  # how many of them had gradients

    def given(self, unit: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._open.append((args, kwargs))

    def passed(self, unit: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            _remember_versions(unit)
            self._trained += torch.is_grad_enabled()
            watched = torch.is_grad_enabled() and is_watched(self._trained)
            before = sums_of_bits(_gathered(unit)) if watched else None
            self._open[-1] = Copies(self._open[-1], (args, kwargs)), before

    def returned(self, unit: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        copies, before = self._open.pop()
        if not isinstance(copies, Copies):  # FSDP2 has raised
            return
        check_written([unit])
        if before is not None and not torch.equal(before, cast("Tensor", sums_of_bits(_gathered(unit)))):
            raise _written(unit)
        written = copies.hand_back()
        if torch.is_grad_enabled():
            views = [t for t in tensors(output) if t.requires_grad and t._base is not None]
            found = [*views, *(t for t in written if t.requires_grad)]
            before_backward(found, Once(partial(_gather, unit)))


def _remember_versions(unit: nn.Module) -> None:
    """How often each of the gathered weights of ``unit`` was written to, when it is first seen; FSDP2 does so
    without being counted.
    """
    for p in fsdp_params(unit):
        if (version := _version(p)) is not None and not hasattr(p, VERSION):
            setattr(p, VERSION, version)


def check_written(units: Iterable[nn.Module]) -> None:
    """Refuse writes to the gathered weights of ``units``."""
    for unit in units:
        for p in fsdp_params(unit):
            if hasattr(p, VERSION) and getattr(p, VERSION) != _version(p):
                raise _written(unit)


def _written(unit: nn.Module) -> RuntimeError:
    return RuntimeError(
        f"the forward of {type(unit).__name__}, or the script after it, has changed one of its weights in"
        " place, but TorchFSDPPlugin computes with gathered copies of them, which are let go at the end of"
        " the backward pass; change weights outside of both passes, where p is the rank's own part (p.copy_,"
        " p.data = ...), or use TorchDDPPlugin"
    )


def _gathered(unit: nn.Module) -> list[Tensor]:
    return [whole for p in fsdp_params(unit) if (whole := getattr(p, "_unsharded_param", None)) is not None]


def _version(p: Any) -> int | None:
    """None where nothing is gathered yet, or in inference mode, which does not count."""
    whole: Tensor | None = getattr(p, "_unsharded_param", None)
    return None if whole is None or whole.is_inference() else whole._version


def _gather(unit: Any) -> None:
    """Do what torch's own hook does."""
    unit._get_fsdp_state()._pre_backward(None)
