"""Buffers of a module whose forward pass runs a second time.

The second run needs them as they were before the first, since it may read what it changes (the vectors of a
spectral norm, the code book of a quantizer, a moving average); and afterwards they are what they were, so
that they change once for each forward pass.

[Note: which buffers are copied] Most buffers are constants, and of the others most are the running statistics
of norms, which training does not read.  So a buffer is copied only until one run has left it alone; one that
changes later is noticed by its version, and the second run is refused, since its values are lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

_STATISTICS = (_BatchNorm.forward, _InstanceNorm.forward, nn.SyncBatchNorm.forward)
"""Forward passes that, in training, only write to the buffers of their module."""

_changes: WeakKeyDictionary[nn.Module, dict[tuple[str, bool], bool]] = WeakKeyDictionary()
"""Whether a run changes a buffer, by its name and whether its module is in training."""


class RepeatedBuffers:
    """The buffers of ``module`` and of all that is in it, for one first run and any number of others."""

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        self._changed: list[_Changed] = []

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Inside the block is the run that others repeat."""
        noted = [] if self._module is None else [_Noted.of(*place) for place in _places(self._module)]
        yield
        self._changed = [changed for one in noted if (changed := one.look()) is not None]

    @contextmanager
    def second_run(self) -> Iterator[None]:
        """Inside the block, buffers are what they were before the first run; afterwards, what they are."""
        if lost := [f"{one.name} of {type(one.module).__name__}" for one in self._changed if one.is_lost]:
            raise RuntimeError(
                f"a forward pass that is computed again has changed a buffer that it had left alone before"
                f" ({lost[0]}), so the values it had are lost; this is known now: run the step again, from"
                " its forward pass on"
            )
        now = [(one, buffer := one.module._buffers[one.name], _copy(buffer)) for one in self._changed]
        try:
            for one in self._changed:
                one.put_back()
            yield
        finally:
            for one, buffer, values in now:
                one.module._buffers[one.name] = buffer
                _set(buffer, values)


class _Changed(NamedTuple):
    """A buffer that the first run has changed, or put another in the place of; its values of before, if the
    run may have read them.
    """

    module: nn.Module
    name: str
    before: Tensor | None
    is_another: bool
    is_lost: bool = False

    def put_back(self) -> None:
        if self.before is None:
            return
        if self.is_another:
            self.module._buffers[self.name] = _copy(self.before)
        else:
            _set(self.module._buffers[self.name], self.before)


class _Noted(NamedTuple):
    """A buffer before the first run; its values, if they may be needed."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    changes: bool | None
    before: Tensor | None

    @classmethod
    def of(cls, module: nn.Module, name: str, buffer: Tensor) -> _Noted:
        changes = _changes.get(module, {}).get((name, module.training))
        is_needed = changes is not False and not _is_statistic(module) and not buffer.is_meta
        return cls(module, name, buffer, _version(buffer), changes, _copy(buffer) if is_needed else None)

    def look(self) -> _Changed | None:
        """What the first run, which is over, has done to it."""
        now = self.module._buffers.get(self.name)
        if now is None:
            return None
        if _is_statistic(self.module):
            if not self.module.training:
                return None
            return _Changed(self.module, self.name, None, now is not self.buffer)
        is_same = now is self.buffer and _version(now) == self.version
        if is_same and self.changes is None and self.before is not None:
            is_equal = _is_equal(now, self.before)
            is_same = is_equal is not False
            if is_equal is not None:
                self._learn(not is_equal)
        if is_same and not self.changes:
            return None
        self._learn(True)
        before = self.before
        if now.is_meta:
            before = torch.empty_like(self.buffer)  # which is counted, as the copy is
        elif before is None and now is not self.buffer and _version(self.buffer) == self.version:
            before = self.buffer
        return _Changed(self.module, self.name, before, now is not self.buffer, before is None)

    def _learn(self, changes: bool) -> None:
        if not self.buffer.is_meta:
            _changes.setdefault(self.module, {})[self.name, self.module.training] = changes


def _places(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """All buffers; ``module.modules()`` takes three times as long, which a small block notices."""
    owners: dict[int, nn.Module] = {}
    _walk(module, owners)
    return [
        (owner, name, buffer)
        for owner in owners.values()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]


def _walk(module: nn.Module, owners: dict[int, nn.Module]) -> None:
    if module._buffers:
        owners[id(module)] = module
    for child in module._modules.values():
        if child is not None:
            _walk(child, owners)


def _is_statistic(module: nn.Module) -> bool:
    return type(module).forward in _STATISTICS


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version


def _copy(buffer: Tensor | None) -> Tensor:
    assert buffer is not None
    return buffer.detach().clone()


def _set(buffer: Tensor | None, values: Tensor) -> None:
    """Write ``values``; autograd may have kept the buffer, and need not know."""
    assert buffer is not None
    if not buffer.is_inference():  # nothing writes to it
        buffer.data.copy_(values)


def _is_equal(buffer: Tensor, before: Tensor) -> bool | None:
    """None where values cannot be seen, as in tracing, or only together with other ranks."""
    if type(buffer) is not Tensor:
        return None
    try:
        return torch.equal(buffer, before)
    except (RuntimeError, NotImplementedError):
        return None
