"""Finds the branches of a model: the linear layers that open one, and those that close it.

A block of a transformer is made of branches that leave the residual stream and come back to it: queries,
keys and values are made of the stream and end in one output layer, an MLP widens the stream and narrows it
again.  One forward pass on the meta device tells which linear layers' outputs reach which linear layers'
inputs, below autograd, however the code between them is written.  Whether a branch can be cut, and how, is
tried afterwards (:mod:`colossalai.nn.policies.trials.branch_trial`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from colossalai.nn.policies.cutting.rules import is_product
from colossalai.nn.policies.trials.meta_inputs import candidate_inputs, in_evaluation, looking_at, meta_twin
from colossalai.nn.policies.trials.trace import Flow, MetaInputs, find_inputs
from colossalai.nn.random_streams import draws_own

BATCH, LENGTH = 3, 7  # primes that numbers of heads are seldom multiples of


@dataclass(frozen=True)
class LinearBranch:
    """Linear layers by their paths: ``openers`` take the stream, ``closers`` what was made of their outputs.

    ``home`` is the smallest module that holds all of them.
    """

    home: str
    openers: tuple[str, ...]
    closers: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """The arguments of a module, on the meta device."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class BranchedModel:
    """What one forward pass has told about a model."""

    branches: list[LinearBranch]
    calls: dict[str, Call]
    """The first call of each module, by its path."""
    inputs: MetaInputs | None
    """With which it ran on the meta device, where a plan can be tried as well; None if it had to run with
    values.
    """


def find_branches(model: nn.Module) -> BranchedModel | None:
    """The branches of ``model``; None if no arguments are known with which it runs."""
    with looking_at(model):
        found = find_inputs(model, BATCH, LENGTH)
        if found is not None:
            return _walk(meta_twin(model), *found, found)
    for inputs in [] if any(p.is_meta for p in model.parameters()) else _real_inputs(model):
        try:
            with looking_at(model, "cpu"), in_evaluation(model), torch.no_grad():
                return _walk(model, inputs, False, None)
        except Exception:
            continue
    return None


def _real_inputs(model: nn.Module) -> Iterator[dict[str, Any]]:
    with next((p.device for p in model.parameters()), torch.device("cpu")):
        yield from candidate_inputs(model, BATCH, LENGTH)


def _walk(model: nn.Module, inputs: dict[str, Any], truth: bool, found: MetaInputs | None) -> BranchedModel:
    reach = Reach(truth)
    with ExitStack() as stack:
        for name, module in model.named_modules():
            for handle in reach.watch(name, module):
                stack.callback(handle.remove)
        with reach:
            model(**inputs)
    branches = [replace(b, home=_called(b.home, reach.calls)) for b in _pair(reach.edges)]
    return BranchedModel(branches, reach.calls, found)


class Reach(Flow):
    """Follows, by their memory, which outputs of linear layers each tensor is made of."""

    def __init__(self, truth: bool) -> None:
        super().__init__(draws_own, truth)
        self.edges: dict[str, frozenset[str]] = {}
        """For each linear layer, in the order of their calls, those whose outputs its input is made of."""
        self.calls: dict[str, Call] = {}
        self._outputs: dict[str, torch.Size] = {}
        self._sources: dict[int, frozenset[str]] = {}
        self._alive: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        found = self._of((args, kwargs))
        if found:
            self._set(result, self._of(result) | found)
        return result

    def _of(self, nest: Any) -> frozenset[str]:
        tensors = [x for x in tree_leaves(nest) if isinstance(x, Tensor)]
        empty: frozenset[str] = frozenset()
        return empty.union(*(self._sources.get(x.untyped_storage()._cdata, empty) for x in tensors))

    def _set(self, nest: Any, sources: frozenset[str]) -> None:
        for x in tree_leaves(nest):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self._alive.append(storage)  # the address of what is gone may be taken again
                self._sources[storage._cdata] = sources

    def watch(self, name: str, module: nn.Module) -> list[Any]:
        """Hooks that record the calls of ``module``."""
        hooks: list[Callable[..., None]] = [self._enter(name)]
        handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for hook in hooks]
        if is_product(module):
            handles.append(module.register_forward_hook(self._after_product(name)))
        elif "norm" in type(module).__name__.lower():
            handles.append(module.register_forward_hook(self._after_norm))
        return handles

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.calls.setdefault(name, Call(args, dict(kwargs)))
            if is_product(module):
                self.edges[name] = self.edges.pop(name, frozenset()) | self._of((args, kwargs))

        return enter

    def _after_product(self, name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: tuple[Any, ...], result: Tensor) -> None:
            self._outputs[name] = result.shape
            self._set(result, frozenset([name]))

        return after

    def _after_norm(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        """A norm over all outputs of a layer makes every feature depend on every other one."""
        x = next((a for a in args if isinstance(a, Tensor)), None)
        if x is not None and isinstance(result, Tensor):
            self._set(result, frozenset(path for path in self._of(x) if self._by_heads(path, x)))

    def _by_heads(self, path: str, x: Tensor) -> bool:
        """Whether ``x`` holds parts of the outputs of a layer in its last dim, such as one head."""
        made = self._outputs[path]
        return made[-1] > x.shape[-1] or (made[-1] == x.shape[-1] and len(made) < x.ndim)


def _pair(edges: dict[str, frozenset[str]]) -> list[LinearBranch]:
    """Branches of the layers, from the last to the first: a layer that opens one does not close another."""
    opens: set[str] = set()
    found: dict[tuple[str, ...], list[str]] = {}
    for closer in reversed(edges):
        if closer in opens:
            continue
        openers = tuple(path for path in edges if path in edges[closer] and _in_one_block(path, closer))
        if openers and closer not in openers:
            opens.update(openers)
            found.setdefault(openers, []).append(closer)
    closing = {path for closers in found.values() for path in closers}
    branches = [
        LinearBranch(_common([*openers, *closers]), openers, tuple(closers))
        for openers, closers in found.items()
        if not closing & set(openers)
    ]
    return _disjoint(branches[::-1])


def _called(path: str, calls: dict[str, Call]) -> str:
    """The smallest module around ``path`` that was called; code may use a module by other methods."""
    while path and path not in calls:
        path = path.rpartition(".")[0]
    return path


def _in_one_block(one: str, other: str) -> bool:
    """Whether both are parts of the same item of a list of modules."""
    return any(part.isdecimal() for part in _common([one, other]).split("."))


def _common(paths: list[str]) -> str:
    """The path of the smallest module that holds all of ``paths``."""
    split = [path.split(".")[:-1] for path in paths]
    shared = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _disjoint(branches: list[LinearBranch]) -> list[LinearBranch]:
    """Those that share no opener with another one: what two branches need is left whole."""
    users: dict[str, int] = {}
    for branch in branches:
        for path in branch.openers:
            users[path] = users.get(path, 0) + 1
    return [b for b in branches if all(users[path] == 1 for path in b.openers)]
