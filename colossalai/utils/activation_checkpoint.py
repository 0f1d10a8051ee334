"""Activation checkpointing: keep only the inputs of a function, and run it again in the backward pass.

torch does the checkpointing; this adds four things.  The inputs can wait for the backward pass in host
memory. The results of matrix products and attention, which are most of the work, can be kept, so that only
what is cheap runs again.  A function may write into its inputs.  And every random stream that the function
may draw from is put back where it was, so that dropout drops the same elements in the second run: torch's own
streams, those of Python and NumPy, one per parallel mode of ``colossalai.context.random``, those of
``colossalai.mesh.RandomStream``, and whatever else was given to ``register_random_state``.  Buffers of a
module, such as running statistics, change in the first run only, and the second one reads what that read.

[Note: functions that write into their inputs] The second run needs the inputs as they were, so they must be
copied before the first, when it is not known whether they will be written to.  A copy costs little beside a
block of a model, but not nothing: so a module that has left its inputs alone once is trusted from then on,
and torch refuses the backward pass if it writes to them later.  Functions that are made anew for every call
are never known.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from colossalai.context import random as mode_random
from colossalai.mesh.random import set_stream_positions, stream_positions
from colossalai.utils.device import cuda_in_use
from colossalai.utils.held_tensors import held, map_held
from colossalai.utils.repeated_attributes import RepeatedAttributes
from colossalai.utils.repeated_buffers import RepeatedBuffers
from colossalai.utils.written_memory import memory_of, memory_written

T = TypeVar("T")
GetState = Callable[[], Any]
SetState = Callable[[Any], None]


def checkpoint(
    function: Callable[..., Any],
    activation_offload: bool,
    *args: Any,
    use_reentrant: bool = True,
    keep_products: bool = False,
) -> Any:
    """``function(*args)``, without keeping what it computes on the way for the backward pass.

    With ``activation_offload``, the tensors among ``args`` wait for the backward pass in host memory.
    ``use_reentrant`` chooses torch's implementation.  The reentrant one sees only tensors that are arguments
    themselves; where one inside a list or dict needs a gradient, or none of the arguments does (the
    parameters may), it would lose gradients, so the other one is used.  With the other one, the function may
    change its arguments in place [Note: functions that write into their inputs].

    With ``keep_products``, the results of matrix products, convolutions and attention are kept, and only the
    rest (norms, activations, dropout) is computed again: a transformer block then keeps about 60 % of what it
    would, for almost no time.  Torch then refuses functions that change their arguments.
    """
    if not callable(function):
        raise TypeError(f"checkpoint runs a function or module, got {type(function).__name__}")
    if not isinstance(activation_offload, bool):
        raise TypeError(
            f"checkpoint(function, activation_offload, *args): activation_offload is True or False, "
            f"got {type(activation_offload).__name__}"
        )
    if not torch.is_grad_enabled():
        return function(*args)
    options: dict[str, Any] = {"use_reentrant": use_reentrant and _reentrant_is_safe(args)}
    if keep_products:
        if activation_offload:
            raise ValueError(
                "checkpoint: with keep_products=True no activation_offload; the results stay on the device"
            )
        options = {
            "use_reentrant": False,
            "context_fn": partial(_contexts_that_keep_products, _owner(function)),
        }
    if torch.compiler.is_compiling():  # the compiler repeats random numbers itself
        if keep_products:
            options["context_fn"] = _contexts_for_the_compiler
        return torch_checkpoint(function, *args, **{**options, "use_reentrant": False})
    offload = saved_tensors_hooks(_to_host, _to_device) if activation_offload else nullcontext()
    # SameRandomNumbers preserves the random state, of more streams than torch does
    options["preserve_rng_state"] = False
    copies = not options["use_reentrant"] and not keep_products and not leaves_inputs_alone(function)
    run: Callable[..., Any] = SameStructures(SameRandomNumbers(function), function, args_too=not copies)
    if copies:
        run = _SameInputs(function, run, args)
        args = run.kept
    with offload:
        return torch_checkpoint(run, *args, **options)


def register_random_state(get_state: GetState, set_state: SetState) -> None:
    """Add a random stream that a second run must repeat.

    ``get_state()`` returns a value that later draws do not change; ``set_state(value)`` goes back to it.
    """
    _random_states.append((get_state, set_state))


@contextmanager
def random_states_kept() -> Iterator[None]:
    """After the block, every random stream that a second run repeats goes on as if there had been none."""
    states = _get_states()
    try:
        yield
    finally:
        _set_states(states)


class SameRandomNumbers:
    """A function whose every call after the first draws the random numbers of the first, and then forgets it
    did.  What ``computed_once`` has computed in the first call, the others are given, and the buffers and
    attributes of its module as they were before the first.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._states: list[Any] | None = None
        self._results: list[Any] = []
        owner, _ = _owner(function)
        self._buffers, self._attributes = RepeatedBuffers(owner), RepeatedAttributes(owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._states is None:
            self._states = _get_states()
            self._attributes.first_run()
            with self._buffers.first_run(), _within(_CheckpointRun(self._results)):
                return self._function(*args, **kwargs)
        now = _get_states()
        _set_states(self._states)
        try:
            repeated = _CheckpointRun(self._results, iter(self._results))
            with self._attributes.second_run(), self._buffers.second_run(), _within(repeated):
                return self._function(*args, **kwargs)
        finally:
            _set_states(now)


class SameStructures:
    """A function whose later calls get the lists, dicts and objects of the first one as they were before it:
    what calls the function, or the function itself, may change what is in them meanwhile.  With ``args_too``
    these are positional arguments as well as keywords of a ``partial``.
    """

    def __init__(self, run: Callable[..., Any], function: Callable[..., Any], *, args_too: bool) -> None:
        self._run, self._args_too = run, args_too
        self._keywords: dict[str, Any] = function.keywords if isinstance(function, partial) else {}
        self._kept: tuple[dict[int, Any], dict[str, Any]] | None = None

    def __call__(self, *args: Any) -> Any:
        if self._kept is None:
            self._kept = (
                {i: as_it_is(v) for i, v in enumerate(args) if self._args_too and may_change(v)},
                {name: as_it_is(value) for name, value in self._keywords.items() if may_change(value)},
            )
            return self._run(*args)
        places, keywords = self._kept
        args = tuple(as_it_is(places[i]) if i in places else value for i, value in enumerate(args))
        return self._run(*args, **{name: as_it_is(value) for name, value in keywords.items()})


def may_change(value: Any) -> bool:
    """Whether ``value`` is a structure with tensors that code may take out, or put others in their place."""
    if value is None or isinstance(value, (torch.Tensor, int, float, str, torch.dtype, torch.device)):
        return False
    if type(value) is tuple:
        return any(may_change(item) for item in value)
    return next(held(value), None) is not None


def as_it_is(value: Any) -> Any:
    """The same tensors in a structure of their own."""
    return map_held(lambda tensor: tensor, value)


class _CheckpointRun(NamedTuple):
    """A run of a checkpointed function: the first, which notes ``results``, or a later one, which takes the
    next of ``again``.
    """

    results: list[Any]
    again: Iterator[Any] | None = None


_runs: ContextVar[tuple[_CheckpointRun, ...]] = ContextVar("runs of checkpointed functions", default=())


@contextmanager
def _within(run: _CheckpointRun) -> Iterator[None]:
    before = _runs.set((*_runs.get(), run))
    try:
        yield
    finally:
        _runs.reset(before)


def computed_once(function: Callable[[], T]) -> T:
    """``function()``, or what it gave in the first run of the checkpoint around it.

    For decisions that a second run must not take anew, such as which expert a token goes to, and for messages
    that it need not send again.  They have no gradient.
    """
    runs = _runs.get()
    repeated = next((place for place, run in enumerate(runs) if run.again is not None), None)
    again = None if repeated is None else runs[repeated].again
    result: T = function() if again is None else next(again)
    for run in runs[0 if repeated is None else repeated + 1 :]:
        run.results.append(result)  # of checkpoints inside of one that is run again, these are first runs
    return result


def is_computed_again() -> bool:
    """Whether this is a forward pass that is run again for a backward pass."""
    return torch._C._current_graph_task_id() != -1


def is_repeated() -> bool:
    """Whether this is a run that is given what ``computed_once`` computed in the first one; checkpoints of
    torch give nothing.
    """
    return any(run.again is not None for run in _runs.get())


class _SameInputs:
    """A function whose first call gets ``args``, and every later one copies of what they were before.

    ``kept`` are these copies; torch saves them, and gives them to the later calls.
    """

    def __init__(self, function: Callable[..., Any], run: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._function, self._run = function, run
        self._given: tuple[Any, ...] | None = args
        self._writes = self._is_first = True
        self._differentiates = False
        self.kept: tuple[Any, ...] = tree_map(_copy, args)
        self._needs_grad = [
            leaf.requires_grad for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)
        ]

    def __call__(self, *kept: Any) -> Any:
        if self._given is None:
            self._differentiates |= self._is_first  # in the midst of the first call
            needs_grad = iter(self._needs_grad)
            kept = tree_map_only(torch.Tensor, lambda leaf: _needing(leaf, next(needs_grad)), kept)
            return self._run(*(tree_map_only(torch.Tensor, _writable, kept) if self._writes else kept))
        given, self._given, self.kept = self._given, None, ()
        before = [tensor._version for tensor in _writable_leaves(given)]
        result = self._run(*given)
        self._writes = before != [tensor._version for tensor in _writable_leaves(given)]
        self._is_first = False
        owner, method = _owner(self._function)
        if owner is not None and not self._writes:
            _alone.setdefault(owner, set()).add(method)
        if owner is not None and self._differentiates:
            _differentiating.setdefault(owner, set()).add(method)
        return result


def _may_be_written(tensor: torch.Tensor) -> bool:
    # autograd refuses to change a leaf that needs a gradient; of a class of tensors we know nothing
    is_fixed = tensor.is_leaf and tensor.requires_grad
    return type(tensor) is torch.Tensor and not is_fixed and not tensor.is_inference()


def _writable_leaves(args: tuple[Any, ...]) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor) and _may_be_written(leaf)]


