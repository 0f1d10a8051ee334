"""Hooks around the forward and the backward pass of modules: they fetch weights in time.

A module's own parameters are accessed before its forward pass and released after it; again before its
backward pass, which begins with the first node behind its outputs (see ``mesh.backward``), and released when
it is over.  Recomputation (activation checkpointing, in both of its forms) is a forward pass as any other.  A
module that reads a parameter of another one, as ``nn.MultiheadAttention`` does, is noticed when it asks the
other for it: the dict in which modules keep their parameters tells us.

[Note: the end of a backward pass]
The backward pass of a call is over, and its weights can be released, at the first of these moments:

- all of its parameters are trained and have their gradients, so nothing that uses them is left;
- some are frozen: the others have their gradients, and the gradients of its inputs are known;
- it is a linear layer, which is one node of the graph: the gradient of its input is known (its weight may be
  tied, and wait for more);
- the backward pass begins of a call that had ended before this one began: autograd goes through a graph in
  reverse order;
- the end of the backward pass it belongs to; reentrant checkpointing has one for each segment, inside the
  whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from colossalai.mesh import own_grad
from colossalai.mesh._compat import at_end_of_task, current_task
from colossalai.mesh.backward import before_backward, when_known
from colossalai.mesh.uncounted_writes import is_watched, sums_of_bits
from colossalai.utils.activation_checkpoint import is_repeated
from colossalai.utils.held_tensors import tensors_in, tensors_of
from colossalai.zero.gemini.chunk import Chunk, ParamSlot
from colossalai.zero.gemini.chunk_filling import lost_write
from colossalai.zero.gemini.manager import GeminiManager

OF_TORCH = frozenset(vars(nn.Module()))


def put_away(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors with a backward pass among the attributes of ``module``, as losses of routers are."""
    for name, value in vars(module).items():
        if isinstance(value, Tensor) and value.requires_grad and name not in OF_TORCH:
            yield value


def without_weights(output: Any, chunks: Iterable[Chunk]) -> Any:
    """Return ``output`` with copies in the place of weights and their views, which may be evicted."""
    wholes = {chunk.flat.untyped_storage().data_ptr() for chunk in chunks if chunk.present}
    aliases = [t for t in tensors_in(output) if t.untyped_storage().data_ptr() in wholes]
    if not aliases:
        return output
    ids = set(map(id, aliases))
    return tree_map_only(Tensor, lambda t: t.clone() if id(t) in ids else t, output)


def _bits(slot: ParamSlot) -> Tensor:
    found = sums_of_bits([slot.param])
    assert found is not None
    return found


@dataclass(eq=False)
class HookedModule:
    """A module with hooks, and the parameters that its forward pass reads."""

    name: str
    slots: list[ParamSlot] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    moving: tuple[Chunk, ...] = ()  # those of its chunks that come and go
    simple: bool = False  # one node of the graph
    trained: int = 0  # calls with gradients

    def __deepcopy__(self, memo: dict[int, Any]) -> HookedModule:
        return self  # a copy of the model must not copy its chunks; see ``without_hooks``

    def add(self, slot: ParamSlot, chunk: Chunk) -> None:
        self.slots.append(slot)
        if chunk not in self.chunks:
            self.chunks.append(chunk)
        self.refresh()

    def refresh(self) -> None:
        self.moving = tuple(c for c in self.chunks if not c.resident)


@dataclass(eq=False)
class ModuleCall:
    """One forward pass of a module, and the backward pass that belongs to it."""

    unit: HookedModule
    begin: int
    end: int = 0
    inputs: int = 0  # whose gradients are not known yet; counted only where some parameters are frozen
    given: list[tuple[Tensor, int]] = field(
        default_factory=list
    )  # the inputs, and how often each had been written to
    waiting: set[ParamSlot] = field(default_factory=set)
    task: int = -1  # the backward pass for which its weights are held
    bits: dict[ParamSlot, Tensor] | None = None  # sums of its weights as they came, where they are compared


class WatchedParameters(dict[str, Any]):
    """The parameters of a module; calls ``touch`` when one is read."""

    def __init__(self, values: dict[str, Any], touch: Callable[[nn.Parameter], None]) -> None:
        super().__init__(values)
        self.touch = touch

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        if isinstance(param, nn.Parameter):  # what was computed from one may stand in its place during a call
            self.touch(param)
        return param

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # a copy is an ordinary dict


