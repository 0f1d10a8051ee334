"""One stage of a pipeline: a model of which other ranks hold some blocks.

The model keeps its own forward, all names, and the length of its list of blocks.  Stand-ins without
parameters take the places of what is elsewhere:

- the modules that make the first hidden states give the received ones, for their shape: masks and positions
  follow from it;
- a block before those of this stage returns what was received;
- the first block after them ends the forward, with what it was given as the result;
- of an encoder and a decoder, one that is elsewhere as a whole does the same;
- a module that serves as several blocks is on every stage, and counts its calls.

What only the first stage can know, such as a mask that it has drawn, travels with the hidden states.

So no forward is written again for any architecture, and nothing is computed twice but masks and rotations.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from colossalai.nn.policies.cutting.adapters import FixedAdapters, base_of
from colossalai.nn.policies.stages.depth import ModelParts, travelling
from colossalai.nn.policies.stages.per_block import check_output, refuse_asked, refuse_collected
from colossalai.nn.policies.stages.stand_ins import (
    After,
    Arrived,
    BlockBefore,
    EntryStandIn,
    FormedBlockBefore,
    FormedStandIn,
    Leave,
    StandIn,
    Tail,
    TowerBefore,
    leave,
    what_arrived,
)
from colossalai.nn.policies.wrap_forward import (
    Forward,
    ForwardWrapper,
    WholeOutputs,
    first_step,
    wrap_forward,
)


class RepeatedBlock(ForwardWrapper):
    """A module that serves as several blocks, of which this stage has some."""

    share: StageShare
    carries: tuple[str | None, ...]
    as_tuple: bool

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arrived, blocks = self.share.arrived, self.share.blocks
        number = arrived.calls
        if number is None:  # a checkpoint computes it again, in the backward pass
            return forward(*args, **kwargs)
        arrived.calls = number + 1
        if number < blocks.start:
            return what_arrived(arrived, self.carries, self.as_tuple)
        if number >= blocks.stop:
            raise leave(forward, args, kwargs)
        return forward(*args, **kwargs)


class KeptOutputs(ForwardWrapper):
    """A module of the first stage, some of whose outputs go to later stages beside the hidden states."""

    share: StageShare
    path: str
    travels: tuple[int, ...]

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = forward(*args, **kwargs)
        arrived = self.share.arrived
        if arrived.calls is not None:  # no recomputation
            leaves = tree_leaves(output)
            arrived.values |= {travelling(self.path, i): leaves[i] for i in self.travels}
        return output


@dataclass(frozen=True)
class StageShare:
    """The part of a model that a stage holds."""

    index: int
    stages: int
    blocks: range
    names: Mapping[str, tuple[str, ...]]
    """Every name of a tensor of the whole model, with those in its state of the same tensor."""
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    """What comes from the stage before and goes to the next one, by the names of a block's arguments."""
    arrived: Arrived = field(default_factory=Arrived)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1


