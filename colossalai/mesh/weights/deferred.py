"""Models that are described first and get memory later, in part or whole, with the values they would have
had.

Inside ``with Deferred() as recording`` large tensors are made on the meta device, and what a constructor does
to them is written down.  ``recording.materialize(module)`` then repeats this for the tensors of ``module``
alone.  The values are those that the same code gives without ``Deferred``, bit for bit: a random operation is
repeated with the generator as it was, and meanwhile the generator moves on as if it had been run.

So a rank that needs a part of a model never holds another part:

- a random operation of torch takes its time on every rank, and memory for one tensor while it runs;
- an initializer of ``colossalai.nn`` takes one number from the generator, and nothing else.

What a script does to such tensors after the block is written down too: their class
(:mod:`colossalai.mesh.weights.unfilled`) brings each operation here.

[Note: views] Tensors are known by their storage: a view of a deferred tensor needs no entry, and writing
through it is an entry for the storage.  Meta storages have no memory but an identity, and are kept so that no
other takes their place.

[Note: one storage at a time] ``fill`` repeats what one storage depends on, hands it over and forgets the
rest, so beyond the result there is memory for the tensors that one weight is made from.  What is written over
as a whole is not computed before: of a layer that its model draws again, one drawing is repeated.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from colossalai.mesh._compat import plain_torch
from colossalai.mesh.weights.unfilled import REFUSED, Unfilled, become, live_tensors, set_class, why_refused

# Smaller tensors are made at once: counters, indices, rates that a constructor reads.
LARGE = 4096

_aten = torch.ops.aten
# In place, and whatever was there before does not matter.
_OVERWRITING = frozenset(
    [
        _aten.normal_.default,
        _aten.uniform_.default,
        _aten.zero_.default,
        _aten.fill_.Scalar,
        _aten.copy_.default,
    ]
)

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _View:
    """A tensor by its storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _View:
        with plain_torch():
            return cls(
                storage_of(tensor),
                tuple(tensor.shape),
                tensor.stride(),
                int(tensor.storage_offset()),
                tensor.dtype,
            )

    @property
    def nbytes(self) -> int:
        """How far the tensor reaches in its storage."""
        steps = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return (self.offset + steps + 1) * self.dtype.itemsize if 0 not in self.size else 0

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class _Given:
    """A tensor with values, which must not change before it is used again."""

    tensor: Tensor
    version: int


