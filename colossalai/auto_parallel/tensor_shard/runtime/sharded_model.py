"""``transform``: from a serial model and a plan to the same model, run by the plan on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_unflatten

from colossalai.auto_parallel.tensor_shard.runtime.call_form import CallForm
from colossalai.auto_parallel.tensor_shard.runtime.evaluation import check_evaluation, evaluation_graph
from colossalai.auto_parallel.tensor_shard.runtime.gradient_buckets import GradientBuckets
from colossalai.auto_parallel.tensor_shard.runtime.placing import place_state, placing_problem
from colossalai.auto_parallel.tensor_shard.runtime.plain_scripts import warn_of_pieces, watch_plain_scripts
from colossalai.auto_parallel.tensor_shard.runtime.program import Program, build_program, state_of
from colossalai.auto_parallel.tensor_shard.runtime.random_pieces import RandomPieces
from colossalai.auto_parallel.tensor_shard.sharded_plan import ShardedPlan
from colossalai.device import DeviceMesh
from colossalai.fx.nodes import named_state, target_name
from colossalai.fx.op_graph import OpGraph
from colossalai.mesh import Layout, Mesh, local_shape, placement, replicated
from colossalai.mesh.agreement import FirstStep
from colossalai.mesh.weights.deferred import materialize
from colossalai.nn.policies.wrap_forward import ForwardWrapper, save_whole_model, wrap_forward
from colossalai.tensor.d_tensor import DTensor
from colossalai.tensor.d_tensor.layout import DeviceLayout
from colossalai.tensor.sharding_spec import ShardingSpec


def transform(model: nn.Module, graph: OpGraph, plan: ShardedPlan, mesh: Mesh | DeviceMesh) -> nn.Module:
    """Let ``model``, of which ``graph`` was traced, run by ``plan``; every rank of the job calls this.

    The model stays the object that it is, under the names that it has, and keeps its arguments and results.
    Its parameters become pieces.  Nothing is changed unless all ranks have found that everything fits.

    Raises:
        ValueError: on all ranks, where the plan does not fit the model, the graph or the mesh.
    """
    problem, run = None, None
    core = mesh if isinstance(mesh, Mesh) else mesh.mesh
    try:
        problem = _problem(model, plan, core)
        if problem is None:
            run = PlannedRun(model, graph, plan, core)
    except (ValueError, KeyError, NotImplementedError) as error:
        problem = str(error)
    told = _everyone((problem, _digest(graph, plan), torch.initial_seed()))
    for rank, (text, digest, _) in enumerate(told):
        if text is not None:
            raise ValueError(f"{text} (rank {rank})")
        if digest != told[0][1]:
            raise ValueError(
                f"rank {rank} has another plan or another graph than rank 0; let one rank solve and give the"
                " others its answer, and build the model alike on all ranks"
            )
    assert run is not None
    run.numbers.stream.seed = told[0][2]
    place_state(model, plan.parameters, core)
    materialize(model)  # tensors that are neither parameters nor buffers
    leaves = {id(model.get_submodule(path)) for path in run.program.leaves}
    for part in model.modules():
        if part is not model and id(part) not in leaves and _is_cut(part):
            wrap_forward(part, PartOfPlan)
    runs: Any = wrap_forward(model, RunsPlan)
    runs.planned = run
    watch_plain_scripts(model)
    return model


def _problem(model: nn.Module, plan: ShardedPlan, mesh: Mesh) -> str | None:
    if dict(mesh.size) != dict(plan.axes):
        return f"the plan is for a mesh of {plan.axes}, and this one has {dict(mesh.size)}"
    if (world := dist.get_world_size()) != mesh.group_size(*mesh.size):
        return (
            f"the mesh has {mesh.group_size(*mesh.size)} places, and the job has {world} ranks; a plan runs"
            " on all of them"
        )
    return placing_problem(model, plan.parameters, mesh)


def _everyone(fact: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, fact)
    return found


def _digest(graph: OpGraph, plan: ShardedPlan) -> str:
    nodes = [(node.op, target_name(node), node.name) for node in graph.module.graph.nodes]
    layouts = [sorted((k, str(v)) for k, v in part.items()) for part in (plan.parameters, plan.inputs)]
    plans = [
        (name, [str(layout) for layout in (*own.inputs, *own.computed, *own.outputs)])
        for name, own in sorted(plan.nodes.items())
    ]
    return hashlib.sha256(repr((nodes, layouts, plans)).encode()).hexdigest()


def _is_cut(part: nn.Module) -> bool:
    return any(placement(t).sharded for state in (part.parameters(), part.buffers()) for t in state)


class PlannedRun:
    """How one model runs: its programs in training and in evaluation, and what they need."""

    def __init__(self, model: nn.Module, graph: OpGraph, plan: ShardedPlan, mesh: Mesh) -> None:
        self.graph, self.plan, self.mesh = graph, plan, mesh
        self.form = CallForm(model.forward, graph, plan.inputs, self.mesh)
        self.numbers = RandomPieces(0, self.mesh)
        self.buckets = GradientBuckets(self.mesh, plan.links)
        self.program = self._build(graph)
        self._in_evaluation: Program | None = None
        self._modes = _modes(model)
        self._tensors = {
            name: (t.dtype, t.device, local_shape(tuple(t.shape), self._rest(name, t), self.mesh))
            for name, t in named_state(model).items()
        }
        distributed = any(layout.sharded for layout in plan.inputs.values())
        axes = () if distributed else tuple(axis for axis, size in self.mesh.size.items() if size > 1)
        self.first_step = FirstStep(self.mesh, axes)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedRun:
        return self  # it holds nothing of the model

    def _rest(self, name: str, tensor: Tensor) -> Layout:
        return self.plan.parameters.get(name, replicated(tensor.ndim))

    def _build(self, graph: OpGraph) -> Program:
        return build_program(graph, self.plan, self.mesh, self.numbers, self.buckets)

    @_disable_dynamo
    def call(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], compiles: bool = False
    ) -> Any:
        """What ``model(*args, **kwargs)`` returns; of what happens here, torch.compile gets the program."""
        leaves = self.form.leaves(args, kwargs)
        program = self._program(model, args, kwargs)
        state = state_of(model, program)
        self._check_state(program, state)
        if not self.first_step.done:
            self.first_step.before(model, {**kwargs, **{f"argument {i}": a for i, a in enumerate(args)}})
        run = program.compiled if compiles else program.module
        results = run(*leaves, self.numbers.begin(draws=program.draws), *state)
        found = [self._handed_out(r, layout) for r, layout in zip(results, program.outputs, strict=True)]
        for place, value in self.graph.constants.items():
            found[place] = value
        output = tree_unflatten(found, self.graph.out_spec)
        if not self.first_step.done:
            self.first_step.after(model, results)
        return output

    def _program(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        modes = _modes(model)
        if modes == self._modes:
            return self.program
        if self._modes[0] and not any(modes):
            if self._in_evaluation is None:
                try:
                    graph = evaluation_graph(self.graph)
                except ValueError as error:
                    raise RuntimeError(
                        f"the plan was made for training, and cannot evaluate: {error}; evaluate a copy of"
                        " the model, from a checkpoint of this one"
                    ) from None
                check_evaluation(model, graph, args, kwargs)
                self._in_evaluation = self._build(graph)
            return self._in_evaluation
        names = [name or "the model" for name, _ in model.named_modules()]
        where = next(i for i, (a, b) in enumerate(zip(modes, self._modes, strict=True)) if a != b)
        before, now = (("training" if modes[where] else "evaluation") for modes in (self._modes, modes))
        raise RuntimeError(
            f"{names[where]} was in {before} when the plan was made, and is in {now}; a plan made in training"
            " also runs with the whole model in evaluation, and no other way"
        )

    def _check_state(self, program: Program, state: list[Any]) -> None:
        for name, tensor in zip(program.state, state, strict=False):
            dtype, device, shape = self._tensors[name]
            if tuple(tensor.shape) != shape:
                raise RuntimeError(
                    f"{name!r} has shape {tuple(tensor.shape)}, and its piece {shape} when the plan was made:"
                    " another tensor has taken its place; change the model before autoparallelize"
                )
            if tensor.dtype != dtype or tensor.device.type != device.type:
                raise RuntimeError(
                    f"{name!r} is {tensor.dtype} on {tensor.device}, and was {dtype} on {device} when the"
                    " plan was made, which has recorded both; cast and move the model before autoparallelize"
                )

    def _handed_out(self, result: Any, layout: Layout | None) -> Any:
        """A result as the script gets it: what is not whole says so."""
        if layout is None or not layout.sharded:
            return result
        if self.graph.loss is None:  # of this rank's samples; the loss is the mean over ranks
            return _MeanOfRanks.apply(result, self.mesh.group_size(*layout.sharded))
        shape = [n * self.mesh.group_size(*axes) for n, axes in zip(result.shape, layout.dims, strict=True)]
        cuts = {d: [int(axis) for axis in axes] for d, axes in enumerate(layout.dims) if axes}
        grid = _grid_of(self.mesh)
        spec = ShardingSpec(grid, torch.Size(shape), dim_partition_dict=cuts)
        return DTensor(result, DeviceLayout(grid, result.device, spec, shape))


_grids: WeakKeyDictionary[Mesh, DeviceMesh] = WeakKeyDictionary()


def _grid_of(mesh: Mesh) -> DeviceMesh:
    """``mesh`` as documents of distributed tensors describe it."""
    if mesh not in _grids:
        shape = tuple(mesh.size.values())
        ranks = torch.tensor(mesh.ranks(*mesh.size))
        grid = DeviceMesh(torch.arange(len(ranks)), logical_mesh_id=ranks.view(shape), need_flatten=False)
        grid.__dict__["mesh"] = mesh  # and not groups of its own
        _grids[mesh] = grid
    return _grids[mesh]


def _modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


class _MeanOfRanks(torch.autograd.Function):
    """Samples of this rank's own, whose loss is one of several that are averaged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.ranks, None


