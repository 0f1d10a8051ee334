"""Tries ways to cut a branch of a model, on random numbers, in one process.

The code of a branch runs once whole, with random outputs in the place of its linear layers, and then as each
rank would run it: openers give the rank's features of the same outputs, and closers must be given the rank's
features of what they were given before.  So no weight of a linear layer is needed, no rule says which order
queries, keys and values have in one output or what a view does with heads, and a way that fits is right for
this code, not for the name of an architecture.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from colossalai.nn.policies.cutting.rules import is_product, sizes_of
from colossalai.nn.policies.trials.branches import BATCH, LENGTH, Call, LinearBranch
from colossalai.nn.policies.trials.meta_inputs import detach_from_script, looking_at

MOST_TRIALS = 150
SEED = 1234


@dataclass(frozen=True)
class Way:
    """One way to cut a branch.

    Paths are those of the model.  ``repeated`` openers stay whole, and give each rank one of ``groups`` parts
    of their outputs: keys and values of fewer heads than there are ranks.
    """

    fused: Mapping[str, int]
    """For each opener that is cut, the number of blocks in its output that are cut one by one."""
    repeated: tuple[str, ...] = ()
    groups: int = 1
    divided: Mapping[str, int] = field(default_factory=dict)
    """For each opener of whose outputs only the first are divided, how many these are: every rank gets all of
    the others, such as the one head of keys behind the queries.
    """
    attributes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By the paths of modules, attributes and the values that they have on a rank."""
    arguments: Mapping[str, tuple[int, int, bool]] = field(default_factory=dict)
    """Arguments of the home of the branch with a dim of heads: the dim, the number of all heads, and whether
    rows and heads are one dim.
    """
    parameters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By the paths of modules, parameters with the dim that holds the heads."""


class Unlike(Exception):
    """A rank's run of the code does not fit the whole run."""


