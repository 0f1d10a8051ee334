"""The class of tensors that are described and have no memory yet.

When the block of a ``Deferred`` ends, its tensors get a subclass of their own class.  It brings each
operation on them to the recording: questions about their form are answered, what a script does to them
(``half()``, an initializer, ``load_state_dict``, a copy) is written down, and values that are read are
computed and forgotten again.  Only a forward pass is refused.  When such a tensor gets memory it is the same
object, with its own class again: optimizers, tied layers and lists of a script go on with it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossalai.mesh._compat import plain_torch

_PARAMETER_MARK = "_is_param"  # torch's own, for parameters of another class

# What a forward pass begins with, and hooks, which a tensor would lose when it gets memory.
_COMPUTE = """
    linear bilinear embedding embedding_bag conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d layer_norm rms_norm group_norm batch_norm instance_norm scaled_dot_product_attention
    multi_head_attention_forward
"""
_HOOKS = frozenset([Tensor.register_hook, Tensor.register_post_accumulate_grad_hook])
_ADDRESSES = frozenset([Tensor.data_ptr])
REFUSED = frozenset([getattr(F, name) for name in _COMPUTE.split()]) | _HOOKS | _ADDRESSES


def why_refused(func: Any) -> RuntimeError:
    name = getattr(func, "__name__", str(func))
    model = "a model that was built without memory (LazyInitContext)"
    if func in _HOOKS:
        return RuntimeError(f"{name}() on a weight of {model}; register hooks after booster.boost")
    return RuntimeError(
        f"{name}() needs the weights of {model}, and they have none yet; call booster.boost(model, ...) or"
        " colossalai.initialize(model, ...) first and go on with what it returns, or"
        " colossalai.lazy.materialize(model) to have the whole model in this process"
    )


class Unfilled:
    """A tensor without memory; ``recording`` knows how it is filled, and ``native`` is its class then."""

    recording: ClassVar[Any]
    native: ClassVar[type[Tensor]]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return cls.recording.later(func, args, kwargs or {})

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *_: Any, **__: Any) -> str:
        name = nn.Parameter.__name__ if isinstance(self, nn.Parameter) else self.native.__name__
        form = f"shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r}"  # type: ignore[attr-defined]
        return f"{name}(without memory yet, {form})"

    __format__ = __repr__

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            kept = {name: value for name, value in self.__dict__.items() if name != _PARAMETER_MARK}
            twin: Any = self.detach().clone()  # type: ignore[attr-defined]
            if isinstance(self, nn.Parameter):
                twin = nn.Parameter(twin)
            # of the attributes, those that torch and PlacedParameter copy
            twin.__dict__.update(kept if self.native not in (Tensor, nn.Parameter) else {})
            memo[id(self)] = twin.requires_grad_(self.requires_grad)  # type: ignore[attr-defined]
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        values = self.recording.values(self)
        if isinstance(self, nn.Parameter):
            values = nn.Parameter(values, self.requires_grad)
        return values.__reduce_ex__(protocol)


def set_class(tensor: Tensor, recording: Any, classes: dict[type, type]) -> None:
    """Let ``tensor`` be one without memory; ``classes`` are those of ``recording``, by native class."""
    kind = type(tensor)
    plain = kind in (Tensor, nn.Parameter)
    native = Tensor if plain else kind
    if native not in classes:
        body = {"recording": recording, "native": native, "__module__": __name__}
        classes[native] = type("UnfilledTensor", (Unfilled, native), body)
    if kind is nn.Parameter:
        # torch asks nn.Parameter(data) to have the class of data, so both have one class
        setattr(tensor, _PARAMETER_MARK, True)
    tensor.__class__ = classes[native]


def become(tensor: Tensor, value: Tensor) -> None:
    """Give ``tensor`` the memory of ``value``; it stays the object that it is."""
    requires_grad, kind = _ask(tensor)
    if not isinstance(tensor, Unfilled):
        native = kind
    else:
        native = type(tensor).native
        if tensor.__dict__.pop(_PARAMETER_MARK, False) and native is Tensor:
            native = nn.Parameter
    tensor.__class__ = native
    torch._C._swap_tensor_impl(tensor, value)
    if requires_grad:
        tensor.requires_grad_(True)


def take_place(tensor: Tensor, twin: Tensor) -> None:
    """Let ``tensor``, on the meta device, be the tensor that ``twin`` is, without memory or with."""
    requires_grad = tensor.requires_grad
    torch._C._swap_tensor_impl(tensor, twin)
    if isinstance(twin, Unfilled):
        if type(tensor) is nn.Parameter:
            setattr(tensor, _PARAMETER_MARK, True)
        tensor.__class__ = type(twin)
    with plain_torch():
        tensor.requires_grad_(requires_grad)


def _ask(tensor: Tensor) -> tuple[bool, type]:
    with plain_torch():
        return tensor.requires_grad and tensor.is_leaf, type(tensor)


def live_tensors() -> Iterator[Tensor]:
    """Every tensor of this process that Python knows.

    Those of a model lie in its modules, but a constructor also keeps tensors in lists, closures and caches.
    """
    kinds = set(_kinds(Tensor))
    found = gc.get_objects()
    yield from (item for item, kind in zip(found, map(type, found), strict=True) if kind in kinds)


def _kinds(cls: type) -> Iterator[type]:
    yield cls
    subclasses: list[type] = cls.__subclasses__()
    for kind in subclasses:
        yield from _kinds(kind)
