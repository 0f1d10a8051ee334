"""Buffers and parameters of a module whose forward pass runs a second time.

The second run needs them as they were before the first, since it may read what it changes (the vectors of a
spectral norm, the code book of a quantizer, a moving average); and afterwards they are what they were, so
that they change once for each forward pass.  Below, a buffer is a parameter, too: code keeps such values as
either.

[Note: which buffers are copied] Most buffers are constants, and of the others most are the running statistics
of norms, which training does not read: the second run changes others in their place.  A buffer is copied only
until one run has left it alone; one that changes later is noticed by its version, and the second run is
refused, since its values are lost.  The same holds for parameters that are not trained.  Trained ones, and
those of a class that is not torch's, which a plan moves, are not copied before they were seen to change.
They may be changed in a way that makes no difference the second time (weights that are clamped, or scaled to
a norm): only if it does is it refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from colossalai.utils.written_memory import WrittenMemory, memory_of

_STATISTICS = (_BatchNorm.forward, _InstanceNorm.forward, nn.SyncBatchNorm.forward)
"""Forward passes that, in training, only write to the buffers of their module."""

_changes: WeakKeyDictionary[nn.Module, dict[tuple[str, bool], bool]] = WeakKeyDictionary()
"""Whether a run changes a buffer, by its name and whether its module is in training."""

_doubtful: WeakKeyDictionary[nn.Module, set[tuple[str, bool]]] = WeakKeyDictionary()
"""Which buffers a run changes of which it is not known whether that matters, in the same words."""


class RepeatedBuffers:
    """The buffers of ``module`` and of all that is in it, for one first run and any number of others."""

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        self._changed: list[_Changed] = []
        self._statistics: list[_Owned] = []

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Inside the block is the run that others repeat."""
        noted: list[_Noted] = []
        if self._module is not None:
            noted, self._statistics = _noted(self._module)
        written = WrittenMemory()
        with written if any(one.buffer.is_meta for one in noted) else nullcontext():
            yield
        self._changed = _changed(noted, written.memory)

    @contextmanager
    def second_run(self) -> Iterator[None]:
        """Inside the block, buffers are what they were before the first run; afterwards, what they are."""
        if lost := [one for one in self._changed if one.is_lost]:
            raise lost[0].error()
        now = [
            (one, buffer := one.own[one.name], buffer.data if one.is_moved else _copy(buffer))
            for one in self._changed
        ]
        try:
            for one in self._changed:
                one.put_back()
            with _others_in_place_of(self._statistics):
                yield
        finally:
            differing = [one for one, buffer, values in now if one.is_doubtful and _differ(buffer, values)]
            for one, buffer, values in now:
                one.own[one.name] = buffer
                if one.is_moved:
                    buffer.data = values
                else:
                    _set(buffer, values)
            if differing:
                for module, names in _doubtful.items():  # all of them, so that one step is lost, not several
                    _changes.setdefault(module, {}).update(dict.fromkeys(names, True))
                _doubtful.clear()
                raise differing[0].error()


class _Owned(NamedTuple):
    """Where a buffer is found."""

    own: dict[str, Any]
    name: str


class _Changed(NamedTuple):
    """A buffer that the first run has changed, or put another in the place of, or moved to other memory; its
    values of before, if the run may have read them.

    ``is_doubtful``: they were not kept, and may not be needed.
    """

    module: nn.Module
    own: dict[str, Any]
    name: str
    before: Tensor | None
    is_another: bool
    is_moved: bool = False
    is_lost: bool = False
    is_doubtful: bool = False

    def put_back(self) -> None:
        if self.before is None:
            return
        if self.is_another:
            self.own[self.name] = _copy(self.before)
        elif self.is_moved:  # what it shares memory with now, such as an output, stays as it is
            self.own[self.name].data = _copy(self.before).data
        else:
            _set(self.own[self.name], self.before)

    def error(self) -> RuntimeError:
        return RuntimeError(
            f"a forward pass that is computed again has changed a buffer or parameter that it had left alone"
            f" before ({self.name} of {type(self.module).__name__}), so the values it had are lost; this is"
            " known now: run the step again, from its forward pass on"
        )


class _Noted(NamedTuple):
    """A buffer before the first run; its values, if they may be needed.

    ``is_copied``: until it is known whether it changes.
    """

    module: nn.Module
    own: dict[str, Any]
    name: str
    buffer: Tensor
    kind: type[Tensor]
    version: int
    memory: int | None
    is_copied: bool
    changes: bool | None
    before: Tensor | None

    @property
    def is_left_alone(self) -> bool:
        """Told soon, since most are."""
        is_known = self.changes is False or (self.changes is None and not self.is_copied)
        is_same = self.own.get(self.name) is self.buffer and _version(self.buffer) == self.version
        return is_known and is_same and not self.buffer.is_meta

    def look(self, written: set[int]) -> _Changed | None:
        """What the first run, which is over, has done to it; on the meta device ``written`` tells that."""
        now = self.own.get(self.name)
        if now is None:
            return None
        is_another = now is not self.buffer
        if self.own is self.module._parameters and type(now) is not self.kind:
            return None  # a plan has fetched it, or let it go
        is_same = not is_another and _version(now) == self.version and written.isdisjoint(memory_of(now))
        if is_same and self.changes is None and self.before is not None:
            is_equal = _is_equal(now, self.before)
            is_same = is_equal is not False
            if is_equal is not None:
                self._learn(not is_equal)
        if is_same and not self.changes:
            return None
        before = self.before
        if before is None and is_another and _version(self.buffer) == self.version:
            before = self.buffer
        elif self.changes is None and not self.is_copied:
            if not self.buffer.is_meta:
                _doubtful.setdefault(self.module, set()).add((self.name, self.module.training))
            return _Changed(self.module, self.own, self.name, None, is_another, is_doubtful=True)
        self._learn(True)
        if now.is_meta:
            before = torch.empty_like(self.buffer)  # which is counted, as the copy is
        is_moved = not is_another and self.before is not None and _memory(now) != self.memory
        return _Changed(self.module, self.own, self.name, before, is_another, is_moved, before is None)

    def _learn(self, changes: bool) -> None:
        if not self.buffer.is_meta:
            _learn(self.module, self.name, changes)