def _copy(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return as_it_is(tensor) if may_change(tensor) else tensor
    if not _may_be_written(tensor):
        return tensor
    # where there are no values, the memory itself is kept, which `dry_run` counts; a copy needs no gradient
    # yet, since the graph would then hold it on the device, also when it is offloaded
    return tensor.data if tensor.device.type == "meta" else tensor.detach().clone()


def _needing(kept: torch.Tensor, needs_grad: bool) -> torch.Tensor:
    """``kept`` as the function had it in the first run."""
    return kept if kept.requires_grad == needs_grad else kept.detach().requires_grad_(needs_grad)


def _writable(kept: torch.Tensor) -> torch.Tensor:
    """A copy for one more run; not a leaf, which autograd would not let it change."""
    return kept if isinstance(kept, torch.nn.Parameter) else kept.clone()


def _owner(function: Callable[..., Any]) -> tuple[torch.nn.Module | None, Any]:
    """The module that lives from call to call, and its method, if ``function`` is one."""
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, torch.nn.Module):
        return function, None
    owner = getattr(function, "__self__", None)
    return (owner if isinstance(owner, torch.nn.Module) else None), getattr(function, "__func__", None)


def leaves_inputs_alone(function: Callable[..., Any]) -> bool:
    """Whether ``function`` is a method of a module that was seen not to write into its inputs."""
    owner, method = _owner(function)
    return owner is not None and method in _alone.get(owner, ())


