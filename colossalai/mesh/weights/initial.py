"""Initial weights that do not depend on the plan.

``initialize(model, seed)`` gives every parameter its first value from the key (seed, name of the parameter).
A model whose parameters are pieces (see :mod:`colossalai.mesh.parameter`), or that was built on the meta
device, gets exactly the pieces of the values that the serial model gets; no rank builds a tensor larger than
its own piece.

What a parameter is drawn from is, in this order:

1. the attribute ``init`` of the parameter, one of the distributions below (``set_init``);
2. the row of its module's class in ``RECIPES``, which are torch's own defaults;
3. the module's ``reset_parameters()``, run on whole tensors under a generator seeded by the module's name:
   always right, but it does build these tensors whole, one module at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colossalai.mesh.layout import Layout, local_shape, replicated, shard
from colossalai.mesh.mesh import Mesh
from colossalai.mesh.parameter import PlacedParameter, full_shape, place, placement
from colossalai.mesh.random import (
    fill_from,
    normal_numbers,
    random_key,
    truncated_normal_numbers,
    uniform_numbers,
)


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float = 0.0

    def numbers(self, key: int, index: Tensor) -> Tensor:
        return torch.full(index.shape, self.value, device=index.device)


@dataclass(frozen=True)
class Uniform:
    """Uniform between ``low`` and ``high``."""

    low: float = 0.0
    high: float = 1.0

    def numbers(self, key: int, index: Tensor) -> Tensor:
        return uniform_numbers(key, index).mul_(self.high - self.low).add_(self.low)


@dataclass(frozen=True)
class Normal:
    """Normal, with this mean and standard deviation."""

    mean: float = 0.0
    std: float = 1.0

    def numbers(self, key: int, index: Tensor) -> Tensor:
        return normal_numbers(key, index).mul_(self.std).add_(self.mean)


@dataclass(frozen=True)
class ZeroRow:
    """``other``, but row ``row`` of a table of ``width`` columns is zero: an embedding's padding index."""

    other: Distribution
    row: int
    width: int

    def numbers(self, key: int, index: Tensor) -> Tensor:
        row = torch.div(index, self.width, rounding_mode="floor")
        return self.other.numbers(key, index).masked_fill_(row == self.row, 0.0)


@dataclass(frozen=True)
class TruncatedNormal:
    """``Normal`` without what lies outside of [low, high]."""

    mean: float = 0.0
    std: float = 1.0
    low: float = -2.0
    high: float = 2.0

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"a truncated normal needs low < high, got {self.low} and {self.high}")

    def numbers(self, key: int, index: Tensor) -> Tensor:
        bounds = ((self.low - self.mean) / self.std, (self.high - self.mean) / self.std)
        return truncated_normal_numbers(key, index, *bounds).mul_(self.std).add_(self.mean)


@dataclass(frozen=True)
class Transposed:
    """Another distribution for a matrix that is stored (columns, rows): the same number for the same
    element.
    """

    other: Distribution
    rows: int
    columns: int

    def numbers(self, key: int, index: Tensor) -> Tensor:
        column = torch.div(index, self.rows, rounding_mode="floor")
        return self.other.numbers(key, (index - column * self.rows) * self.columns + column)


Distribution = Constant | Uniform | Normal | TruncatedNormal | ZeroRow | Transposed

Recipe = Callable[[nn.Module], Distribution]


def _fan_in_uniform(module: nn.Module) -> Distribution:
    """What torch draws weights and biases of linear and convolution layers from."""
    shape = full_shape(module.weight)  # type: ignore[arg-type]
    fan_in = math.prod(shape[1:])
    return Uniform(-1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in)) if fan_in else Constant(0.0)


def _embedding(module: nn.Module) -> Distribution:
    assert isinstance(module, nn.Embedding)
    normal = Normal()
    return normal if module.padding_idx is None else ZeroRow(normal, module.padding_idx, module.embedding_dim)


def _zeros(_: nn.Module) -> Distribution:
    return Constant(0.0)


