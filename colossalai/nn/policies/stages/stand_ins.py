"""Stand-ins for the modules of a model that other stages of its pipeline hold.

They have no parameters, and return what has come from the stage before, or its form; or they end the forward
pass of this stage (``Leave``).
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from colossalai.nn.policies.stages.depth import travelling
from colossalai.nn.policies.wrap_forward import Forward, given_by_name


class Arrived:
    """Holds what came from the stage before, by the names of a block's arguments, for the stand-ins."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.calls: int | None = None  # of repeated blocks, while the stage is in its forward pass

    @property
    def hidden(self) -> Tensor:
        return self.values["hidden_states"]


class Leave(BaseException):
    """Ends the forward of a stage.  No ``Exception``: code on the way must not handle it as an error."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.values = values


class StandIn(nn.Module):
    """Takes the place of a module that another stage holds.

    Attributes that it does not have are those of an empty copy of the module: models ask a block for the kind
    of its attention, or a weight for its dtype.
    """

    def __init__(self, native: nn.Module, path: str, arrived: Arrived) -> None:
        super().__init__()
        self.path, self.arrived = path, arrived
        self.__dict__["empty"] = empty_copy(native)  # no submodule: its parameters are none of this stage

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # without hooks: a script puts them on the module on all ranks, and they run where it is
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "empty" not in self.__dict__:
                raise
            return getattr(self.__dict__["empty"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        # a script that wraps a layer does so on all ranks; here it has wrapped an empty copy, which is no
        # part of this stage
        if isinstance(value, nn.Module | nn.Parameter) and "empty" in self.__dict__:
            setattr(self.__dict__["empty"], name, value)
        else:
            super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self.__dict__["empty"].add_module(name, module)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self.__dict__["empty"].register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        self.__dict__["empty"].register_buffer(name, tensor, persistent)


class EntryStandIn(StandIn):
    def forward(self, *_: Any, **__: Any) -> Any:
        return torch.zeros_like(self.arrived.hidden)  # code may write to it


class FormedStandIn(StandIn):
    """Gives zeros of the form that the module itself would give, which an empty copy finds out, and what the
    first stage has sent of its outputs.
    """

    travels: tuple[int, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, form = tree_flatten(_formed(self.empty, args, kwargs, self.arrived.hidden.device))
        sent = {i: self.arrived.values[travelling(self.path, i)] for i in self.travels}
        return tree_unflatten([sent.get(i, x) for i, x in enumerate(leaves)], form)


def _formed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], where: torch.device) -> Any:
    """What ``module``, which has no values, returns, with zeros for its tensors."""

    def empty(x: Any) -> Any:
        return x.detach().to("meta") if isinstance(x, Tensor) else x

    def zeros(x: Any) -> Any:
        return torch.zeros(x.shape, dtype=x.dtype, device=where) if isinstance(x, Tensor) else x

    with torch.no_grad():
        return tree_map(zeros, module(*tree_map(empty, args), **tree_map(empty, kwargs)))


class BlockBefore(StandIn):
    carries: tuple[str | None, ...] = ()
    as_tuple: bool = False

    def forward(self, *_: Any, **__: Any) -> Any:
        return what_arrived(self.arrived, self.carries, self.as_tuple)


class FormedBlockBefore(BlockBefore):
    """A block that returns more than tensors, which an empty copy finds out; the last one before this stage
    returns what has arrived, and those before it zeros, whose shapes may be others.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self.arrived.hidden
        first, *rest = _formed(self.empty, args, kwargs, hidden.device)
        carried = zip_longest(self.carries, rest)
        return (
            hidden if first.shape == hidden.shape else first,
            *(self.arrived.values.get(name) if name else value for name, value in carried),
        )


class After(StandIn):
    """A block, or a decoder."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise leave(self.empty.forward, args, kwargs)


def what_arrived(arrived: Arrived, carries: tuple[str | None, ...], as_tuple: bool) -> Any:
    """What a block before those of this stage has returned."""
    if not carries and not as_tuple:
        return arrived.hidden
    return (arrived.hidden, *(name and arrived.values.get(name) for name in carries))


def leave(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Leave:
    given = given_by_name(forward, args, kwargs)
    # whatever a block calls its first argument
    return Leave({**given, "hidden_states": args[0]} if args else given)


class TowerBefore(StandIn):
    """An encoder, which returns what it did on an earlier stage."""

    kind: type | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        states: Any = self.arrived.values["encoder_hidden_states"]
        return (self.kind or BaseModelOutput)(last_hidden_state=states)


class Tail(StandIn):
    def forward(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"{self.path!r} is called before the blocks of the model are through, so the first stage needs"
            " it: name it in the entry of the policy's Depth"
        )


def empty_copy(module: nn.Module) -> nn.Module:
    """A copy whose tensors have a shape and a type only; of a stage, one of the whole model."""
    if isinstance(module, StandIn):
        return module.__dict__["empty"]
    twin = object.__new__(type(module))  # not by copy: modules with parametrizations refuse it
    twin.__dict__.update(module.__dict__)
    twin._parameters = {
        name: p if p is None else nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        for name, p in module._parameters.items()
    }
    twin._buffers = {
        name: b if b is None else torch.empty_like(b, device="meta") for name, b in module._buffers.items()
    }
    twin._modules = {name: m if m is None else empty_copy(m) for name, m in module._modules.items()}
    return twin