class ModelStage(FixedAdapters):
    """The model itself: it begins with the hidden states it is given and ends where its blocks end."""

    share: StageShare

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        share = self.share
        if share.stages > 1:
            config = getattr(self, "config", None)
            refuse_asked(f"stage {share.index} of {type(self).__name__}", kwargs, config)
        if not share.is_first:
            args = self._receive(args, kwargs)
        share.arrived.calls = 0
        if "use_cache" in inspect.signature(base_of(self).forward).parameters:  # type: ignore[arg-type]
            kwargs.setdefault("use_cache", False)  # keys and values of other stages are not here
        try:
            output = forward(*args, **kwargs)
            if share.stages > 1:
                check_output(type(self).__name__, output)
            return output
        except Leave as left:
            kept = {**share.arrived.values, **left.values}
            sent = tuple(kept[name] for name in share.sends)
            if isinstance(self, nn.Module) and isinstance(self, WholeOutputs):
                self.first_step.after(self, sent)
            return sent[0] if len(sent) == 1 else sent
        finally:
            share.arrived.values, share.arrived.calls = {}, None

    def _receive(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Take what the stage before sent; returns the other arguments."""
        who, names = f"stage {self.share.index} of {type(self).__name__}", self.share.receives
        received, rest = args[: len(names)], args[len(names) :]
        if len(received) < len(names) or not all(isinstance(value, Tensor) for value in received):
            raise TypeError(
                f"{who} takes what the stage before returned as its first arguments ({', '.join(names)}), got"
                f" {', '.join(type(value).__name__ for value in received) or 'none'}"
            )
        if not rest and not kwargs:
            raise TypeError(
                f"{who} got hidden states and no batch, from which it computes masks and positions; make"
                " every batch a dict of the model's keywords, which goes to all stages"
            )
        self.share.arrived.values = dict(zip(names, received, strict=True))
        return rest

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        """Refused: it would write one stage as if it were the model."""
        raise RuntimeError(
            f"this {type(self).__name__} is stage {self.share.index} of {self.share.stages}, not the whole"
            " model; call colossalai.save_pretrained(model, folder) on every rank, with what split_model or"
            " boost returned"
        )


class AdaptedStage(ModelStage):
    """A stage of a model with adapters of PEFT."""

    def merge_and_unload(self, *_: Any, **__: Any) -> None:
        """Refused: it would give the base model, which is no stage, with the modules of one."""
        raise RuntimeError(
            f"merge_and_unload: this {type(self).__name__} is stage {self.share.index} of"
            f" {self.share.stages}; call colossalai.save_pretrained(model, folder) on every rank, open the"
            " adapters without a pipeline (PeftModel.from_pretrained), and merge them there"
        )

    unload = merge_and_unload


class StageList(nn.ModuleList):
    """Several stages of one rank, whose tensors have the names of the whole model in checkpoints."""

    def serial_name(self, name: str) -> str:
        """The name in the whole model of what is ``name`` here: without the number of the stage."""
        return name.partition(".")[2]

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        """Refused, as that of one stage; a boosted model has its own in its place."""
        raise RuntimeError(
            f"these are {len(self)} stages of a pipeline, not the whole model; call"
            " colossalai.save_pretrained(model, folder) on every rank, with what split_model or boost"
            " returned"
        )


def take_stage(model: nn.Module, parts: ModelParts, share: StageShare, *, refuses: bool = True) -> nn.Module:
    """Put stand-ins into ``model`` for all that is not in ``share``, and make it a stage; with ``refuses`` it
    raises when it returns what was collected from its blocks.
    """
    travels = {path: tuple(i for p, i in parts.travels if p == path) for path, _ in parts.travels}
    for path, kind in _elsewhere(parts, share).items():
        parent, _, name = path.rpartition(".")
        home = model.get_submodule(parent)
        stand_in = kind(home.get_submodule(name), path, share.arrived)
        if isinstance(stand_in, BlockBefore):
            stand_in.carries, stand_in.as_tuple = parts.carries, parts.as_tuple
        elif isinstance(stand_in, TowerBefore):
            stand_in.kind = parts.encoded
        elif isinstance(stand_in, FormedStandIn):
            stand_in.travels = travels.get(path, ())
        home._modules[name] = stand_in
    for path in parts.repeated:
        block = _wrapped_copy(model, path, RepeatedBlock)
        block.share, block.carries, block.as_tuple = share, parts.carries, parts.as_tuple
    for path, numbers in travels.items() if share.is_first else ():
        kept = _wrapped_copy(model, path, KeptOutputs)
        kept.share, kept.path, kept.travels = share, path, numbers
    wrap_forward(model, ModelStage if base_of(model) is model else AdaptedStage)
    model.share = share  # type: ignore[assignment]
    if refuses and share.is_last and share.stages > 1:
        refuse_collected(model)
    if isinstance(model, WholeOutputs):  # the chunks of a rank are copies of one model
        model.first_step = first_step(model.cut_as[1])
    return model


def _wrapped_copy(model: nn.Module, path: str, kind: type[ForwardWrapper]) -> Any:
    """Put a copy of the module at ``path``, of the ``kind``, in its place, and return it; stages that are
    copies of one model have the module itself in common.
    """
    parent, _, name = path.rpartition(".")
    home = model.get_submodule(parent)
    home._modules[name] = wrap_forward(copy.copy(home.get_submodule(name)), kind)
    return home._modules[name]


def _elsewhere(parts: ModelParts, share: StageShare) -> dict[str, type[StandIn]]:
    """What stands in for each module that other stages hold."""
    start, end = share.blocks.start, share.blocks.stop
    kinds: dict[str, type[StandIn]] = {} if share.is_last else dict.fromkeys(parts.tail, Tail)
    for tower in parts.towers:
        first, last = tower.numbers.start, tower.numbers.stop
        if tower.path and (end <= first or start >= last):
            kinds[tower.path] = After if end <= first else TowerBefore
            # parameters beside the tower that only its entry uses
            kinds |= {p: Tail for p in tower.entry if not p.startswith(f"{tower.path}.")}
            continue
        if start > first:
            kinds |= {p: FormedStandIn if p in parts.formed else EntryStandIn for p in tower.entry}
        if tower.repeats:
            continue
        before = FormedBlockBefore if tower.blocks in parts.formed else BlockBefore
        kinds |= {tower.block(i): before for i in range(first, min(start, last))}
        kinds |= {tower.block(i): After for i in range(max(end, first), last)}
        if end < last:
            kinds |= dict.fromkeys(tower.tail, Tail)
    return kinds


def wrapped_elsewhere(model: nn.Module) -> str | None:
    """The path of a block that was put into a wrapper where a stand-in for it is; None if there is none.

    What the wrapper adds would be computed, and trained, on every stage.  Activation checkpointing adds
    nothing.
    """
    for stage in model.modules():
        if not isinstance(stage, ModelStage):
            continue
        for name, module in stage.named_modules():
            if isinstance(module, StandIn) and name.replace("._checkpoint_wrapped_module", "") != module.path:
                return module.path
    return None


def adapted_too_late(model: nn.Module) -> str | None:
    """What is wrong with a ``PeftModel`` that was made of a stage; None if ``model`` is none."""
    stage = base_of(model)
    if stage is model or not isinstance(stage, ModelStage):
        return None
    return (
        f"this {type(model).__name__} has adapters for the modules of stage {stage.share.index} alone; call"
        " peft.get_peft_model before split_model"
    )


def copy_above(module: nn.Module, paths: list[str]) -> nn.Module:
    """A copy of ``module`` in which the modules at ``paths`` can be replaced; all below and beside them is
    shared.
    """
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    heads = dict.fromkeys(path.split(".", 1)[0] for path in paths if "." in path)
    for head in heads:
        rest = [path.split(".", 1)[1] for path in paths if path.startswith(f"{head}.")]
        twin._modules[head] = copy_above(module.get_submodule(head), rest)
    return twin