def _ones(_: nn.Module) -> Distribution:
    return Constant(1.0)


_AFFINE: dict[str, Recipe] = {"weight": _ones, "bias": _zeros}
_FAN_IN: dict[str, Recipe] = {"weight": _fan_in_uniform, "bias": _fan_in_uniform}

RECIPES: dict[type[nn.Module], dict[str, Recipe]] = {
    nn.Linear: _FAN_IN,
    nn.Conv1d: _FAN_IN,
    nn.Conv2d: _FAN_IN,
    nn.Conv3d: _FAN_IN,
    nn.Embedding: {"weight": _embedding},
    nn.LayerNorm: _AFFINE,
    nn.RMSNorm: _AFFINE,
    nn.GroupNorm: _AFFINE,
    nn.BatchNorm1d: _AFFINE,
    nn.BatchNorm2d: _AFFINE,
    nn.BatchNorm3d: _AFFINE,
}


def set_init(param: Tensor, distribution: Distribution) -> None:
    """Say what ``initialize`` draws ``param`` from."""
    param.init = distribution  # type: ignore[attr-defined]


def draw(
    distribution: Distribution,
    key: int,
    shape: tuple[int, ...],
    layout: Layout | None = None,
    mesh: Mesh | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    uneven: bool = False,
) -> Tensor:
    """This rank's piece of a tensor of ``shape`` drawn from ``distribution``; the whole is never built."""
    local = shape if layout is None or mesh is None else local_shape(shape, layout, mesh, uneven=uneven)
    out = torch.empty(local, dtype=dtype, device=device)
    return fill_from(lambda index: distribution.numbers(key, index), out, shape, layout, mesh, uneven=uneven)


def place_parameters(module: nn.Module, layouts: dict[str, Layout], mesh: Mesh) -> nn.Module:
    """Turn the named parameters of a model on the meta device into (still empty) pieces in ``layouts``."""
    names = dict(module.named_parameters())
    if unknown := sorted(set(layouts) - set(names)):
        raise ValueError(f"the model has no parameter {unknown[0]!r}; it has {', '.join(names)}")
    for name, layout in layouts.items():
        old = names[name]
        if not old.is_meta:
            raise ValueError(
                f"parameter {name!r} is on {old.device}; build the model under torch.device('meta') first"
            )
        shape = tuple(old.shape)
        new = torch.empty(local_shape(shape, layout, mesh), dtype=old.dtype, device="meta")
        _replace(module, old, _like(old, place(new, layout, shape)))
    return module


def initialize(
    module: nn.Module, seed: int, mesh: Mesh | None = None, device: torch.device | str | None = None
) -> nn.Module:
    """Give every parameter of ``module`` its initial value for ``seed``; parameters on meta get storage on
    ``device``.

    Tied parameters are drawn once, under their first name.  Buffers keep their values; those on the meta
    device are rebuilt by ``reset_parameters`` of their module.
    """
    for param, value in initial_values(module, seed, mesh, device):
        _assign(module, param, value)
    return module