@dataclass(frozen=True)
class _Entry:
    """One operation: ``func(*args, **kwargs)`` with tensors as ``_View`` or ``_Given``."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    writes: frozenset[int]
    reads: frozenset[int]
    makes: tuple[int | None, ...] = ()
    state: tuple[torch.Generator, Tensor] | None = None
    overwrites: int | None = None


def storage_of(tensor: Tensor) -> int:
    with plain_torch():
        return tensor.untyped_storage()._cdata


class Deferred:
    """Record how the tensors of at least ``large`` elements made inside are filled; ``materialize`` fills
    them.

    Inside, these tensors name the device where they will lie.  Where a constructor reads values (``.item()``,
    ``if x.any()``), they are computed, and forgotten again.
    """

    active: ClassVar[list[Deferred]] = []
    pauses: ClassVar[int] = 0

    def __init__(self, large: int = LARGE) -> None:
        self.large = large
        self._log: list[_Entry] = []
        self._writers: dict[int, list[int]] = {}
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._devices: dict[int, torch.device] = {}
        self._real: dict[int, torch.UntypedStorage] = {}
        self._classes: dict[type, type] = {}
        self._scratch = _Scratch()

    def __enter__(self) -> Deferred:
        self._modes = (_Describe(self), _AsReal(self))
        self._enter()
        return self

    def __exit__(self, *details: Any) -> None:
        self._exit(*details)
        for tensor in live_tensors():
            self._mark(tensor)

    def _enter(self) -> None:
        self.active.append(self)
        for mode in self._modes:
            mode.__enter__()

    def _exit(self, *details: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*details)
        self.active.remove(self)
        self._scratch = _Scratch()

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Inside, go on recording, as inside the block itself."""
        if self in self.active:
            yield
        else:
            with self:
                yield

    # Before the tensors have memory

    def holds(self, tensor: Tensor) -> bool:
        with plain_torch():
            return tensor.layout is torch.strided and storage_of(tensor) in self._kept

    def device_of(self, tensor: Tensor) -> torch.device:
        """Where a deferred tensor will lie."""
        return self._devices[storage_of(tensor)]

    def later(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a script does to a deferred tensor after the block."""
        if func == _SET_DATA and not all(map(self.holds, args)):
            return self._set_data(*args)
        if self in self.active:
            with plain_torch():
                out = func(*args, **kwargs)
        elif func in REFUSED:
            raise why_refused(func)
        elif func is Tensor.to and any(isinstance(x, str | torch.device) and _is_meta(x) for x in args[1:]):
            return self.later(torch.empty_like, args[:1], {"device": "meta"})
        elif _is_meta(kwargs.get("device") or "cpu"):
            with plain_torch():  # a shape and no more
                return func(*args, **kwargs)
        else:
            with self._again(), plain_torch():
                out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._mark(tensor)
        return out

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        """``tensor.data = value``, where one of them has memory: ``tensor`` has it then too."""
        if isinstance(tensor, Unfilled):
            become(tensor, value.detach())
        else:
            tensor.data = self.values(value)

    @contextmanager
    def _again(self) -> Iterator[None]:
        self._enter()
        try:
            yield
        finally:
            self._exit(None, None, None)

    def _mark(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Unfilled) and self.holds(tensor):
            set_class(tensor, self, self._classes)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation: describe it if its tensors are deferred, or are to be."""
        if Deferred.pauses:
            return func(*args, **kwargs)
        with paused(), plain_torch():
            return self._call(func, args, kwargs)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner = next((found for t in _written(func, args, kwargs) if (found := recording_of(t))), self)
        if owner is not self:
            return owner._call(func, args, kwargs)
        args, kwargs = tree_map(self._foreign_values, (args, kwargs))
        deferred = any(self.holds(t) for t in _tensors((args, kwargs)))
        if _device(kwargs).type == "meta":
            # asked for where a deferred tensor lies: torch itself does so for the 1 of ``weight[0] = 1``
            kwargs, deferred = {**kwargs, "device": torch.device("cpu")}, True
        if not deferred and not self._makes_large(func, args, kwargs):
            return func(*args, **kwargs)
        written = [self.holds(t) for t in _written(func, args, kwargs)]
        meta = tree_map(
            lambda x: x.to("meta") if isinstance(x, Tensor) else x, (args, _on_meta(func, kwargs))
        )
        try:
            if written and not all(written):
                raise RuntimeError("a tensor with values is written to")
            out = func(*meta[0], **meta[1])
        except (NotImplementedError, RuntimeError) as error:
            if any(written):
                raise RuntimeError(
                    f"a model is built without memory, and its constructor calls {func}, which cannot be"
                    f" postponed: {error}. Build the model without this context instead"
                ) from error
            values = tree_map(lambda x: self.values(x) if isinstance(x, Tensor) else x, (args, kwargs))
            return func(*values[0], **values[1])
        self._record(func, args, kwargs, out)
        return out

    def values(self, tensor: Tensor) -> Tensor:
        """A deferred tensor's values as they are now; another tensor itself."""
        if not self.holds(tensor):
            return tensor
        view = _View.of(tensor)
        with self._filled(view.storage) as real:
            return view.on(real)

    def _foreign_values(self, item: Any) -> Any:
        """The values of a tensor that another recording fills."""
        other = recording_of(item) if isinstance(item, Tensor) else None
        return item if other is None or other is self else other.values(item)

    def _makes_large(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether ``func`` makes a large tensor from nothing, or from a shape on the meta device."""
        if not _has_device(func) or not all(t.is_meta for t in _tensors((args, kwargs))):
            return False
        return any(out.numel() >= self.large for out in _tensors(func(*args, **_on_meta(func, kwargs))))

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        inputs = _tensors((args, kwargs))
        held = {storage_of(t): self.device_of(t) for t in inputs if self.holds(t)}
        device = next(iter(held.values()), torch.device("cpu"))
        if kwargs.get("device") is not None:
            device = _device(kwargs)
        made: list[int | None] = []
        for tensor in _tensors(out):
            key = storage_of(tensor)
            made.append(None if key in self._kept else key)
            self._kept.setdefault(key, tensor.untyped_storage())
            self._devices.setdefault(key, device)
        writes = {storage_of(t) for t in _written(func, args, kwargs)} | {k for k in made if k is not None}
        if not writes:
            return  # a view
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = _move_on(func, args, kwargs, device, self._scratch)
        named = tree_map(lambda x: self._name(x) if isinstance(x, Tensor) else x, (args, kwargs))
        over = storage_of(args[0]) if func in _OVERWRITING and _is_all(args[0]) else None
        self._append(
            _Entry(func, named[0], named[1], frozenset(writes), frozenset(held), tuple(made), state, over)
        )

    def _append(self, entry: _Entry) -> None:
        for key in entry.writes:
            self._writers.setdefault(key, []).append(len(self._log))
        self._log.append(entry)

    def _name(self, tensor: Tensor) -> _View | _Given:
        if self.holds(tensor):
            return _View.of(tensor)
        # a small one may change meanwhile: it was no part of the model
        kept = tensor.detach().clone() if tensor.numel() < LARGE else tensor
        return _Given(kept, kept._version)

    def note(self, tensor: Tensor, fill: Callable[[Tensor], Any]) -> None:
        """Write down that ``fill`` is called with the real form of ``tensor``, all of which it writes."""
        view, key = _View.of(tensor), storage_of(tensor)
        over = key if _is_all(tensor) else None
        self._append(_Entry(fill, (view,), {}, frozenset([key]), frozenset([key]), (), None, over))

    def make(self, shape: Sequence[int], dtype: torch.dtype, read: Callable[[], Tensor]) -> Tensor:
        """A tensor without memory whose values ``read`` gives, in memory of their own."""
        with paused():
            tensor = torch.empty(shape, dtype=dtype, device="meta")
        key = storage_of(tensor)
        self._kept[key], self._devices[key] = tensor.untyped_storage(), torch.device("cpu")
        self._append(_Entry(read, (), {}, frozenset([key]), frozenset(), (key,)))
        return tensor

    # Memory and values

    def materialize(self, module: nn.Module) -> nn.Module:
        """Give the parameters, buffers and other tensors of ``module`` memory and values, in place."""
        self.fill(tensors_of(module))
        return module

    def fill(self, tensors: Iterable[Tensor]) -> None:
        """Give those of ``tensors`` that are deferred memory and values, one storage after the other; what is
        tied stays tied.
        """
        by_storage: dict[int, dict[int, Tensor]] = {}
        for tensor in tensors:
            if self.holds(tensor):
                by_storage.setdefault(storage_of(tensor), {})[id(tensor)] = tensor
        for key, users in by_storage.items():
            with self._filled(key) as real:
                for tensor in users.values():
                    become(tensor, _View.of(tensor).on(real))

    def is_filled(self, tensor: Tensor) -> bool:
        """Whether anything was written to ``tensor`` since it was made."""
        return len(self._writers[storage_of(tensor)]) > 1

    def pending(self, tensor: Tensor) -> Callable[[], Tensor]:
        """A function that computes the values of ``tensor``, which may be given other memory meanwhile."""
        view = _View.of(tensor)

        def values() -> Tensor:
            with self._filled(view.storage) as real:
                return view.on(real)

        return values

    @contextmanager
    def _filled(self, key: int) -> Iterator[torch.UntypedStorage]:
        """The storage ``key`` with the values it has by now; all else that they are made from is gone
        afterwards.
        """
        before, self._real = self._real, {}
        try:
            with torch.no_grad(), paused(), plain_torch():
                for number in self._needed(key):
                    self._repeat(self._log[number])
                yield self._real.pop(key)
        finally:
            self._real = before

    def _needed(self, key: int) -> list[int]:
        """The numbers of the entries that the storage ``key`` depends on, in their order."""
        chosen: set[int] = set()
        waiting: list[int] = []  # a heap, the latest first

        def need(storage: int, before: int) -> None:
            numbers = self._writers.get(storage, [])
            for number in reversed(numbers[: bisect_left(numbers, before)]):
                if number not in chosen:
                    chosen.add(number)
                    heapq.heappush(waiting, -number)
                if self._log[number].overwrites == storage:
                    break

        need(key, len(self._log))
        while waiting:
            number = -heapq.heappop(waiting)
            entry = self._log[number]
            for storage in entry.reads - {entry.overwrites}:
                need(storage, number)
            for storage in entry.writes - entry.reads - {entry.overwrites}:
                need(storage, number)
        return sorted(chosen)

    def _repeat(self, entry: _Entry) -> None:
        over = entry.overwrites
        if over is not None and over not in self._real:
            size = self._kept[over].nbytes()
            self._real[over] = torch.UntypedStorage(size, device=self._devices[over])
        args, kwargs = tree_map(self._value, (entry.args, entry.kwargs))
        if entry.state is None:
            out = entry.func(*args, **kwargs)
        else:
            generator, state = entry.state
            now = generator.get_state()
            generator.set_state(state)
            out = entry.func(*args, **kwargs)
            generator.set_state(now)
        if entry.makes:
            for key, tensor in zip(entry.makes, _tensors(out), strict=True):
                if key is not None:
                    self._real[key] = tensor.untyped_storage()

    def _value(self, item: Any) -> Any:
        if isinstance(item, _View):
            return item.on(self._real[item.storage])
        if isinstance(item, _Given):
            if item.tensor._version != item.version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(item.tensor.shape)} that a deferred model was filled from has"
                    " changed since; give the model a clone of it"
                )
            return item.tensor
        return item


@contextmanager
def paused() -> Iterator[None]:
    """Inside, operations are run and not recorded."""
    Deferred.pauses += 1
    try:
        yield
    finally:
        Deferred.pauses -= 1


def recording_of(tensor: Tensor) -> Deferred | None:
    """The recording that will fill ``tensor``, which has no memory now; None for any other tensor."""
    if isinstance(tensor, Unfilled):
        return tensor.recording
    return next((d for d in reversed(Deferred.active) if d.holds(tensor)), None)


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Every tensor that the modules hold, as parameters, buffers or attributes."""
    for owner in module.modules():
        for where in (owner._parameters, owner._buffers, vars(owner)):
            # modules are visited by themselves, and their lists may hold anything
            values = [v for name, v in where.items() if name not in ("_parameters", "_buffers", "_modules")]
            yield from _tensors(values)


def recording_in(module: nn.Module) -> Deferred | None:
    """The recording that will fill tensors of ``module``; None if all have memory."""
    return next((found for t in tensors_of(module) if (found := recording_of(t)) is not None), None)


def resumed(module: nn.Module) -> AbstractContextManager[None]:
    """Inside, what is made of tensors without memory of ``module`` has none either."""
    recording = recording_in(module)
    return nullcontext() if recording is None else recording.resumed()


def fill_deferred(tensors: Iterable[Tensor]) -> None:
    """Give those of ``tensors`` that were built without memory their memory and values, in place."""
    by_recording: dict[Deferred, list[Tensor]] = {}
    for tensor in tensors:
        if (recording := recording_of(tensor)) is not None:
            by_recording.setdefault(recording, []).append(tensor)
    for recording, found in by_recording.items():
        recording.fill(found)


def fill_beside_parameters(module: nn.Module) -> None:
    """Give the buffers and other tensors of ``module`` memory and values, and leave its parameters as they
    are.
    """
    fill_deferred(t for t in tensors_of(module) if not isinstance(t, nn.Parameter))


def states_of(optimizer: Optimizer) -> list[Tensor]:
    """The tensors that ``optimizer`` keeps beside parameters; some have them from the beginning."""
    return _tensors(list(optimizer.state.values()))


def materialize(module: nn.Module) -> nn.Module:
    """Give all tensors of ``module`` that were built without memory their memory and values, in place.

    Parameters stay the objects that they are, so that an optimizer that holds them trains them.
    """
    fill_deferred(tensors_of(module))
    return module


def _tensors(nest: Any) -> list[Tensor]:
    return [x for x in tree_flatten(nest)[0] if isinstance(x, Tensor)]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Tensor]:
    """The arguments that ``func`` writes to."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[i] if i < len(args) else kwargs.get(argument.name))


def _has_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _on_meta(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device("meta"), "pin_memory": False} if _has_device(func) else kwargs


def _is_meta(device: str | torch.device) -> bool:
    return torch.device(device).type == "meta"


def _device(kwargs: dict[str, Any]) -> torch.device:
    return torch.device(kwargs.get("device") or "cpu")


def _move_on(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, memory: _Scratch
) -> tuple[torch.Generator, Tensor]:
    """The generator and its state before ``func``, which is then run on tensors that are thrown away."""
    generator = kwargs.get("generator")
    if generator is None:
        at = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
        generator = torch.cuda.default_generators[at] if device.type == "cuda" else torch.default_generator
    before = generator.get_state()
    thrown_away = iter(memory.like(_tensors((args, kwargs)), device))
    scratch = tree_map(lambda x: next(thrown_away) if isinstance(x, Tensor) else x, (args, kwargs))
    func(*scratch[0], **scratch[1])
    return generator, before


class _Scratch:
    """Memory for the tensors of one operation after the other, whose values are thrown away.

    Were it freed each time, the C library would keep it: states of generators, which stay, lie above it.
    """

    def __init__(self) -> None:
        self._storages: list[torch.UntypedStorage] = []

    def like(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        # strided alike: torch draws contiguous tensors by another method
        views = [_View(0, tuple(t.shape), t.stride(), 0, t.dtype) for t in tensors]
        return [view.on(self._storage(i, view.nbytes, device)) for i, view in enumerate(views)]

    def _storage(self, number: int, size: int, device: torch.device) -> torch.UntypedStorage:
        old = self._storages[number : number + 1]
        if not old or old[0].nbytes() < size or old[0].device != device:
            self._storages[number : number + 1] = [torch.UntypedStorage(size, device=device)]
        return self._storages[number]


def _is_all(tensor: Tensor) -> bool:
    """Whether ``tensor`` is all of its storage."""
    with plain_torch():
        size = tensor.numel() * tensor.element_size()
        return tensor.is_contiguous() and size == tensor.untyped_storage().nbytes()


class _Describe(TorchDispatchMode):
    """Gives every operation to the recording."""

    def __init__(self, recording: Deferred) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.recording.call(func, args, kwargs or {})


# What would show that a deferred tensor has no memory, and what it says instead.
_PRETENCES: dict[Any, Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda device: device,
    Tensor.is_meta.__get__: lambda device: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
}
_READERS = (Tensor.tolist, Tensor.numpy)


class _AsReal(TorchFunctionMode):
    """Lets deferred tensors pass for what they will be: torch's initializers, for one, do nothing on meta."""

    def __init__(self, recording: Deferred) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _PRETENCES and not Deferred.pauses and self.recording.holds(args[0]):
            return _PRETENCES[func](self.recording.device_of(args[0]))
        if func in _READERS and not Deferred.pauses:
            args = (self.recording.values(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))
