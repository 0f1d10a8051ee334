"""Modules whose weights are cut by a name instead of a spec for each: ``init_colo_module``."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from colossalai.tensor import (
    ColoParameter,
    ComputePattern,
    ComputeSpec,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
)

DEFAULT = "default"


class ColoModule:
    """The ways in which the parameters of a kind of module may be cut.

    A way is a name, such as ``'row'``, and the dim along which each parameter is cut; a parameter that it
    does not name stays whole.
    """

    def __init__(self) -> None:
        self._ways: dict[ComputePattern, dict[str, dict[str, int]]] = {}

    def register(self, compute_pattern: ComputePattern, cuts: Mapping[str, int], mode: str = DEFAULT) -> None:
        """Add the way ``mode``: ``cuts`` has the dim of each parameter that is cut."""
        self._ways.setdefault(compute_pattern, {})[mode] = dict(cuts)

    def cuts(self, compute_pattern: ComputePattern, mode: str) -> dict[str, int]:
        """Return the dims of the way ``mode``; refuses one that there is not."""
        ways = self._ways.get(compute_pattern, {})
        if mode not in ways:
            raise ValueError(
                f"{type(self).__name__} has no mode {mode!r} for {compute_pattern}; it has"
                f" {', '.join(map(repr, ways)) or 'none'}"
            )
        return ways[mode]

    def modes(self, compute_pattern: ComputePattern) -> list[str]:
        return list(self._ways.get(compute_pattern, ()))


class ColoLinear(ColoModule):
    """A linear layer: ``'row'`` cuts its inputs, which is the default, ``'col'`` its outputs."""

    def __init__(self) -> None:
        super().__init__()
        for mode, cuts in {"row": {"weight": -1}, "col": {"weight": 0, "bias": 0}}.items():
            self.register(ComputePattern.TP1D, cuts, mode)
        self.register(ComputePattern.TP1D, {"weight": -1})


class ColoEmbedding(ColoModule):
    """A table: ``'row'`` cuts its vocabulary, which is the default, ``'col'`` its features."""

    def __init__(self) -> None:
        super().__init__()
        for mode, cuts in {"row": {"weight": 0}, "col": {"weight": -1}}.items():
            self.register(ComputePattern.TP1D, cuts, mode)
        self.register(ComputePattern.TP1D, {"weight": 0})


_registered: dict[type[nn.Module], ColoModule] = {}


def register_colo_module(module_type: type[nn.Module], colo_module: ColoModule) -> None:
    """Let modules of ``module_type`` be cut in the ways of ``colo_module``."""
    if not isinstance(colo_module, ColoModule):
        raise TypeError(f"register_colo_module needs a ColoModule, got {colo_module!r}")
    _registered[module_type] = colo_module


def is_colo_module(module: nn.Module) -> bool:
    """Return whether ``module`` is of a kind that was registered."""
    return any(isinstance(module, kind) for kind in _registered)


def get_colo_module(module: nn.Module) -> ColoModule | None:
    """Return the ways in which ``module`` may be cut; None if its kind was not registered."""
    return next((found for kind, found in _registered.items() if isinstance(module, kind)), None)


def init_colo_module(
    module: nn.Module,
    compute_spec: ComputeSpec,
    pg: ProcessGroup,
    recursive: bool = True,
    mode: str = DEFAULT,
) -> None:
    """Cut the parameters of ``module``, and of the modules in it, in the way ``mode``.

    The parameters must be ColoParameters, as in a model that is built inside ``ColoInitContext``.  Modules of
    other kinds stay as they are.
    """
    chosen = []
    for path, part in module.named_modules() if recursive else [("", module)]:
        ways = get_colo_module(part)
        if ways is not None:
            chosen.append((path, part, ways.cuts(compute_spec.compute_pattern, mode)))
    _check_parameters(chosen)
    for _, part, cuts in chosen:
        for name, param in part.named_parameters(recurse=False):
            assert isinstance(param, ColoParameter)
            param.set_process_group(pg)
            whole = name not in cuts
            dist_spec = ReplicaSpec() if whole else ShardSpec([cuts[name]], [pg.tp_world_size()])
            param.set_tensor_spec(dist_spec, compute_spec)


def _check_parameters(chosen: list[tuple[str, nn.Module, dict[str, int]]]) -> None:
    for path, part, _ in chosen:
        for name, param in part.named_parameters(recurse=False):
            if not isinstance(param, ColoParameter):
                raise TypeError(
                    f"init_colo_module: parameter {f'{path}.{name}'.strip('.')!r} is a"
                    f" {type(param).__name__}, no ColoParameter; build the model inside ColoInitContext"
                )


def check_colo_module(module: nn.Module, pg: ProcessGroup, recursive: bool = True) -> None:
    """Refuse a module of a registered kind that is cut in no way of its kind."""
    for path, part in module.named_modules() if recursive else [("", module)]:
        ways = get_colo_module(part)
        if ways is None:
            continue
        found = {name: _cut_of(param) for name, param in part.named_parameters(recurse=False)}
        cut = {name: dim for name, dim in found.items() if dim is not None}
        known = [ways.cuts(ComputePattern.TP1D, mode) for mode in ways.modes(ComputePattern.TP1D)]
        shapes = {name: param.dim() for name, param in part.named_parameters(recurse=False)}
        fits = [{n: d % shapes[n] for n, d in way.items() if n in shapes} for way in known]
        if cut and pg.tp_world_size() > 1 and cut not in fits:
            raise ValueError(
                f"the parameters of module {path!r} ({type(part).__name__}) are cut along the dims {cut};"
                f" {type(ways).__name__} has the modes"
                f" {', '.join(map(repr, ways.modes(ComputePattern.TP1D)))}"
            )


def _cut_of(param: nn.Parameter) -> int | None:
    if not isinstance(param, ColoParameter) or not isinstance(param.dist_spec, ShardSpec):
        return None
    return param.dist_spec.dims[0] % param.dim()


register_colo_module(nn.Linear, ColoLinear())
register_colo_module(nn.Embedding, ColoEmbedding())