def initial_values(
    module: nn.Module, seed: int, mesh: Mesh | None = None, device: torch.device | str | None = None
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Every parameter of ``module`` with its initial value, drawn when it is asked for; buffers on meta get
    theirs on the way.
    """
    done: list[Tensor] = []  # the objects themselves: the number of one that is gone may be given to another
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        own = {n: p for n, p in owner.named_parameters(recurse=False) if id(p) not in seen}
        lost = [n for n, b in owner.named_buffers(recurse=False) if b.is_meta]
        drawn: dict[str, Tensor] = {}
        recipes = {n: _distribution(owner, n, p) for n, p in own.items()}
        if lost or None in recipes.values():
            drawn = _reset_whole(owner, random_key(seed, prefix, "reset_parameters"), prefix)
        for name, param in own.items():
            key = random_key(seed, f"{prefix}.{name}" if prefix else name)
            yield param, _initial_value(param, recipes[name], drawn.get(name), key, mesh, device)
            # it may have been replaced
            for tensor in (param, owner._parameters[name]):
                if tensor is not None:
                    done.append(tensor)
                    seen.add(id(tensor))
        for name in lost:
            owner._buffers[name] = drawn[name].to(device or "cpu")


def _distribution(owner: nn.Module, name: str, param: Tensor) -> Distribution | None:
    own: Distribution | None = getattr(param, "init", None)
    if own is not None:
        return own
    recipe = RECIPES.get(type(owner), {}).get(name)
    return recipe(owner) if recipe else None


def _initial_value(
    param: Tensor,
    distribution: Distribution | None,
    whole: Tensor | None,
    key: int,
    mesh: Mesh | None,
    device: torch.device | str | None,
) -> Tensor:
    layout, shape = placement(param), tuple(full_shape(param))
    if layout != replicated(param.ndim) and mesh is None:
        raise ValueError(f"a parameter of shape {shape} lies in {layout}: initialize() needs its mesh")
    where = param.device if not param.is_meta else torch.device(device or "cpu")
    if distribution is None:
        assert whole is not None
        piece = whole if mesh is None else shard(whole, layout, mesh, uneven=True)
        return piece.to(where, param.dtype)
    return draw(distribution, key, shape, layout, mesh, dtype=param.dtype, device=where, uneven=True)


def _reset_whole(owner: nn.Module, key: int, name: str) -> dict[str, Tensor]:
    """Parameters and buffers of ``owner`` itself, as its ``reset_parameters`` makes them on whole CPU
    tensors.
    """
    reset = getattr(owner, "reset_parameters", None) or getattr(owner, "_reset_parameters", None)
    if not callable(reset):
        if lost := [n for n, b in owner.named_buffers(recurse=False) if b.is_meta]:
            raise ValueError(
                f"the buffer {lost[0]!r} of {name or 'the model'!r} ({type(owner).__name__}) is on the meta"
                " device and has no values: make it with device='cpu', or give its module a"
                " reset_parameters() that fills it"
            )
        raise ValueError(
            f"nothing says how to draw the parameters of {name or 'the model'!r} ({type(owner).__name__}):"
            " call set_init(param, ...), add its class to colossalai.mesh.weights.initial.RECIPES, or give"
            " it a reset_parameters()"
        )
    kept = dict(owner._parameters), dict(owner._buffers)
    try:
        for n, p in kept[0].items():
            if p is not None:
                owner._parameters[n] = nn.Parameter(
                    torch.empty(full_shape(p), dtype=p.dtype), p.requires_grad
                )
        for n, b in kept[1].items():
            if b is not None:
                owner._buffers[n] = torch.empty(b.shape, dtype=b.dtype)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(key % (1 << 63))
            reset()
        return {
            n: t.detach() for n, t in (*owner._parameters.items(), *owner._buffers.items()) if t is not None
        }
    finally:
        owner._parameters.update(kept[0])
        owner._buffers.update(kept[1])


def _assign(module: nn.Module, param: Tensor, value: Tensor) -> Tensor:
    """Write ``value`` into ``param``; a parameter without storage is replaced wherever it is used."""
    if not param.is_meta:
        with torch.no_grad():
            param.copy_(value)
        return param
    return _replace(module, param, _like(param, value))


def _like(param: Tensor, data: Tensor) -> nn.Parameter:
    kind = PlacedParameter if "placement" in {**param.__dict__, **data.__dict__} else nn.Parameter
    new = kind(data, requires_grad=param.requires_grad)
    new.__dict__.update({**param.__dict__, **data.__dict__})  # placement, init, and what users keep there
    return new


def give_storage(module: nn.Module, param: Tensor, data: Tensor) -> nn.Parameter:
    """Replace a parameter on the meta device, wherever ``module`` uses it, by one with ``data``; returns
    it.
    """
    return _replace(module, param, _like(param, data))


def _replace(module: nn.Module, old: Tensor, new: nn.Parameter) -> nn.Parameter:
    for owner in module.modules():
        for name, p in owner._parameters.items():
            if p is old:
                owner._parameters[name] = new
    return new