class ModuleHooks:
    """Installs and answers all hooks of one model.

    ``on_grad(chunk, slot)`` is called when the gradient of a parameter is done, ``on_end()`` when a backward
    pass is over.
    """

    def __init__(
        self,
        module: nn.Module,
        manager: GeminiManager,
        on_grad: Callable[[Chunk, ParamSlot], None],
        on_end: Callable[[], None],
    ) -> None:
        self.manager, self.on_grad, self.on_end = manager, on_grad, on_end
        self.chunks = manager.chunk_manager
        self.units: list[HookedModule] = []
        self.stack: list[ModuleCall] = []
        self.held: dict[ModuleCall, None] = {}
        self.in_backward = False
        self._clock = 0
        self._outermost = -1
        self._handles: list[Any] = []
        self._modules = weakref.WeakKeyDictionary[nn.Module, HookedModule]()
        touch = partial(_touch, weakref.ref(self))
        for name, child in module.named_modules():
            own = [p for p in child._parameters.values() if p is not None and self.chunks.holds(p)]
            if own or any(True for _ in child.children()):
                self._hook(name or type(module).__name__, child, own)
            if own:
                child._parameters = WatchedParameters(child._parameters, touch)
        for chunk in self.chunks.chunks:
            for slot in chunk.slots:
                if slot.trained:
                    grad_hook = partial(_after_grad, weakref.ref(self))
                    self._handles.append(slot.param.register_post_accumulate_grad_hook(grad_hook))

    def _hook(self, name: str, module: nn.Module, own: list[nn.Parameter]) -> None:
        unit = HookedModule(name, simple=type(module) is nn.Linear)
        for param in own:
            unit.add(self.chunks.get_slot(param), self.chunks.get_chunk(param))
        self.units.append(unit)
        self._modules[module] = unit
        before = partial(_before_forward, weakref.ref(self), unit)
        after = partial(_after_forward, weakref.ref(self), unit)
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def refresh(self) -> None:
        """Look again which chunks come and go: some have got other homes."""
        for unit in self.units:
            unit.refresh()

    # Forward

    def before_forward(self, unit: HookedModule, inputs: Any) -> None:
        self._clock += 1
        call = ModuleCall(unit, self._clock)
        self.stack.append(call)
        if torch.is_grad_enabled():
            call.given = [(tensor, tensor._version) for tensor in tensors_in(inputs)]
        if not unit.moving:
            return
        self.manager.access(unit.moving, unit.slots, call, unit.name)
        if torch.is_grad_enabled():
            unit.trained += 1
            call.bits = {} if is_watched(unit.trained) else None
            self._note_bits(call, unit.slots)
        if unit.simple or not all(slot.trained for slot in unit.slots):
            for tensor, _ in call.given:
                if tensor.requires_grad:
                    call.inputs += 1
                    when_known(tensor, partial(_input_done, weakref.ref(self), call))

    def after_forward(self, unit: HookedModule, module: nn.Module, output: Any) -> Any:
        """Release weights, and watch for the backward pass; return what the module returns."""
        while self.stack:  # a call that an exception ended has been left on top
            call = self.stack.pop()
            if call.unit is unit:
                break
            self._release(call)
        else:
            return output
        self._clock += 1
        call.end = self._clock
        given, call.given = call.given, []
        if not unit.moving:
            return output
        output = without_weights(output, unit.moving)
        if torch.is_grad_enabled():
            written = [tensor for tensor, version in given if tensor._version != version]
            found = tensors_of((output, written)), put_away(module)
            before_backward(chain(*found), partial(_before_backward, weakref.ref(self), call))
        changed = [slot for slot, bits in (call.bits or {}).items() if not torch.equal(bits, _bits(slot))]
        self._release(call)
        if changed:
            raise lost_write(changed[0], self.chunks.get_chunk(changed[0].param))
        return output

    def _note_bits(self, call: ModuleCall, slots: Iterable[ParamSlot]) -> None:
        if call.bits is not None:
            call.bits.update({slot: _bits(slot) for slot in slots if slot.moves and slot not in call.bits})

    def _release(self, call: ModuleCall) -> None:
        self.manager.release(call.unit.moving, call.unit.slots, call)

    def touch(self, param: nn.Parameter) -> None:
        """Access ``param``, which is read while the innermost call on the stack runs."""
        if not self.stack:
            if is_repeated():
                self._touch_again(param)
            return
        call = self.stack[-1]
        chunk, slot = self.chunks.get_chunk(param), self.chunks.get_slot(param)
        if chunk.resident or call in slot.users:
            return
        if slot not in call.unit.slots:
            call.unit.add(slot, chunk)
        self.manager.access([chunk], [slot], call, call.unit.name)
        self._note_bits(call, [slot])

    def _touch_again(self, param: nn.Parameter) -> None:
        """Access ``param`` until it has its gradient: a block that is computed again reads it.

        The weights of a block that runs again alone are there, since its backward pass begins with that.  Of
        several blocks that run again together, only the last has its own.
        """
        chunk, slot = self.chunks.get_chunk(param), self.chunks.get_slot(param)
        task = current_task()
        if chunk.resident or slot.users or task == -1:
            return
        unit = HookedModule(slot.name)
        unit.add(slot, chunk)
        call = ModuleCall(unit, 0, task=task, waiting={slot} if slot.trained else set())
        self.held[call] = None
        self.manager.access(unit.moving, unit.slots, call, f"the second forward pass with {slot.name}")

    # Backward

    def watch(self, output: Any) -> None:
        """Watch for the backward pass of ``output``, that of the whole model."""
        before_backward(tensors_of(output), partial(_begin_backward, weakref.ref(self)))

    def begin_backward(self) -> None:
        if not self.in_backward:
            self.in_backward = True
            self.manager.begin_backward()
            self._outermost = current_task()
            at_end_of_task(partial(_end, weakref.ref(self), self._outermost))

    def before_backward(self, call: ModuleCall) -> None:
        if torch.is_grad_enabled():  # the graph of this pass would hold weights that leave with its end
            raise RuntimeError(
                f"the backward pass of {call.unit.name} was asked for with create_graph=True, but Gemini lets"
                " its weights go after it; use ZeRO stage 1 or 2 for gradients of gradients"
            )
        self.begin_backward()
        task = current_task()
        if call.task == task:
            return
        if task != self._outermost and not any(c.task == task for c in self.held):
            at_end_of_task(partial(_end, weakref.ref(self), task))
        for other in [c for c in self.held if c.task == task and call.end < c.begin]:
            self._end_call(other)
        call.task = task
        call.waiting = {slot for slot in call.unit.slots if slot.trained}
        self.held[call] = None
        self.manager.access(call.unit.moving, call.unit.slots, call, f"the backward pass of {call.unit.name}")

    def _end_call(self, call: ModuleCall) -> None:
        del self.held[call]
        self._release(call)

    def input_done(self, call: ModuleCall) -> None:
        call.inputs -= 1
        if call in self.held and not call.inputs and (call.unit.simple or not call.waiting):
            self._end_call(call)

    def after_grad(self, chunk: Chunk, slot: ParamSlot) -> None:
        self.begin_backward()
        grad = own_grad(slot.param)
        if grad is not None and grad.layout != torch.strided:
            raise TypeError(
                f"Gemini takes dense gradients, got one in layout {grad.layout} of {slot.name!r}; build its"
                " layer with sparse=False"
            )
        if grad is not None:
            self.on_grad(chunk, slot)

    def gradient_taken(self, slot: ParamSlot) -> None:
        """Release the weights of calls whose backward pass is over with this gradient."""
        for call in [c for c in self.held if slot in c.waiting]:
            call.waiting.discard(slot)
            if not call.waiting and (call.inputs <= 0 or all(s.trained for s in call.unit.slots)):
                self._end_call(call)

    def end(self, task: int) -> None:
        """End a backward pass: the whole, or a part of it."""
        whole = task == self._outermost
        for call in [c for c in self.held if whole or c.task == task]:
            self._end_call(call)
        if whole:
            self.in_backward = False
            self.stack.clear()
            self.manager.end_backward()
            self.on_end()

    def reset(self) -> None:
        """Release everything after an exception."""
        for call in [*self.stack, *self.held]:
            self._release(call)
        self.stack.clear()
        self.held.clear()
        self.in_backward = False
        self.manager.agreement.forget()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for module in self._modules:
            if isinstance(module._parameters, WatchedParameters):
                module._parameters = dict(module._parameters)


