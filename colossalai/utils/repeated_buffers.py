"""Buffers and parameters of a module whose forward pass runs a second time.

The second run needs them as they were before the first, since it may read what it changes (the vectors of a
spectral norm, the code book of a quantizer, a moving average); and afterwards they are what they were, so
that they change once for each forward pass.  Where others were given in their place for a while, as
``torch.func.functional_call`` does, the second run gets these.  Below, a buffer is a parameter, too, or a
tensor that is a plain attribute: code keeps such values as either.

[Note: which buffers are copied] Most buffers are constants, and of the others most are the running statistics
of norms, of which there are copies in any case.  What else a module changes is learned: its first run is
watched, operation by operation, and a buffer is copied right before one writes to it, whether torch counts
that write (``p.mul_``) or not (``p.data.mul_``).  From then on those that change are copied before each first
run, and the others are left alone.  If a module begins to change one later, torch's count of its writes
tells, and the second run is refused, since the old values are lost; for writes that are not counted, the
2nd, 4th, 8th ... run is watched again.
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

from colossalai.utils.repeated_attributes import has_own_code, modules_of
from colossalai.utils.written_memory import CopiedBeforeWrites, pieces_of, same_memory

_STATISTICS = (_BatchNorm.forward, _InstanceNorm.forward, nn.SyncBatchNorm.forward)
"""Forward passes that, in training, write to all buffers of their module."""

_changes: WeakKeyDictionary[nn.Module, dict[tuple[str, bool], bool]] = WeakKeyDictionary()
"""Whether a run changes a buffer, by its name and whether its module is in training."""

_results: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""Attributes of which a run reads no old value, but puts there what it has computed: to keep the old ones
would take memory.
"""

_runs: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""How many first runs of a module there were."""


class RepeatedBuffers:
    """The buffers of ``module`` and of all that is in it, for one first run and any number of others."""

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        self._changed: list[_Changed] = []
        self._given: list[_Owned] = []
        self._statistics: list[_Owned] = []

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Inside the block is the run that others repeat."""
        if self._module is None:
            yield
            return
        count = _runs[self._module] = _runs.get(self._module, 0) + 1
        noted, statistics = _noted(self._module, watches=count & (count - 1) == 0)
        copies = _copies([one.tensor for one in statistics])
        self._statistics = [one._replace(tensor=copy) for one, copy in zip(statistics, copies, strict=True)]
        watch = _WatchedRun([one for one in noted if one.is_watched])
        with watch if watch.noted else nullcontext():
            yield
        seen = watch.seen()
        for one in noted:
            changed = None if one.is_left_alone else one.look(seen.get(id(one), _Seen()))
            if changed is not None:
                self._changed.append(changed)
            elif not one.is_attribute and one.kind in (Tensor, nn.Parameter):
                self._given.append(_Owned(one.own, one.name, one.buffer))

    @contextmanager
    def second_run(self) -> Iterator[None]:
        """Inside the block, buffers are what they were before the first run; afterwards, what they are."""
        if lost := [one for one in self._changed if one.before is None]:
            raise lost[0].error()
        given = [one for one in self._given if one.is_replaced]
        statistics = zip(self._statistics, _copies([one.tensor for one in self._statistics]), strict=True)
        others = [*given, *(one._replace(tensor=copy) for one, copy in statistics)]
        now = [
            (one, buffer := one.own[one.name], buffer.data if one.is_moved else _copy(buffer))
            for one in self._changed
        ]
        try:
            for one in self._changed:
                one.put_back()
            with _in_place(others):
                yield
        finally:
            for one, buffer, values in now:
                one.own[one.name] = buffer
                if one.is_moved:
                    buffer.data = values
                else:
                    _set(buffer, values)


class _Owned(NamedTuple):
    """A tensor, and where it is found."""

    own: dict[str, Any]
    name: str
    tensor: Tensor

    @property
    def is_replaced(self) -> bool:
        """Whether another is there; one of another class is that of a plan."""
        now = self.own.get(self.name)
        return now is not self.tensor and type(now) in (Tensor, nn.Parameter)


class _Changed(NamedTuple):
    """A buffer that the first run has changed, or put another in the place of, or moved to other memory; its
    values of before, unless they are lost.
    """

    module: nn.Module
    own: dict[str, Any]
    name: str
    before: Tensor | None
    is_another: bool
    is_moved: bool = False

    def put_back(self) -> None:
        assert self.before is not None
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
    """A buffer before the first run.

    ``changes``: whether runs change it, if that is known; then ``before`` has its values.  ``memory`` tells
    whether it is moved, which plans do with what is trained.
    """

    module: nn.Module
    own: dict[str, Any]
    name: str
    buffer: Tensor
    kind: type[Tensor]
    version: int
    changes: bool | None
    memory: int | None = None
    before: Tensor | None = None
    is_watched: bool = False

    @property
    def is_left_alone(self) -> bool:
        """Told soon, since most are."""
        is_known = self.changes is False and not self.is_watched
        return is_known and self.own.get(self.name) is self.buffer and _version(self.buffer) == self.version

    @property
    def is_attribute(self) -> bool:
        return self.own is vars(self.module)

    def look(self, seen: _Seen) -> _Changed | None:
        """What the first run, which is over, has done to it."""
        now = self.own.get(self.name)
        if not isinstance(now, Tensor):
            return None
        if self.own is self.module._parameters and type(now) is not self.kind:
            return None  # a plan has fetched it, or let it go
        is_another = now is not self.buffer
        is_moved = not is_another and self.memory is not None and _memory(now) != self.memory
        is_written = seen.copy is not None or _version(self.buffer) != self.version
        if not (is_another or is_moved or is_written or self.changes):
            self._learn(False)
            return None
        if self.is_attribute and not seen.is_read and not is_written and not self.changes:
            _results.setdefault(self.module, set()).add(self.name)
            return None
        self._learn(True)
        before = self.before
        if before is None and seen.copy is not None:
            before = _like(self.buffer, seen.copy)
        if before is None and not is_written:
            before = self.buffer if is_another else seen.alias
        return _Changed(self.module, self.own, self.name, before, is_another, is_moved)

    def _learn(self, changes: bool) -> None:
        known = _changes.setdefault(self.module, {})
        if changes or not self.buffer.is_meta:  # where there are no values, other branches may be taken
            known[self.name, self.module.training] = changes


