"""``autoparallelize``: from a serial model to its parallel form, by a plan that is searched for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from colossalai.auto_parallel.tensor_shard.cluster import (
    AlphaBetaDict,
    device_of,
    extract_alpha_beta_for_device_mesh,
    initialize_device_mesh,
)
from colossalai.auto_parallel.tensor_shard.constructor import StrategiesConstructor
from colossalai.auto_parallel.tensor_shard.options import DataloaderOption, SolverOptions
from colossalai.auto_parallel.tensor_shard.ranks import MeshRanks
from colossalai.auto_parallel.tensor_shard.recompute import plan_with_recomputation, segments_of_names
from colossalai.auto_parallel.tensor_shard.runtime.placing import not_serial
from colossalai.auto_parallel.tensor_shard.solution import (
    Solution,
    choice_of_names,
    graph_fingerprint,
    load_solution,
    plan_of_choice,
)
from colossalai.auto_parallel.tensor_shard.solver import NoPlanError, solve_strategies
from colossalai.device import DeviceMesh
from colossalai.fx import OpGraph, trace_model
from colossalai.utils.text import bytes_of

MetaArgs = Mapping[str, Any] | Sequence[Any] | Tensor
SearchOptions = Mapping[str, Any]
"""Options of :func:`solve_solution`."""
_SEARCH = (
    "activation_checkpoint",
    "optimizer_states",
    *(p.name for p in inspect.signature(solve_strategies).parameters.values() if p.kind is p.KEYWORD_ONLY),
)


def autoparallelize(
    model: nn.Module,
    meta_args: MetaArgs | None = None,
    data_loader: Iterable[Any] | None = None,
    data_process_func: Callable[[Any], Any] | None = None,
    alpha_beta_dict: AlphaBetaDict | None = None,
    logical_mesh_shape: Sequence[int] | None = None,
    logical_mesh_id: Tensor | None = None,
    solver_preference: str = "standard",
    dataloader_option: str = "replicated",
    shard_option: str = "standard",
    save_solver_solution: bool = False,
    load_solver_solution: bool = False,
    solver_solution_path: str | Path | None = None,
    return_solution: bool = False,
    memory_budget: float | str = -1.0,
    **search: Any,
) -> Any:
    """Make ``model`` parallel over all devices of the job; every rank calls this.

    The batch is the whole one: tensors with its shapes, which may lie on the meta device, as a dict of the
    arguments of ``forward``, as a sequence of them, or one tensor.

    Args:
        meta_args: the batch; or give ``data_loader``.
        data_loader: its first batch is taken; ``data_process_func`` makes the arguments of it.
        alpha_beta_dict: latency and seconds per byte of every pair of ranks; measured if it is not given.
        logical_mesh_shape: the grid of devices; by default one whose rows have the fastest links.
        logical_mesh_id: the ranks as they lie on the grid, instead of its shape.
        solver_preference: ``standard``, or only ``dp`` (the batch is cut) or ``tp`` (it is not).
        dataloader_option: whether every rank loads the whole batch (``replicated``) or its part.
        shard_option: how much of the mesh operations must use: ``standard``, ``shard``, ``shard_last_axis``,
            ``full_shard``.
        save_solver_solution, load_solver_solution: write the solution to ``solver_solution_path``, or take it
            from there instead of searching.
        return_solution: return the model and its solution, a list of lines ``"{node} {strategy}"``.
        memory_budget: bytes of a rank, or a text such as ``"20 GiB"``, for parameters, gradients, states of
            the optimizer and activations; -1 for any.
        search: options of ``solve_strategies`` (``time_limit``, ``gap``, ``tie``, ``backend``);
            ``activation_checkpoint=True`` to also choose operations that run again in the backward pass;
            ``optimizer_states``, the number of states that an optimizer keeps of each parameter (2).

    Raises:
        InfeasibleBudgetError: no plan needs as little as the budget; the error names the least memory.
        ValueError: on every rank, before the model is changed.
    """
    if meta_args is None and data_loader is None:
        raise ValueError("autoparallelize needs the shapes of a batch: give meta_args, or data_loader")
    device_mesh = initialize_device_mesh(
        alpha_beta_dict=alpha_beta_dict,
        logical_mesh_shape=logical_mesh_shape,
        logical_mesh_id=logical_mesh_id,
    )
    if meta_args is None:
        assert data_loader is not None
        whole = dataloader_option in ("replicated", DataloaderOption.REPLICATED)
        parts = 1 if whole else device_mesh.num_devices
        meta_args = extract_meta_args_from_dataloader(data_loader, data_process_func, parts=parts)
    return initialize_model(
        model,
        meta_args,
        device_mesh,
        memory_budget=memory_budget,
        solver_preference=solver_preference,
        dataloader_option=dataloader_option,
        shard_option=shard_option,
        save_solver_solution=save_solver_solution,
        load_solver_solution=load_solver_solution,
        solution_path=solver_solution_path,
        return_solution=return_solution,
        **search,
    )


def initialize_model(
    model: nn.Module,
    meta_args: MetaArgs,
    device_mesh: DeviceMesh,
    memory_budget: float | str = -1.0,
    overlap: bool = False,
    solver_preference: str = "standard",
    dataloader_option: str = "replicated",
    shard_option: str = "standard",
    save_solver_solution: bool = False,
    load_solver_solution: bool = False,
    solution_path: str | Path | None = None,
    return_solution: bool = False,
    **search: Any,
) -> Any:
    """:func:`autoparallelize` on a given grid of devices.

    Args:
        overlap: accepted as documented; gradients are always summed while the backward pass goes on.
    """
    options = SolverOptions(solver_preference, dataloader_option, shard_option)  # type: ignore[arg-type]
    _check_arguments(memory_budget, save_solver_solution, load_solver_solution, solution_path)
    if unknown := sorted(set(search) - {*_SEARCH}):
        raise TypeError(
            f"autoparallelize has no option {unknown[0]!r}; those of its search are {', '.join(_SEARCH)}"
        )
    states = search.pop("optimizer_states", 2)
    if not isinstance(states, int) or isinstance(states, bool) or states < 0:
        raise ValueError(
            f"optimizer_states={states!r}; expected how many states the optimizer keeps of each parameter, 2"
            " for Adam"
        )
    for name in ("activation_checkpoint", "tie"):
        if not isinstance(search.get(name, False), bool):
            raise ValueError(f"{name}={search[name]!r}; expected True or False")
    if device_mesh.num_devices == 1:
        return (model, []) if return_solution else model
    ranks = MeshRanks(device_mesh.mesh)

    def constructed() -> StrategiesConstructor:
        graph = _trace(model, meta_args)
        return build_strategy_constructor(
            graph, device_mesh, options=options, model=model, optimizer_states=states
        )

    constructor = ranks.all_succeed(constructed)
    ranks.all_alike(graph_fingerprint(constructor.op_graph))
    path = solution_path if load_solver_solution else None
    own = ranks.first_succeeds(lambda: _answer(constructor, memory_budget, path, search))
    told = ranks.from_first(None if own is None else _as_message(own))
    solution = own or _from_message(constructor, told)
    if save_solver_solution:
        assert solution_path is not None
        ranks.all_succeed(lambda: solution.save(solution_path) if ranks.is_first else None)
    sharded = transform_to_sharded_model(model, solution, device_mesh)
    return (sharded, solution) if return_solution else sharded


def build_strategy_constructor(
    graph: OpGraph,
    device_mesh: DeviceMesh,
    solver_preference: str = "standard",
    dataloader_option: str = "replicated",
    shard_option: str = "standard",
    *,
    options: SolverOptions | None = None,
    model: nn.Module | None = None,
    optimizer_states: int = 2,
) -> StrategiesConstructor:
    """The strategies of a traced graph; ``model`` says on which devices it runs."""
    options = options or SolverOptions(solver_preference, dataloader_option, shard_option)  # type: ignore[arg-type]
    return StrategiesConstructor(
        graph,
        device_mesh,
        options,
        device=None if model is None else device_of(model),
        optimizer_states=optimizer_states,
        forward_only=not any(info.requires_grad for info in graph.parameters.values()),
    )


def solve_solution(
    strategy_constructor: StrategiesConstructor,
    memory_budget: float | str = -1.0,
    *,
    activation_checkpoint: bool = False,
    **search: Any,
) -> Solution:
    """The best plan of these strategies; see :func:`solve_strategies` for ``search``.

    Args:
        activation_checkpoint: also choose operations that run again in the backward pass, instead of keeping
            their tensors.
    """
    problem = strategy_constructor.problem
    budget = _budget(memory_budget)
    try:
        if activation_checkpoint:
            return Solution(problem, *plan_with_recomputation(problem, budget, **search))
        return Solution(problem, solve_strategies(problem.solver_graph.with_budget(budget), **search))
    except NoPlanError:
        options = problem.options
        chosen = {o.name: getattr(options, o.name).value for o in fields(options)}
        raise ValueError(
            f"no plan keeps to {', '.join(f'{name}={value!r}' for name, value in chosen.items())}: operations"
            " that these options cut stand beside others that run whole, and no conversion leads from one to"
            " the other; choose weaker options"
        ) from None


def transform_to_sharded_model(model: nn.Module, solution: Solution, device_mesh: DeviceMesh) -> nn.Module:
    """``model`` with its parameters cut and its forward pass replaced, as ``solution`` says."""
    from colossalai.auto_parallel.tensor_shard.runtime import transform

    return transform(model, solution.problem.graph.graph, solution.sharded, device_mesh)


def extract_meta_args_from_dataloader(
    data_loader: Iterable[Any], data_process_func: Callable[[Any], Any] | None = None, *, parts: int = 1
) -> Any:
    """The shapes of the first batch of a data loader, as arguments of ``forward`` on the meta device.

    ``data_process_func`` makes the arguments of a batch: a dict, a sequence or a tensor.  With
    ``parts`` ranks that load a part each, the batch is so many times as large.
    """
    batches = iter(data_loader)
    if batches is data_loader:
        raise ValueError(
            "data_loader is an iterator, whose first batch would be lost to training; give something that can"
            " be iterated anew, or meta_args"
        )
    with torch.random.fork_rng(devices=[]):
        try:
            batch = next(batches)
        except StopIteration:
            raise ValueError("data_loader has no batch; give meta_args") from None
    made = batch if data_process_func is None else data_process_func(batch)
    if not isinstance(made, (Mapping, Sequence, Tensor)) or isinstance(made, str):
        raise ValueError(
            f"the batch is a {type(made).__name__}; expected a dict of the arguments of forward, a sequence"
            " of them or a tensor: let data_process_func make one"
        )

    def shape(x: Tensor) -> Tensor:
        size = (x.shape[0] * parts, *x.shape[1:]) if x.ndim else x.shape
        return torch.empty(size, dtype=x.dtype, device="meta")

    return tree_map_only(Tensor, shape, made)


def _budget(memory_budget: float | str) -> float | None:
    """The bytes that were asked for; None for any."""
    if isinstance(memory_budget, str):
        try:
            found: float = bytes_of(memory_budget)
        except ValueError as error:
            raise ValueError(f"memory_budget={memory_budget!r}: {error}") from None
    elif isinstance(memory_budget, (int, float)) and not isinstance(memory_budget, bool):
        found = memory_budget
    else:
        found = 0
    if found == -1:
        return None
    if not 0 < found < float("inf"):
        raise ValueError(
            f"memory_budget={memory_budget!r}; expected bytes, a text such as '20 GiB', or -1 for no budget"
        )
    return found


def _check_arguments(memory_budget: float | str, save: bool, load: bool, path: str | Path | None) -> None:
    _budget(memory_budget)
    if (save or load) and path is None:
        raise ValueError(
            f"{'save' if save else 'load'}_solver_solution=True needs solver_solution_path, the name of a"
            " file"
        )


def _trace(model: nn.Module, meta_args: MetaArgs) -> OpGraph:
    if (problem := not_serial(model)) is not None:
        raise ValueError(problem)
    if isinstance(meta_args, Mapping):
        known = inspect.signature(model.forward).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
        if not takes_any and (strange := [name for name in meta_args if name not in known]):
            raise ValueError(
                f"meta_args names {strange[0]!r}, which forward of {type(model).__name__} does not take; it"
                f" takes {', '.join(known)}"
            )
        return trace_model(model, **meta_args)
    if isinstance(meta_args, Tensor):
        return trace_model(model, meta_args)
    if not isinstance(meta_args, Sequence) or isinstance(meta_args, str):
        raise ValueError(
            f"meta_args={meta_args!r}; expected a dict of the arguments of forward, a sequence of them, or"
            " one tensor"
        )
    return trace_model(model, *meta_args)


def _answer(
    constructor: StrategiesConstructor,
    memory_budget: float | str,
    path: str | Path | None,
    search: SearchOptions,
) -> Solution:
    if path is None:
        return solve_solution(constructor, memory_budget, **search)
    return load_solution(path, constructor.problem)


def _as_message(solution: Solution) -> dict[str, Any]:
    """What other ranks must know of a solution."""
    plan = solution.plan
    certificate = {name: getattr(plan, name) for name in _CERTIFICATE}
    return {
        "names": solution.strategies,
        "budget": plan.graph.memory_budget,
        "certificate": certificate,
        "recomputed": solution.sharded.recomputed,
    }


_CERTIFICATE = ("lower_bound", "memory_price", "backend", "tied", "seconds")


def _from_message(constructor: StrategiesConstructor, told: dict[str, Any]) -> Solution:
    """The solution of the first rank, of the strategies of this one."""
    problem = constructor.problem
    plan = plan_of_choice(problem, choice_of_names(told["names"], problem, "the first rank"))
    graph = problem.solver_graph.with_budget(told["budget"])
    plan = replace(plan, graph=graph, **told["certificate"])
    return Solution(problem, plan, segments_of_names(problem, plan.choice, told["recomputed"]))


class ModuleWrapper(nn.Module):
    """Calls a module with further arguments, which are the same in every call."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module, self.args, self.kwargs = module, args, kwargs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, *self.args, **{**self.kwargs, **kwargs})


__all__ = [
    "ModuleWrapper",
    "autoparallelize",
    "build_strategy_constructor",
    "extract_alpha_beta_for_device_mesh",
    "extract_meta_args_from_dataloader",
    "initialize_device_mesh",
    "initialize_model",
    "solve_solution",
    "transform_to_sharded_model",
]