class Played(nn.Module):
    """Stands in for a linear layer: gives what the trial has in store for it."""

    def __init__(self, path: str, native: nn.Module, trial: BranchTrial) -> None:
        super().__init__()
        self.__dict__["trial"] = trial
        self.path = path
        self.in_features, self.out_features = sizes_of(native)
        # models ask layers for the dtype of their weights
        weight, bias = native._parameters["weight"], native._parameters.get("bias")
        assert weight is not None
        self.weight = nn.Parameter(torch.empty(weight.shape, device="meta"), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(torch.empty(bias.shape, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        trial: BranchTrial = self.__dict__["trial"]
        return trial.play(self, x)


class BranchTrial:
    """The code of one branch, with what its linear layers were given and gave in the whole run."""

    def __init__(self, model: nn.Module, branch: LinearBranch, call: Call, parts: int) -> None:
        self.branch, self.parts = branch, parts
        self.home = self._copy(model.get_submodule(branch.home))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            self.args, self.kwargs = tree_map(_real, call.args), tree_map(_real, call.kwargs)
        self.tape: list[tuple[str, Tensor, Tensor]] = []
        self.way: Way | None = None
        self.rank = self.position = 0
        self.result = self._run(self.args, self.kwargs)
        self._check_whole()

    def _copy(self, native: nn.Module) -> nn.Module:
        """A copy of ``native`` with small random parameters, and without linear layers."""
        memo: dict[int, Any] = {}
        prefix = f"{self.branch.home}." if self.branch.home else ""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            for name, module in native.named_modules():
                if is_product(module):
                    memo[id(module)] = Played(prefix + name, module, self)
            played = {id(p) for m in native.modules() if is_product(m) for p in m._parameters.values()}
            for param in native.parameters():
                if id(param) not in played:
                    memo[id(param)] = nn.Parameter(torch.randn(param.shape), requires_grad=False)
            for buffer in native.buffers():
                memo[id(buffer)] = _real(buffer)
            twin = copy.deepcopy(native, memo)
        detach_from_script(twin)
        for module in twin.modules():
            config: Any = getattr(module, "config", None)
            if getattr(config, "_attn_implementation", "eager") not in ("eager", "sdpa"):
                config._attn_implementation = "eager"  # others need a GPU
        return twin.to(torch.get_default_dtype()).eval()

    def _check_whole(self) -> None:
        called = {path for path, _, _ in self.tape}
        missing = {*self.branch.openers, *self.branch.closers} - called
        if missing:
            raise Unlike(f"{sorted(missing)} were not called as layers")

    # Runs

    def _run(self, args: Any, kwargs: Any) -> Any:
        self.position = 0
        with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(SEED)
            return self.home(*copy.deepcopy(args), **copy.deepcopy(kwargs))

    def play(self, layer: Played, x: Tensor) -> Tensor:
        way = self.way
        if way is None:
            y = torch.randn(*x.shape[:-1], layer.out_features)
            self.tape.append((layer.path, x.clone(), y))
            return y.clone()
        if self.position >= len(self.tape) or self.tape[self.position][0] != layer.path:
            raise Unlike(layer.path)
        _, x_whole, y = self.tape[self.position]
        self.position += 1
        wanted = self._piece(x_whole, 1, self.parts) if layer.path in self.branch.closers else x_whole
        if not _same(x, wanted):
            raise Unlike(layer.path)
        if layer.path in way.repeated:
            return self._piece(y, 1, way.groups)
        if layer.path in way.divided:
            first = way.divided[layer.path]
            return torch.cat([self._piece(y[..., :first], 1, self.parts), y[..., first:]], -1)
        return self._piece(y, way.fused[layer.path], self.parts) if layer.path in way.fused else y.clone()

    def _piece(self, x: Tensor, fused: int, parts: int) -> Tensor:
        if x.shape[-1] % (fused * parts):
            raise Unlike("it does not divide")
        blocks = x.unflatten(-1, (fused, parts, -1))
        return blocks[..., self.rank * parts // self.parts, :].flatten(-2)

    def fits(self, way: Way) -> bool:
        """Whether every rank would compute its part of the whole run."""
        self.way = way
        try:
            for rank in range(self.parts):
                self.rank = rank
                self._run_rank(way)
        except Exception:  # whatever the code of the model raises for sizes that it does not take
            return False
        finally:
            self.way = None
        return True

    def _run_rank(self, way: Way) -> None:
        changed: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for path, values in way.attributes.items():
                own = vars(self._module(path))
                changed += [(own, name, own[name]) for name in values]
                own.update(values)
            for path, dims in way.parameters.items():
                params: Any = self._module(path)._parameters
                changed += [(params, name, params[name]) for name in dims]
                for name, dim in dims.items():
                    piece = params[name].chunk(self.parts, dim)[self.rank]
                    params[name] = nn.Parameter(piece, requires_grad=False)
            result = self._run(*self._sliced(way))
        finally:
            for holder, name, value in changed:
                holder[name] = value
        if self.position != len(self.tape):
            raise Unlike("not all layers were called")
        self._compare(result)

    def _sliced(self, way: Way) -> tuple[Any, Any]:
        args, kwargs = list(self.args), dict(self.kwargs)
        names = list(inspect.signature(self.home.forward).parameters)
        for name, (dim, heads, _) in way.arguments.items():
            holder: Any = kwargs if name in kwargs else args
            key = name if name in kwargs else names.index(name)
            holder[key] = slice_heads(holder[key], dim, heads, self.parts, self.rank)
        return tuple(args), kwargs

    def _compare(self, result: Any) -> None:
        """What the home returns must be whole, but for scores of attention, which hold this rank's heads."""
        for own, whole in zip(tree_leaves(result), tree_leaves(self.result), strict=True):
            if not isinstance(own, Tensor) or _same(own, whole):
                continue
            if not self._is_piece(own, whole):
                raise Unlike("another result")

    def _is_piece(self, own: Tensor, whole: Tensor) -> bool:
        if own.ndim != whole.ndim:
            return False
        cut = [d for d in range(own.ndim) if own.shape[d] != whole.shape[d]]
        if len(cut) != 1 or own.shape[cut[0]] * self.parts != whole.shape[cut[0]]:
            return False
        return _same(own, whole.chunk(self.parts, cut[0])[self.rank])

    def _module(self, path: str) -> nn.Module:
        return self.home.get_submodule(path[len(self.branch.home) :].lstrip("."))

    # Search

    def find(self, known: list[Way]) -> Way | None:
        """A way that fits, if there is one; those that fitted other branches are tried first."""
        with looking_at(self.home, "cpu"):
            ways = itertools.chain(known, itertools.islice(self.ways(), MOST_TRIALS))
            return next((way for way in ways if self.fits(way)), None)

    def ways(self) -> Iterator[Way]:
        """Ways to cut the branch, the simplest first."""
        numbers = list(self._numbers())
        heads = self._heads(numbers)
        arguments, parameters = self._arguments(heads), self._parameters(heads)
        extras: list[dict[str, Any]] = [{}]
        extras += [{"arguments": arguments}] if arguments else []
        extras += [{"parameters": parameters}] if parameters else []
        extras += [{"arguments": arguments, "parameters": parameters}] if arguments and parameters else []
        kinds = list(self._kinds())
        for attributes in self._attributes(numbers, (self.parts,)):
            for extra in extras:
                for fused in (kind[0] for kind in kinds if not kind[1]):
                    yield Way(fused, attributes=attributes, **extra)
        for divided in self._divided_openers():
            for attributes in self._attributes(numbers, (self.parts,)):
                yield Way({}, divided=divided, attributes=attributes)
        for fused, repeated, groups in kinds:
            if repeated:
                divisors = (self.parts, groups, self.parts // groups)
                for attributes in self._attributes(numbers, divisors):
                    yield Way(fused, repeated, groups, attributes=attributes)

    def _heads(self, numbers: list[tuple[str, str, int]]) -> list[int]:
        """Numbers of heads, of queries or of keys, the largest first."""
        found = {value for _, name, value in numbers if counts_heads(name)}
        layers = {p.path: p for p in self.home.modules() if isinstance(p, Played)}
        inner = layers[self.branch.closers[0]].in_features
        widths = {inner, *(layers[path].out_features for path in self.branch.openers)}
        lengths = {v for _, name, v in numbers if "head" in name and ("dim" in name or "size" in name)}
        found |= {width // n for n in lengths for width in widths if width % n == 0 and width <= inner}
        return sorted((n for n in found if n > 1 and n % self.parts == 0), reverse=True)

    def _kinds(self) -> Iterator[tuple[dict[str, int], tuple[str, ...], int]]:
        widths = {p.path: p.out_features for p in self.home.modules() if isinstance(p, Played)}
        closed = {p.path: p.in_features for p in self.home.modules() if isinstance(p, Played)}
        inner = closed[self.branch.closers[0]]
        options = []
        for path in self.branch.openers:
            blocks = widths[path] // inner if widths[path] % inner == 0 else 1
            options.append(sorted({1, blocks}))
        for fused in itertools.product(*options):
            yield dict(zip(self.branch.openers, fused, strict=True)), (), 1
        few = tuple(path for path in self.branch.openers if widths[path] < inner)
        rest = {path: 1 for path in self.branch.openers if path not in few}
        for groups in range(self.parts - 1, 0, -1):
            if few and rest and self.parts % groups == 0:
                yield rest, few, groups

    def _divided_openers(self) -> Iterator[dict[str, int]]:
        layers = {p.path: p for p in self.home.modules() if isinstance(p, Played)}
        inner = layers[self.branch.closers[0]].in_features
        if len(self.branch.openers) == 1:
            (path,) = self.branch.openers
            width = layers[path].out_features
            if inner < width and width % inner and width % self.parts == 0:
                yield {path: inner}

    def _numbers(self) -> Iterator[tuple[str, str, int]]:
        for name, module in self.home.named_modules():
            if isinstance(module, Played) or type(module).__module__.startswith("torch."):
                continue
            path = f"{self.branch.home}.{name}" if name else self.branch.home
            for attribute, value in vars(module).items():
                if type(value) is int and value > 1 and not attribute.startswith("_"):
                    yield path, attribute, value

    def _attributes(
        self, numbers: list[tuple[str, str, int]], divisors: tuple[int, ...]
    ) -> Iterator[dict[str, dict[str, int]]]:
        """Choices of attributes that are divided: none, numbers of heads, and then others beside them."""
        yield {}
        heads = [n for n in numbers if counts_heads(n[1]) and n[2] % divisors[0] == 0]
        if len(divisors) == 1:
            counts = [_divided(heads, [divisors[0]] * len(heads))] if heads else [{}]
        else:
            heads = [n for n in numbers if "head" in n[1] or "group" in n[1]]
            every = [[d for d in dict.fromkeys((*divisors, 1)) if n[2] % d == 0] for n in heads]
            counts = [_divided(heads, choice) for choice in itertools.islice(itertools.product(*every), 64)]
        yield from (c for c in counts if c)
        others = [n for n in numbers if n not in heads and n[2] % divisors[0] == 0][:8]
        for count in range(1, len(others) + 1):
            for chosen in itertools.combinations(others, count):
                more = _divided(list(chosen), [divisors[0]] * count)
                for base in counts:
                    yield {p: {**base.get(p, {}), **more.get(p, {})} for p in {**base, **more}}

    def _arguments(self, heads: list[int]) -> dict[str, tuple[int, int, bool]]:
        """Floating-point arguments with a dim of all heads, which may be one with that of the batch."""
        names = inspect.signature(self.home.forward).parameters
        given = {**dict(zip(names, self.args, strict=False)), **self.kwargs}
        found = {}
        for name, value in given.items():
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 3:
                continue
            if value.ndim == 3 and value.shape[:2] == (BATCH, LENGTH):
                continue  # activations
            places = [
                (d, n, value.shape[d] != n)
                for n in heads
                for d in range(value.ndim - 1)
                if value.shape[d] in (n, n * BATCH)
            ]
            if places:
                found[name] = places[0]
        return found

    def _parameters(self, heads: list[int]) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for name, module in self.home.named_modules():
            if isinstance(module, Played):
                continue
            path = f"{self.branch.home}.{name}" if name else self.branch.home
            for param, tensor in module._parameters.items():
                dims = [] if tensor is None else [d for d, n in enumerate(tensor.shape) if n in heads]
                if len(dims) == 1:
                    found.setdefault(path, {})[param] = dims[0]
        return found


def counts_heads(name: str) -> bool:
    """Whether an attribute of this name is a number of heads."""
    return "head" in name and not any(word in name for word in ("dim", "size", "mask", "group"))


def _divided(numbers: list[tuple[str, str, int]], divisors: list[int] | tuple[int, ...]) -> dict[str, Any]:
    found: dict[str, dict[str, int]] = {}
    for (path, name, value), divisor in zip(numbers, divisors, strict=True):
        if divisor > 1:
            found.setdefault(path, {})[name] = value // divisor
    return found


def slice_heads(x: Tensor, dim: int, heads: int, parts: int, index: int) -> Tensor:
    """The heads of one rank, along a dim of heads, or of rows and heads."""
    split = x.unflatten(dim, (-1, heads)).chunk(parts, dim + 1)[index]
    return split.flatten(dim, dim + 1)


def _real(x: Any) -> Any:
    """A tensor with values in the place of one without."""
    if not isinstance(x, Tensor):
        return x
    if not x.is_meta:
        return x.detach().cpu().to(torch.get_default_dtype() if x.is_floating_point() else x.dtype)
    if x.is_floating_point():
        return torch.randn(x.shape)
    if x.dtype is torch.bool:
        return torch.rand(x.shape) > 0.5
    count = math.prod(x.shape)
    return (torch.arange(count) % LENGTH).reshape(x.shape).to(x.dtype)


def _same(own: Tensor, whole: Tensor) -> bool:
    if own.shape != whole.shape or own.dtype != whole.dtype:
        return False
    if not own.is_floating_point():
        return torch.equal(own, whole)
    return torch.allclose(own, whole, rtol=1e-3, atol=1e-4, equal_nan=True)


def try_branch(model: nn.Module, branch: LinearBranch, call: Call, parts: int) -> BranchTrial | None:
    """The trial of ``branch``; None if its code cannot be run alone."""
    with looking_at(model.get_submodule(branch.home), "cpu"):
        try:
            return BranchTrial(model, branch, call, parts)
        except Exception:
            return None