class RunsPlan(ForwardWrapper):
    """A model whose forward pass is that of its plan."""

    planned: PlannedRun
    told_of_pieces: bool = False

    def around(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert isinstance(self, nn.Module)
        return self.planned.call(self, args, kwargs, torch.compiler.is_compiling())

    @property
    def serial_forward(self) -> Callable[..., Any]:
        return super().forward  # type: ignore[misc]

    def state_dict(self, *args: Any, keep_vars: bool = False, **kwargs: Any) -> Any:
        """As any module's, with the pieces of this rank, of which it warns once."""
        if not keep_vars and not self.told_of_pieces and _is_cut(self):  # type: ignore[arg-type]
            self.told_of_pieces = True
            warn_of_pieces(self)  # type: ignore[arg-type]
        return super().state_dict(*args, keep_vars=keep_vars, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """As any module's, with the pieces of this rank."""
        try:
            return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]
        except RuntimeError as error:
            if "size mismatch" not in str(error):
                raise
            raise RuntimeError(
                f"{error}\n\tParameters of this model are pieces, as the plan of autoparallelize says, and"
                " load_state_dict takes those of this rank; a file of the whole model is loaded by"
                " colossalai.booster.Booster().load_model(model, path), which every rank calls, or before"
                " autoparallelize"
            ) from None

    def save_pretrained(self, save_directory: Any, **options: Any) -> None:
        """Write the whole model as transformers does; every rank must call it, and rank 0 writes."""
        save = super().save_pretrained  # type: ignore[misc]
        save_whole_model(self, save, self.planned.mesh, save_directory, options)


class PartOfPlan(ForwardWrapper):
    """A module with pieces of parameters, which only the whole model's plan can use."""

    def around(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise RuntimeError(
            f"a {type(self).__name__} was called by itself, but it holds pieces of parameters, which the plan"
            " of autoparallelize uses when the whole model is called; call the model"
        )