def _learn(module: nn.Module, name: str, changes: bool) -> None:
    _changes.setdefault(module, {})[name, module.training] = changes


@contextmanager
def parameters_kept(module: nn.Module) -> Iterator[list[Tensor]]:
    """After the block, parameters of ``module`` that are not trained are what they were; gives the copies,
    which once there were runs are only of those that change.
    """
    noted = [one for one in _noted(module)[0] if one.own is one.module._parameters]
    try:
        yield [one.before for one in noted if one.before is not None]
    finally:
        for one, changed in [(one, one.look(set())) for one in noted]:
            one.own[one.name] = one.buffer
            if changed is not None and changed.before is not None:
                if changed.is_moved:
                    one.buffer.data = changed.before.data
                else:
                    _set(one.buffer, changed.before)


def _changed(noted: list[_Noted], written: set[int]) -> list[_Changed]:
    looks = (one.look(written) for one in noted if not one.is_left_alone)
    return [changed for changed in looks if changed is not None]


def _noted(module: nn.Module) -> tuple[list[_Noted], list[_Owned]]:
    """All buffers, and beside them the statistics that are only written to; ``module.modules()`` takes three
    times as long, which a small block notices.
    """
    owners: dict[int, nn.Module] = {}
    _walk(module, owners)
    found, statistics = [], []
    for owner in owners.values():
        known = _changes.get(owner, {})
        for own in (owner._buffers, owner._parameters):
            if own is owner._buffers and type(owner).forward in _STATISTICS:
                if owner.training:
                    statistics += [_Owned(own, name) for name, buffer in own.items() if buffer is not None]
                continue
            for name, buffer in own.items():
                if buffer is None:
                    continue
                kind, memory, before = type(buffer), None, None
                is_copied = own is owner._buffers or (kind is nn.Parameter and not buffer.requires_grad)
                changes = known.get((name, owner.training))
                is_needed = is_copied if changes is None else changes
                if is_needed and not buffer.is_meta:
                    memory, before = _memory(buffer), _copy(buffer)
                version = _version(buffer)
                found.append(
                    _Noted(owner, own, name, buffer, kind, version, memory, is_copied, changes, before)
                )
    return found, statistics


def _walk(module: nn.Module, owners: dict[int, nn.Module]) -> None:
    if module._buffers or module._parameters:
        owners[id(module)] = module
    for child in module._modules.values():
        if child is not None:
            _walk(child, owners)


@contextmanager
def _others_in_place_of(statistics: list[_Owned]) -> Iterator[None]:
    """Inside the block, copies of the buffers are where these were."""
    buffers = [one.own[one.name] for one in statistics]
    try:
        for one, copy in zip(statistics, _copies(buffers), strict=True):
            one.own[one.name] = copy
        yield
    finally:
        for one, buffer in zip(statistics, buffers, strict=True):
            one.own[one.name] = buffer


def _copies(buffers: list[Tensor]) -> list[Tensor]:
    """Copies, on a GPU with few kernels."""
    copies = [torch.empty_like(buffer) for buffer in buffers]
    pairs: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for copy, buffer in zip(copies, buffers, strict=True):
        into, given = pairs.setdefault((buffer.device, buffer.dtype), ([], []))
        into.append(copy)
        given.append(buffer)
    with torch.no_grad():
        for into, given in pairs.values():
            torch._foreach_copy_(into, given)
    return copies


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version


def _memory(buffer: Tensor) -> int | None:
    return buffer.data_ptr() if type(buffer) in (Tensor, nn.Parameter) else None


def _copy(buffer: Tensor) -> Tensor:
    copy = buffer.detach().clone()
    return nn.Parameter(copy, buffer.requires_grad) if isinstance(buffer, nn.Parameter) else copy


def _set(buffer: Tensor, values: Tensor) -> None:
    """Write ``values``; autograd may have kept the buffer, and need not know."""
    if not buffer.is_inference():  # nothing writes to it
        buffer.data.copy_(values)


def _differ(buffer: Tensor, before: Tensor) -> bool:
    return _is_equal(buffer, before) is False


def _is_equal(buffer: Tensor, before: Tensor) -> bool | None:
    """None where values cannot be seen, as in tracing, or only together with other ranks."""
    if type(buffer) not in (Tensor, nn.Parameter):
        return None
    try:
        return torch.equal(buffer, before)
    except (RuntimeError, NotImplementedError):
        return None
