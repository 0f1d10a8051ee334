"""Ranks that gather and reduce other weights than their peers are told so, before a wrong message is taken
for a right one.

FSDP2 sends a message for each unit that computes, and one for the gradients that each unit has got.  If only
some ranks take a branch, their messages meet those of other units: sizes that differ end the process inside
of gloo or hang with NCCL, and sizes that are equal give every rank wrong weights.  So before each message the
ranks compare what they are about to do.

With NCCL, whose messages the host does not wait for, they compare once at the end of each pass instead: early
enough for the step, and a rank that waits for an answer costs no time on the GPU.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from colossalai.interface.nest import tensors
from colossalai.mesh.backward import Once, before_backward

SHOWN = 3
Said = tuple[str, tuple[str, ...]]  # what a rank does, and with which parameters


class Lockstep:
    """Compares over ``group`` which step each rank of one model does next.

    Args:
        group: all ranks that train together, over gloo and for nothing else.
        at_once: compare before each message, not at the end of each pass.
    """

    def __init__(self, group: dist.ProcessGroup, *, at_once: bool) -> None:
        self._group, self._at_once = group, at_once
        self._said: list[Said] = []

    def say(self, what: str, *names: str) -> None:
        """This rank does ``what`` next, with the parameters of these names."""
        self._said.append((what, names))
        if self._at_once:
            self.compare()

    def compare(self) -> None:
        """Raise, on every rank, unless all have said the same since the last time."""
        if self._at_once and not self._said:
            return
        said, self._said = self._said, []
        own = torch.tensor([zlib.crc32(repr(said).encode())])
        all_sums = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(all_sums, own, group=self._group)
        if all(torch.equal(own, other) for other in all_sums):
            return
        everyone: list[Any] = [None] * self._group.size()
        dist.all_gather_object(everyone, said, group=self._group)
        raise RuntimeError(_difference(dist.get_process_group_ranks(self._group), everyone))


def compare_ranks(
    model: nn.Module, roots: Sequence[nn.Module], units: Sequence[nn.Module], lockstep: Lockstep
) -> None:
    """Let ``lockstep`` hear what the ``units`` of ``model``, which ``fully_shard`` was applied to, do;
    ``roots`` among them are outermost.
    """
    names = {module: name for name, module in model.named_modules()}
    parameters = {id(p): name for name, p in model.named_parameters()}
    for unit in units:
        name = repr(names[unit]) if names[unit] else "the model"
        hooks = _UnitHooks(lockstep, name, unit in roots)
        unit.register_forward_pre_hook(hooks.before_forward, prepend=True)
        unit.register_forward_hook(hooks.after_forward, prepend=True)
        for group in _groups(unit):
            own = [parameters.get(id(p.sharded_param), "a parameter") for p in group.fsdp_params]
            group.post_backward = partial(_post_backward, weakref.ref(group), lockstep, name, own)


class _UnitHooks:
    """Of one unit; they run before those of FSDP2."""

    def __init__(self, lockstep: Lockstep, name: str, is_root: bool) -> None:
        self._lockstep, self._name, self._is_root = lockstep, name, is_root

    def before_forward(self, unit: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            how = "" if torch.is_grad_enabled() else ", without gradients"
            self._lockstep.say(f"runs {self._name} forward{how}")

    def after_forward(self, unit: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if torch.is_grad_enabled():
            outputs = [t for t in tensors(output) if t.requires_grad]
            before_backward(outputs, Once(partial(self._lockstep.say, f"runs {self._name} backward")))
        if self._is_root:
            self._lockstep.say("has done its forward pass")
            self._lockstep.compare()


def _post_backward(
    owner: weakref.ref[Any], lockstep: Lockstep, name: str, parameters: Sequence[str], *args: Any
) -> None:
    """FSDP2's ``post_backward`` of a unit, which reduces the gradients that this rank has."""
    group: Any = owner()
    if group.reduce_grads:
        have = [n for n, p in zip(parameters, group.fsdp_params, strict=True) if has_gradient(p)]
        lockstep.say(f"reduces gradients of {name}", *have)
    type(group).post_backward(group, *args)


def fsdp_params(unit: Any) -> Iterator[Any]:
    """What FSDP2 knows of each parameter of ``unit``."""
    for group in _groups(unit):
        yield from group.fsdp_params


def _groups(unit: Any) -> list[Any]:
    """What FSDP2 gathers at once; torch before 2.13 has one such group for each unit, or none without
    parameters.
    """
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def has_gradient(param: Any) -> bool:
    """Whether a backward pass has left a gradient of the whole parameter, which is not reduced yet."""
    if not hasattr(param, "_unsharded_param"):
        return False
    return param.unsharded_accumulated_grad is not None or param.unsharded_param.grad is not None


def _difference(ranks: Sequence[int], said: Sequence[Sequence[Said]]) -> str:
    place = next(
        i for i in range(max(map(len, said))) if len({tuple(words[i : i + 1]) for words in said}) > 1
    )
    now: list[Said] = [words[place] if place < len(words) else ("has done its pass", ()) for words in said]
    all_have = set.intersection(*(set(names) for _, names in now))
    by_words: dict[str, list[int]] = {}
    for rank, (what, names) in zip(ranks, now, strict=True):
        own = [name for name in names if name not in all_have]
        more = f" and {len(own) - SHOWN} more" if len(own) > SHOWN else ""
        words = f"{what}, with {', '.join(own[:SHOWN])}{more}" if own else what
        by_words.setdefault(words, []).append(rank)
    found = "; ".join(f"rank {', '.join(map(str, who))} {what}" for what, who in by_words.items())
    return (
        f"the ranks of a model under TorchFSDPPlugin take different ways: {found}. FSDP2 gathers weights and"
        " reduces gradients on all ranks together, so all must use the same layers in the same order, in the"
        " forward and the backward pass. Use every layer on every rank (times zero, where it is not wanted),"
        " or TorchDDPPlugin(find_unused_parameters=True), LowLevelZeroPlugin or GeminiPlugin, which take"
        " such models"
    )
