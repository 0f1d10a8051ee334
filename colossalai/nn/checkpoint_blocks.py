"""Activation checkpoints around the blocks of any model, whose code is not touched.

A block is an entry of one of the outermost ``nn.ModuleList`` s: the layers of the models of Hugging Face, of
timm, and of most models of one's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import MethodType
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import nn

from colossalai.nn.policies.wrap_forward import Forward, ForwardWrapper, forward_inside, wrap_forward
from colossalai.utils.activation_checkpoint import checkpoint, computed_once, may_keep_nothing
from colossalai.utils.recomputed_calls import RecomputedCalls

Mode = Literal["keep", "selective", "full", "offload"]
M = TypeVar("M", bound=nn.Module)

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they are never called


def checkpoint_blocks(model: M, mode: Mode = "selective", blocks: Sequence[str] | None = None) -> M:
    """Let each block of ``model`` compute parts of its forward pass again in the backward pass, which frees
    their memory meanwhile.

    Call it before ``boost``, for a model of any plan. Outside of training, and where no gradients are
    computed, nothing changes. Calling it again changes the mode.

    Args:
        model: the model; it is changed in place and returned.
        mode: ``"selective"`` keeps the results of matrix products, convolutions and attention, and computes
            the rest again, which takes almost no time; ``"full"`` keeps only the inputs of each block and
            computes everything again; ``"offload"`` is ``"full"`` with the inputs in host memory; ``"keep"``
            computes nothing again, as before the first call.
        blocks: the names of the modules to checkpoint, by default the entries of the outermost module lists.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"checkpoint_blocks: mode is one of {', '.join(get_args(Mode))}, got {mode!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"checkpoint_blocks needs a module, got {type(model).__name__}")
    found = outermost_blocks(model) if blocks is None else [_named(model, name) for name in blocks]
    if not found:
        raise ValueError(
            f"checkpoint_blocks found no nn.ModuleList of layers in {type(model).__name__}; name the modules"
            " to checkpoint, blocks=['encoder.0', ...]"
        )
    refuse_checkpointed(model, found)
    for block in found:
        if not isinstance(block, RecomputedBlock):
            wrap_forward(block, RecomputedBlock)
        block.recompute = mode  # type: ignore[assignment]
    return model


class RecomputedBlock(ForwardWrapper):
    """A block that computes again in the backward pass what its forward pass does not keep."""

    training: bool
    recompute: Mode
    regions: tuple[tuple[Region, int], ...] = ()
    """The regions around this block, outermost first, and its place in each."""

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.training or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        args = tuple(_without_cache(value) for value in args)
        kwargs = {name: _without_cache(value) for name, value in kwargs.items()}
        if not torch.compiler.is_compiling():
            # a method of the module, so that checkpoint learns whether it leaves its inputs alone
            forward = MethodType(forward.func, self)  # type: ignore[attr-defined]
        elif self.regions:
            raise RuntimeError(
                "torch.compile cannot compute several blocks again together; plan with regions=False, or do"
                " not compile"
            )
        return self._inside(0, forward, *args, **kwargs)

    def _inside(self, depth: int, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """The forward pass inside of the outer ``depth`` regions."""
        if depth < len(self.regions):
            region, place = self.regions[depth]
            return region.calls(place).run(partial(self._inside, depth + 1, forward), args, kwargs)
        if self.recompute == "keep":
            return forward(*args, **kwargs)
        if (
            self.recompute == "full"
            and not torch.compiler.is_compiling()
            and computed_once(lambda: may_keep_nothing(forward))  # a second run takes the same way
        ):
            return RecomputedCalls().run(forward, args, kwargs)  # a fraction of torch's time on the host
        return checkpoint(
            partial(forward, **kwargs),
            self.recompute == "offload",
            *args,
            use_reentrant=False,
            keep_products=self.recompute == "selective",
        )


def can_be_grouped(block: nn.Module) -> bool:
    """Whether a region may compute ``block`` again: a run in mode ``full`` has shown that it leaves its
    inputs alone, and computes no gradients.
    """
    return may_keep_nothing(MethodType(forward_inside(block, RecomputedBlock), block))


class Region:
    """So many blocks, called one after the other, of which a forward pass keeps only what comes from outside
    of them; they are computed again together.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._calls: RecomputedCalls | None = None
        self._next = 0

    def calls(self, place: int) -> RecomputedCalls:
        """The calls of this pass through the region, of which the block at ``place`` is the next."""
        found = self._calls if self._calls is not None and place == self._next else RecomputedCalls()
        self._calls, self._next = (found, place + 1) if place + 1 < self.blocks else (None, 0)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"blocks": self.blocks, "_calls": None, "_next": 0}


def group_blocks(
    model: nn.Module, regions: Sequence[Sequence[str]], blocks: Sequence[str] | None = None
) -> None:
    """Compute the blocks of each region, modules that are called one after the other, again together.

    A region may lie in another. Those of ``blocks``, by default of all, that lie in none are as if they never
    had.
    """
    named = [_named(model, name) for name in blocks] if blocks is not None else list(model.modules())
    around: dict[nn.Module, list[tuple[Region, int]]] = {}
    for names in sorted(regions, key=len, reverse=True):
        region = Region(len(names))
        for place, name in enumerate(names):
            around.setdefault(_named(model, name), []).append((region, place))
    if not all(isinstance(block, RecomputedBlock) for block in around):
        raise ValueError("group_blocks takes blocks that checkpoint_blocks has changed")
    for block in {*named, *around}:
        if isinstance(block, RecomputedBlock):
            block.regions = tuple(around.get(block, ()))


def outermost_blocks(model: nn.Module) -> list[nn.Module]:
    """The entries of the outermost module lists, each once, if they have weights."""
    found: list[nn.Module] = []
    for child in model.children():
        if not isinstance(child, nn.ModuleList):
            found += outermost_blocks(child)
            continue
        for entry in child:
            if isinstance(entry, _CONTAINERS):
                inner = nn.ModuleList([entry]) if isinstance(entry, nn.ModuleList) else entry
                found += outermost_blocks(inner)
            elif any(True for _ in entry.parameters()):
                found.append(entry)
    return list(dict.fromkeys(found))


def _named(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise ValueError(
            f"checkpoint_blocks: {type(model).__name__} has no module {name!r} ({error})"
        ) from error


def refuse_checkpointed(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Refuse blocks that are checkpointed already, which would run three times."""
    for name, part in model.named_modules():
        if getattr(part, "gradient_checkpointing", False) is True:
            raise ValueError(
                f"{name or type(model).__name__} checkpoints its layers itself; call"
                " model.gradient_checkpointing_disable() (in newer versions activation_checkpointing_disable)"
                " before checkpoint_blocks"
            )
    for block in blocks:
        if getattr(block, "checkpoint", False) in (True, "selective"):
            raise ValueError(
                f"{type(block).__name__} checkpoints itself (checkpoint={block.checkpoint!r}); build the"
                " model with checkpoint=False, or leave out checkpoint_blocks"
            )


def _without_cache(value: Any) -> Any:
    """``None`` for an empty key-value cache of transformers: the second run would append to it again."""
    if not (hasattr(value, "get_seq_length") and hasattr(value, "update")):
        return value
    if int(value.get_seq_length()):
        raise ValueError(
            "a block that checkpoint_blocks changed got a key-value cache with entries in training: the"
            " backward pass would append to it again; train without past_key_values (use_cache=False)"
        )
    return None
