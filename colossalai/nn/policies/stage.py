"""One stage of a pipeline: a model of which other ranks hold some blocks.

The model keeps its own forward, all names, and the length of its list of blocks.  Stand-ins without parameters take the places
of what is elsewhere:

- the modules that make the first hidden states give the received ones, for their shape: masks and positions follow from it;
- a block before those of this stage returns the received hidden states;
- the first block after them ends the forward, with what it was given as the result.

So no forward is written again for any architecture, and nothing is computed twice but masks and rotations.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.nn.policies.adapt import Adapted, Forward, adapt
from colossalai.nn.policies.depth import Parts


class Arrived:
    """Where the stand-ins of a stage find the hidden states that came from the stage before."""

    hidden: Tensor | None = None


class Leave(BaseException):
    """The forward of a stage is over.  No ``Exception``: nobody on the way may take it for an error."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class StandIn(nn.Module):
    """Takes the place of a module that another stage holds.

    Attributes that it does not have are those of an empty copy of the module: models ask a block for the kind of its
    attention, or a weight for its dtype.
    """

    def __init__(self, native: nn.Module, path: str, arrived: Arrived) -> None:
        super().__init__()
        self.path, self.arrived = path, arrived
        self.__dict__["empty"] = _empty(native)  # no submodule: its parameters are none of this stage

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "empty" not in self.__dict__:
                raise
            return getattr(self.__dict__["empty"], name)


class Entry(StandIn):
    def forward(self, *_: Any, **__: Any) -> Tensor:
        assert self.arrived.hidden is not None
        return self.arrived.hidden.detach()


class BlockBefore(StandIn):
    def forward(self, *_: Any, **__: Any) -> Tensor:
        assert self.arrived.hidden is not None
        return self.arrived.hidden


class BlockAfter(StandIn):
    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        raise Leave(hidden_states)


class Tail(StandIn):
    def forward(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"{self.path!r} is called before the blocks of the model are through, so the first stage needs it: name it in "
            "the entry of the policy's Depth"
        )


def _empty(module: nn.Module) -> nn.Module:
    """A copy whose tensors have a shape and a type only."""
    twin = copy.copy(module)
    twin._parameters = {
        name: p if p is None else nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        for name, p in module._parameters.items()
    }
    twin._buffers = {
        name: b if b is None else torch.empty_like(b, device="meta") for name, b in module._buffers.items()
    }
    twin._modules = {name: m if m is None else _empty(m) for name, m in module._modules.items()}
    return twin


@dataclass(frozen=True)
class Share:
    """What a stage holds of its model."""

    index: int
    stages: int
    blocks: range
    names: Mapping[str, tuple[str, ...]]
    """Every name of a tensor of the whole model, with those in its state of the same tensor."""
    arrived: Arrived = field(default_factory=Arrived)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1


class Stage(Adapted):
    """The model itself: it begins with the hidden states it is given and ends where its blocks end."""

    share: Share

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        share = self.share
        if not share.is_first:
            args, share.arrived.hidden = self._received(args, kwargs)
        if "use_cache" in inspect.signature(forward).parameters:
            kwargs.setdefault("use_cache", False)  # keys and values of other stages are not here
        try:
            return forward(*args, **kwargs)
        except Leave as left:
            return left.hidden
        finally:
            share.arrived.hidden = None

    def _received(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Tensor]:
        who = f"stage {self.share.index} of {type(self).__name__}"
        if not args or not isinstance(args[0], Tensor):
            raise TypeError(
                f"{who} takes the hidden states that the stage before returned as its first argument, got "
                f"{type(args[0]).__name__ if args else 'none'}"
            )
        if len(args) == 1 and not kwargs:
            raise TypeError(
                f"{who} got hidden states and no batch, from which it computes masks and positions; make every batch a "
                "dict of the model's keywords, which goes to all stages"
            )
        return args[1:], args[0]

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        """Refused: it would write one stage as if it were the model."""
        raise RuntimeError(
            f"this {type(self).__name__} is stage {self.share.index} of {self.share.stages}, not the whole model; call "
            "colossalai.pipeline.save_pretrained(stages, folder) on every rank"
        )


def take_stage(model: nn.Module, parts: Parts, share: Share) -> nn.Module:
    """Put stand-ins into ``model`` for all that is not in ``share``, and make it a stage."""
    first, end = share.blocks.start, share.blocks.stop
    kinds: dict[str, type[StandIn]] = {}
    if not share.is_first:
        kinds |= dict.fromkeys(parts.entry, Entry)
    kinds |= {parts.block(i): BlockBefore for i in range(first)}
    kinds |= {parts.block(i): BlockAfter for i in range(end, parts.count)}
    if not share.is_last:
        kinds |= dict.fromkeys(parts.tail, Tail)
    for path, kind in kinds.items():
        parent, _, name = path.rpartition(".")
        home = model.get_submodule(parent)
        home._modules[name] = kind(home.get_submodule(name), path, share.arrived)
    adapt(model, Stage)
    model.share = share  # type: ignore[assignment]
    return model


def copy_above(module: nn.Module, paths: list[str]) -> nn.Module:
    """A copy of ``module`` in which the modules at ``paths`` can be replaced; all below and beside them is shared."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    heads = dict.fromkeys(path.split(".", 1)[0] for path in paths if "." in path)
    for head in heads:
        rest = [path.split(".", 1)[1] for path in paths if path.startswith(f"{head}.")]
        twin._modules[head] = copy_above(module.get_submodule(head), rest)
    return twin