class _WatchedRun(CopiedBeforeWrites):
    """Copies what was noted before it is written to, and notes which attributes operations take."""

    def __init__(self, noted: list[_Noted]) -> None:
        super().__init__(one.buffer for one in noted)
        self.noted = noted
        self._read: set[int] = set()
        self._looks_at_reads = any(one.is_attribute for one in noted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._looks_at_reads:
            self._read |= self.touched(pieces_of((args, kwargs)))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def seen(self) -> dict[int, _Seen]:
        """What was seen, by the ``id`` of what was noted."""
        return {
            id(one): _Seen(self.aliases[place], self.copies.get(place), place in self._read)
            for place, one in enumerate(self.noted)
        }


class _Seen(NamedTuple):
    """The memory of a buffer that was watched, its values if it was written to, and whether it was read."""

    alias: Tensor | None = None
    copy: Tensor | None = None
    is_read: bool = False


@contextmanager
def parameters_kept(module: nn.Module) -> Iterator[list[Tensor]]:
    """After the block, parameters of ``module`` are what they were, but for trained ones of which it is not
    known that they change without their optimizer; gives the copies.
    """
    noted = [one for one in _noted(module, watches=False)[0] if one.own is one.module._parameters]
    kept = [
        (one, one.before if one.before is not None else _copy(one.buffer))
        for one in noted
        if one.changes or (one.changes is None and one.memory is not None)
    ]
    try:
        yield [before for _, before in kept]
    finally:
        for one, before in kept:
            one.own[one.name] = one.buffer
            if one.memory is not None and _memory(one.buffer) != one.memory:
                one.buffer.data = before.data
            elif _version(one.buffer) != one.version or one.changes or not torch.equal(one.buffer, before):
                _set(one.buffer, before)


def _noted(module: nn.Module, *, watches: bool) -> tuple[list[_Noted], list[_Owned]]:
    """All buffers, and beside them the statistics of norms."""
    found: list[_Noted] = []
    statistics: list[_Owned] = []
    for owner in modules_of(module):
        known = _changes.get(owner, {})
        for own in (owner._buffers, owner._parameters):
            if own is owner._buffers and type(owner).forward in _STATISTICS:
                if owner.training:
                    statistics += [_Owned(own, name, t) for name, t in own.items() if t is not None]
                continue
            for name, buffer in own.items():
                if buffer is not None:
                    changes = known.get((name, owner.training))
                    found.append(_note(owner, own, name, buffer, changes, watches))
        if has_own_code(owner):
            results = () if watches else _results.get(owner, ())
            for name, value in vars(owner).items():
                if isinstance(value, Tensor) and name not in results:
                    changes = known.get((name, owner.training))
                    found.append(_note(owner, vars(owner), name, value, changes, watches))
    return found, statistics


def _note(
    owner: nn.Module, own: dict[str, Any], name: str, buffer: Tensor, changes: bool | None, watches: bool
) -> _Noted:
    kind, version = type(buffer), _version(buffer)
    if changes is False and not watches and not buffer.is_meta:
        return _Noted(owner, own, name, buffer, kind, version, changes)
    may_move = kind in (Tensor, nn.Parameter) and not (own is owner._parameters and buffer.requires_grad)
    memory = buffer.data_ptr() if may_move else None
    if changes:
        return _Noted(owner, own, name, buffer, kind, version, changes, memory, _copy(buffer))
    is_watched = bool(pieces_of(buffer))
    return _Noted(owner, own, name, buffer, kind, version, changes, memory, None, is_watched)


@contextmanager
def _in_place(others: list[_Owned]) -> Iterator[None]:
    """Inside the block, ``others`` are where they are found; afterwards, what was there."""
    buffers = [one.own[one.name] for one in others]
    try:
        for one in others:
            one.own[one.name] = one.tensor
        yield
    finally:
        for one, buffer in zip(others, buffers, strict=True):
            one.own[one.name] = buffer


def _copies(buffers: list[Tensor]) -> list[Tensor]:
    """Copies, on a GPU with few kernels."""
    if not any(buffer.is_cuda for buffer in buffers):
        return [_copy(buffer) for buffer in buffers]
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


def _copy(values: Tensor) -> Tensor:
    return _like(values, same_memory(values).clone())


def _like(buffer: Tensor, copy: Tensor) -> Tensor:
    """``copy``, as a parameter if ``buffer`` is one."""
    return nn.Parameter(copy, buffer.requires_grad) if isinstance(buffer, nn.Parameter) else copy


def _set(buffer: Tensor, values: Tensor) -> None:
    """Write ``values``; autograd may have kept the buffer, and need not know."""
    if not buffer.is_inference():  # nothing writes to it
        with torch._C.DisableTorchFunctionSubclass():
            buffer.data.copy_(values)