def without_hooks(copied: nn.Module) -> nn.Module:
    """Remove our hooks, which would move the chunks of the original, from a deep copy of a model."""
    for module in copied.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(hook, partial) and hook.func in (_before_forward, _after_forward):
                    del hooks[key]
    return copied


# Hooks belong to the model's parts, to which ModuleHooks refers: they have a weak reference, so that a model
# can be freed.

Weak = Callable[[], "ModuleHooks | None"]


def _before_forward(weak: Weak, unit: HookedModule, module: nn.Module, args: Any, kwargs: Any) -> None:
    hooks = weak()
    if hooks is not None:
        hooks.before_forward(unit, (args, kwargs))


def _after_forward(weak: Weak, unit: HookedModule, module: nn.Module, args: Any, output: Any) -> Any:
    hooks = weak()
    return output if hooks is None else hooks.after_forward(unit, module, output)


def _begin_backward(weak: Weak, grads: Any) -> None:
    hooks = weak()
    if hooks is not None:
        hooks.begin_backward()


def _before_backward(weak: Weak, call: ModuleCall, grads: Any) -> None:
    hooks = weak()
    if hooks is not None:
        hooks.before_backward(call)


def _input_done(weak: Weak, call: ModuleCall, grads: Any) -> None:
    hooks = weak()
    if hooks is not None:
        hooks.input_done(call)


def _after_grad(weak: Weak, param: nn.Parameter) -> None:
    # Python does not look into hooks of parameters for cycles, so they must hold nothing that holds the
    # parameter
    hooks = weak()
    if hooks is not None:
        hooks.after_grad(hooks.chunks.get_chunk(param), hooks.chunks.get_slot(param))


def _touch(weak: Weak, param: nn.Parameter) -> None:
    hooks = weak()
    if hooks is not None:
        hooks.touch(param)


def _end(weak: Weak, task: int) -> None:
    hooks = weak()
    if hooks is not None:
        hooks.end(task)