def may_keep_nothing(function: Callable[..., Any]) -> bool:
    """Whether ``function`` leaves its inputs alone, and was not seen to compute gradients, for which it needs
    in the first run already what it has kept.
    """
    owner, method = _owner(function)
    return leaves_inputs_alone(function) and method not in _differentiating.get(owner, ())  # type: ignore[arg-type]


_alone: WeakKeyDictionary[torch.nn.Module, set[Any]] = WeakKeyDictionary()
_differentiating: WeakKeyDictionary[torch.nn.Module, set[Any]] = WeakKeyDictionary()


@cache
def _products() -> frozenset[Any]:
    names = [
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "_scaled_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    ]
    return frozenset(getattr(torch.ops.aten, name).default for name in names)


def _keep_products(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operation in _products()
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts_for_the_compiler() -> Any:
    return create_selective_checkpoint_contexts(_keep_products)


def _contexts_that_keep_products(owner: tuple[torch.nn.Module | None, Any]) -> Any:
    # Not torch's: they want every operation of the second run to be one of the first, but between the two a
    # plan may have moved weights, which are fetched by other operations.
    kept, (module, method) = _Products(), owner
    needed = _needed.setdefault(module, {}) if module is not None else {}
    return _KeepProducts(kept, needed.get(method)), _ReuseProducts(kept, needed, method)


_needed: WeakKeyDictionary[torch.nn.Module, dict[Any, int]] = WeakKeyDictionary()
"""How many of its products the second run of a method has asked for: it ends when all is there that the
backward pass needs, so the last product of a block, which is only added to something, is not needed.
"""


_again: ContextVar[bool] = ContextVar("computed again", default=False)


@contextmanager
def computed_again() -> Iterator[None]:
    """Inside the block, ``keep_products`` keeps nothing: for a function that computes a result in many parts,
    or in place.
    """
    before = _again.set(True)
    try:
        yield
    finally:
        _again.reset(before)


class _Kept(NamedTuple):
    """A result of ``operation``, and the versions of its tensors."""

    operation: Any
    result: Any
    versions: list[int]


class _Products:
    """The results of products of the first run, how many products there were, and the memory that the first
    run has written to, also by views whose writes versions do not count (as torch's GRU does on a CPU).
    """

    def __init__(self) -> None:
        self.results: list[_Kept] = []
        self.count = 0
        self.memory: set[int] = set()
        self.written: set[int] = set()

    def is_changed(self, kept: _Kept) -> bool:
        """Whether a result is no longer what it was."""
        return _versions(kept.result) != kept.versions or not self.written.isdisjoint(memory_of(kept.result))


class _KeepProducts(TorchDispatchMode):
    """Keeps the results of products in the first run, of the first ``needed`` ones if that is known."""

    supports_higher_order_operators = True

    def __init__(self, kept: _Products, needed: int | None) -> None:
        super().__init__()
        self.kept, self.needed = kept, needed

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether a compiled function inside may run; its products are computed again."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.kept.memory:
            self.kept.written |= self.kept.memory & memory_written(func, args, kwargs)
        result = func(*args, **(kwargs or {}))
        if func not in _products() or _again.get():
            return result
        self.kept.count += 1
        if self.needed is None or self.kept.count <= self.needed:
            # with the key that lets both count the same versions; below autograd it is excluded
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                detached = tree_map_only(torch.Tensor, torch.Tensor.detach, result)
            self.kept.results.append(_Kept(func, detached, _versions(result)))
            self.kept.memory |= memory_of(detached)
        return result


class _ReuseProducts(TorchDispatchMode):
    """Gives the second run the results of the first in the place of products."""

    supports_higher_order_operators = True

    def __init__(self, kept: _Products, needed: dict[Any, int], method: Any) -> None:
        super().__init__()
        self.kept, self.next = kept, 0
        self._needed, self._method = needed, method

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        self.next = 0  # a backward pass through a graph that was retained
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _products() or _again.get():
            return func(*args, **(kwargs or {}))
        results = self.kept.results
        self._needed[self._method] = max(self._needed.get(self._method, 0), self.next + 1)
        if len(results) <= self.next < self.kept.count:
            self.next += 1
            return func(*args, **(kwargs or {}))  # others have not needed it
        if self.next == self.kept.count or results[self.next].operation is not func:
            raise RuntimeError(
                f"checkpoint(keep_products=True): the second run computes {func}, which the first run did not"
                " compute at this place; a function that is run again must take the same way both times"
            )
        kept = results[self.next]
        self.next += 1
        if self.kept.is_changed(kept):
            raise RuntimeError(
                f"checkpoint(keep_products=True): the result of {func} was changed in place after it had been"
                " kept; use the operation that is not in place, or keep no products (mode 'full')"
            )
        return kept.result


def _versions(result: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _reentrant_is_safe(args: tuple[Any, ...]) -> bool:
    leaves = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    direct = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad]
    return 0 < len(direct) == len(leaves)


class _Shape(NamedTuple):
    """A tensor without values, on a host whose memory is not counted."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def _to_host(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor | _Shape]:
    if tensor.device.type == "cpu":
        return tensor.device, tensor
    if tensor.is_meta:
        return tensor.device, _Shape(tensor.size(), tensor.stride(), tensor.dtype)
    if tensor.device.type != "cuda" or type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
        return tensor.device, tensor.cpu()
    host = torch.empty_like(
        tensor, device="cpu", pin_memory=True
    )  # keeps the strides, and so the same kernels
    host.copy_(tensor, non_blocking=True)
    return tensor.device, host


def _to_device(packed: tuple[torch.device, torch.Tensor | _Shape]) -> torch.Tensor:
    device, tensor = packed
    if isinstance(tensor, _Shape):
        return torch.empty_strided(tensor.size, tensor.stride, dtype=tensor.dtype, device=device)
    return tensor.to(device, non_blocking=True)


def _get_states() -> list[Any]:
    return [get_state() for get_state, _ in _random_states]


def _set_states(states: list[Any]) -> None:
    # Backwards: torch's streams come last, because changing the parallel mode reads and writes them. A stream
    # that was registered after the first run has no state to go back to.
    for (_, set_state), state in reversed(list(zip(_random_states, states, strict=False))):
        set_state(state)


def _get_torch_state() -> tuple[torch.Tensor, list[torch.Tensor]]:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if cuda_in_use() else []


def _set_torch_state(state: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    cpu, cuda = state
    torch.set_rng_state(cpu)
    torch.cuda.set_rng_state_all(cuda)


class _NumpyState(NamedTuple):
    """The state of NumPy's global generator, and the memory of its numbers, by which it is known again."""

    numbers: bytes
    whole: Any


_numpy_state = _NumpyState(b"", None)


def _get_numpy_state() -> _NumpyState:
    """NumPy takes 0.25 ms to tell its state, and seldom has another one than in the block before."""
    global _numpy_state
    numbers = _numpy_numbers()
    if not numbers or numbers != _numpy_state.numbers:
        _numpy_state = _NumpyState(numbers, np.random.get_state())
    return _numpy_state


def _set_numpy_state(state: _NumpyState) -> None:
    if not state.numbers or state.numbers != _numpy_numbers():
        np.random.set_state(state.whole)


def _numpy_numbers() -> bytes:
    """The 624 numbers of a Mersenne twister and its position; nothing for other generators."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    is_twister = isinstance(generator, np.random.MT19937)
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4) if is_twister else b""


def _get_mode_states() -> tuple[Any, dict[Any, torch.Tensor]] | None:
    if not mode_random.get_seeds():  # not launched
        return None
    return mode_random.get_current_mode(), mode_random.get_states(copy=True)


def _set_mode_states(state: tuple[Any, dict[Any, torch.Tensor]] | None) -> None:
    if state is None:
        return
    mode, states = state
    mode_random.set_mode(mode)
    for each, its_state in states.items():
        mode_random.set_seed_states(each, its_state)


_random_states: list[tuple[GetState, SetState]] = [
    (_get_torch_state, _set_torch_state),
    (random.getstate, random.setstate),
    (_get_numpy_state, _set_numpy_state),
    (_get_mode_states, _set_mode_states),
    (stream_positions, set_stream_positions),
]
