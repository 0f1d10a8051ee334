"""Models that are described first and get memory later, in part or whole, with the values they would have
had.

Inside ``with Deferred() as recording`` large tensors are made on the meta device, and what a constructor does
to them is written down.  ``recording.materialize(module)`` then repeats this for the tensors of ``module``
alone.  The values are those that the same code gives without ``Deferred``, bit for bit: a random operation is
repeated with the generator as it was, and meanwhile the generator moves on as if it had been run.

So a rank that needs a part of a model never holds another part:

- a random operation of torch takes its time on every rank, and memory for one tensor while it runs;
- an initializer of ``colossalai.nn`` takes one number from the generator, and nothing else.

[Note: views] Tensors are known by their storage: a view of a deferred tensor needs no entry, and writing
through it is an entry for the storage.  Meta storages have no memory but an identity, and are kept so that no
other takes their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from colossalai.mesh.initial import _like

# Smaller tensors are made at once: counters, indices, rates that a constructor reads.
LARGE = 4096


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
        return cls(
            storage_of(tensor),
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
        )

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


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Deferred:
    """Record how the tensors of at least ``large`` elements made inside are filled; ``materialize`` fills
    them.

    Inside, these tensors name the device where they will lie.  Where a constructor reads values (``.item()``,
    ``if x.any()``), they are computed, and forgotten again.
    """

    active: ClassVar[list[Deferred]] = []

    def __init__(self, large: int = LARGE) -> None:
        self.large = large
        self._log: list[_Entry] = []
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._devices: dict[int, torch.device] = {}
        self._real: dict[int, torch.UntypedStorage] = {}
        self._modes = (_Describe(self), _AsReal(self))

    def __enter__(self) -> Deferred:
        self.active.append(self)
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*details)
        self.active.remove(self)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and storage_of(tensor) in self._kept

    def device_of(self, tensor: Tensor) -> torch.device:
        """Where a deferred tensor will lie."""
        return self._devices[storage_of(tensor)]

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation: describe it if its tensors are deferred, or are to be."""
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
                    f" postponed: {error}. Build the whole model and cut it with"
                    " colossalai.builder.build_pipeline_model instead"
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
        self._fill({view.storage})
        real = view.on(self._real[view.storage])
        self._real.clear()
        return real

    def _makes_large(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether ``func`` makes a large tensor from nothing."""
        if not _has_device(func) or _tensors((args, kwargs)):
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
            state = _move_on(func, args, kwargs, device)
        named = tree_map(lambda x: self._name(x) if isinstance(x, Tensor) else x, (args, kwargs))
        self._log.append(
            _Entry(func, named[0], named[1], frozenset(writes), frozenset(held), tuple(made), state)
        )

    def _name(self, tensor: Tensor) -> _View | _Given:
        return _View.of(tensor) if self.holds(tensor) else _Given(tensor, tensor._version)

    def note(self, tensor: Tensor, fill: Callable[[Tensor], Any]) -> None:
        """Write down that ``fill`` is called with the real form of ``tensor``."""
        view, key = _View.of(tensor), frozenset([storage_of(tensor)])
        self._log.append(_Entry(fill, (view,), {}, key, key))

    def materialize(self, module: nn.Module) -> nn.Module:
        """Give the parameters, buffers and other tensors of ``module`` memory and values, in place."""
        slots = list(_slots(module))
        self._fill({storage_of(t) for _, _, t in slots if self.holds(t)})
        new: dict[int, Tensor] = {}
        for where, name, old in slots:
            if not self.holds(old):
                continue
            if id(old) not in new:  # what is tied stays tied
                view = _View.of(old)
                value = view.on(self._real[view.storage])
                new[id(old)] = _like(old, value) if isinstance(old, nn.Parameter) else value
            where[name] = new[id(old)]
        self._real.clear()
        return module

    def _fill(self, needed: set[int]) -> None:
        """Repeat what the storages ``needed`` depend on."""
        needed, chosen = set(needed), []
        for entry in reversed(self._log):
            if entry.writes & needed:
                needed |= entry.reads
                chosen.append(entry)
        with torch.no_grad():
            for entry in reversed(chosen):
                self._repeat(entry)

    def _repeat(self, entry: _Entry) -> None:
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


def recording_of(tensor: Tensor) -> Deferred | None:
    """The recording that will fill ``tensor``, which has no memory now; None for any other tensor."""
    return next((d for d in reversed(Deferred.active) if d.holds(tensor)), None)


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


def _device(kwargs: dict[str, Any]) -> torch.device:
    return torch.device(kwargs.get("device") or "cpu")


def _move_on(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[torch.Generator, Tensor]:
    """The generator and its state before ``func``, which is then run on tensors that are thrown away."""
    generator = kwargs.get("generator")
    if generator is None:
        at = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
        generator = torch.cuda.default_generators[at] if device.type == "cuda" else torch.default_generator
    before = generator.get_state()
    scratch = tree_map(lambda x: _scratch(x, device) if isinstance(x, Tensor) else x, (args, kwargs))
    func(*scratch[0], **scratch[1])
    return generator, before


def _scratch(tensor: Tensor, device: torch.device) -> Tensor:
    # strided alike: torch draws contiguous tensors by another method
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _slots(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Every tensor that the modules hold, with the dict and the name it lies under."""
    for owner in module.modules():
        for where in (owner._parameters, owner._buffers, vars(owner)):
            for name, value in where.items():
                if isinstance(value, Tensor):
                    yield where, name, value


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
        if func in _PRETENCES and self.recording.holds(args[0]):
            return _PRETENCES[func](self.recording.device_of(args[0]))
        if func in _READERS:
            args = (self.recording.values(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))
