"""``TorchFSDPPlugin``: weights, gradients and optimizer states are cut over the ranks, by torch's FSDP2.

``fully_shard`` replaces each parameter by a ``DTensor`` of which this rank holds a part of the rows, and
gathers the whole of it only while its unit (see ``find_units`` in ``fsdp_model``) computes.  The optimizer of
the user's script was built on the parameters of before; it is pointed to the new ones, in the same groups and
order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.torch_version import TorchVersion

from colossalai.amp.naive_amp import FP16Optimizer
from colossalai.booster.plugin.dp import DPPluginBase, check_backend, host_group
from colossalai.booster.plugin.fsdp_lockstep import Lockstep, compare_ranks, fsdp_params
from colossalai.booster.plugin.fsdp_model import (
    Policy,
    TorchFSDPModel,
    TorchFSDPOptimizer,
    check_policy,
    find_units,
    make_room,
)
from colossalai.booster.plugin.fsdp_outputs import see_outputs
from colossalai.booster.plugin.gradient_watch import GradientWatch
from colossalai.checkpoint_io import CheckpointIO, GatheredCheckpointIO
from colossalai.cluster import DistCoordinator
from colossalai.interface import OptimizerWrapper, user_module
from colossalai.mesh import placement
from colossalai.mesh.weights.deferred import fill_deferred, recording_of
from colossalai.mesh.weights.initial import give_storage
from colossalai.nn.checkpoint_blocks import RecomputedBlock
from colossalai.utils import copy_tensor_parallel_attributes
from colossalai.utils.parallel import broadcast_from_first

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        CPUOffloadPolicy,
        MixedPrecision,
        MixedPrecisionPolicy,
        ShardingStrategy,
    )


# The documented arguments of ``TorchFSDPPlugin``, which are FSDP1's, in the words of FSDP2.
#
# An argument that has no meaning in FSDP2 is refused here, when the plugin is built. torch's FSDP takes two
# seconds to import, so that is left to the functions that need it.


@dataclass(frozen=True)
class FSDPOptions:
    """The options of ``fully_shard``."""

    reshard_after_forward: bool | None
    hybrid: bool
    offload: bool
    precision: Any  # a MixedPrecisionPolicy, or None: the model's own dtypes


def translate(
    sharding_strategy: Any, cpu_offload: Any, backward_prefetch: Any, mixed_precision: Any
) -> FSDPOptions:
    """Refuse or translate the documented arguments."""
    reshard, hybrid = _strategy(sharding_strategy)
    _check_prefetch(backward_prefetch)
    return FSDPOptions(reshard, hybrid, _offload(cpu_offload), _precision(mixed_precision))


def _strategy(strategy: Any) -> tuple[bool | None, bool]:
    """Whether to cut the weights again after the forward pass (None: all but the outermost), and hybrid or
    not.
    """
    if strategy is None:
        return None, False
    from torch.distributed.fsdp import ShardingStrategy

    _check_kind("sharding_strategy", strategy, (ShardingStrategy,))
    if strategy is ShardingStrategy.NO_SHARD:
        raise ValueError(
            "TorchFSDPPlugin does not do ShardingStrategy.NO_SHARD, which cuts nothing; use TorchDDPPlugin"
        )
    hybrid = strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
    keep = strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
    return (False if keep else None), hybrid


def _check_regions(module: nn.Module) -> None:
    """Refuse blocks that are computed again together: FSDP2 gathers weights before a block's own passes."""
    for name, part in module.named_modules():
        if isinstance(part, RecomputedBlock) and part.regions:
            raise ValueError(
                f"TorchFSDPPlugin gathers the weights of one block at a time, but {name!r} is computed again"
                " together with others; plan with auto_checkpoint(..., regions=False)"
            )


def _check_prefetch(prefetch: Any) -> None:
    if prefetch is None:
        return
    from torch.distributed.fsdp import BackwardPrefetch

    _check_kind("backward_prefetch", prefetch, (BackwardPrefetch,))
    if prefetch is not BackwardPrefetch.BACKWARD_PRE:
        raise ValueError(
            f"backward_prefetch={prefetch} has no equivalent in FSDP2, which always gathers the next weights"
            " before the gradients of the current ones are computed (BACKWARD_PRE); leave it out"
        )


def _offload(offload: Any) -> bool:
    if offload is None or isinstance(offload, bool):
        return bool(offload)
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

    _check_kind("cpu_offload", offload, (CPUOffload, OffloadPolicy))
    return bool(getattr(offload, "offload_params", isinstance(offload, CPUOffloadPolicy)))


def _precision(precision: Any) -> Any:
    if precision is None:
        return None
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    _check_kind("mixed_precision", precision, (MixedPrecision, MixedPrecisionPolicy))
    if isinstance(precision, MixedPrecisionPolicy):
        return precision
    if precision.buffer_dtype is not None or precision.keep_low_precision_grads:
        raise ValueError(
            "MixedPrecision(buffer_dtype=..., keep_low_precision_grads=...) has no equivalent in FSDP2: it"
            " leaves buffers as they are and keeps gradients in the dtype of the weights; convert buffers"
            " before boost"
        )
    return MixedPrecisionPolicy(
        param_dtype=precision.param_dtype,
        reduce_dtype=precision.reduce_dtype,
        cast_forward_inputs=precision.cast_forward_inputs or precision.cast_root_forward_inputs,
    )


def check_process_group(group: Any) -> None:
    """None, a process group, or a mesh of one or two dims."""
    if group is None:
        return
    from torch.distributed import GroupMember, ProcessGroup, get_rank, get_world_size
    from torch.distributed.device_mesh import DeviceMesh

    if group is GroupMember.NON_GROUP_MEMBER:  # what torch gives to ranks outside of a new group
        raise ValueError(f"rank {get_rank()} is not in process_group, so it cannot train in it")
    _check_kind("process_group", group, (ProcessGroup, DeviceMesh))
    if not isinstance(group, DeviceMesh) or group.ndim == 1:
        return
    if (group.ndim, group.size()) != (2, get_world_size()) or group.mesh_dim_names is None:
        raise ValueError(
            f"process_group is a mesh of shape {tuple(group.shape)} with dim names {group.mesh_dim_names};"
            " TorchFSDPPlugin takes one dim, or two named ones with all ranks of the job: copies, and the"
            " ranks that each copy is cut over"
        )


def check_ignored(modules: Any) -> list[nn.Module]:
    ignored = list(modules) if modules is not None else []
    for module in ignored:
        _check_kind("ignored_modules", module, (nn.Module,))
    return ignored


def _check_kind(name: str, value: Any, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"TorchFSDPPlugin needs {name} to be a {expected} of torch, got {value!r}")


class TorchFSDPPlugin(DPPluginBase):
    """Data parallelism in which nothing is held twice, by FSDP2 (``torch.distributed.fsdp.fully_shard``).

    The arguments are those of FSDP1's ``FullyShardedDataParallel``; one that FSDP2 has no meaning for is
    refused.

    Args:
        process_group: the ranks to cut over, by default the data-parallel ones of the launched config; or a
            ``DeviceMesh``, with two dims for copies of the model, each cut over the ranks of the second dim.
        sharding_strategy: ``FULL_SHARD`` (default); ``SHARD_GRAD_OP`` keeps the weights whole between the
            forward and the backward pass; ``HYBRID_SHARD`` cuts within a node and holds a copy on each node.
        cpu_offload: ``CPUOffload(offload_params=True)`` or ``True``: weights, gradients and states wait on
            the CPU, and the optimizer steps there.
        auto_wrap_policy: which modules are units, as in ``torch.distributed.fsdp.wrap``; by default each
            entry of a ``ModuleList``.
        backward_prefetch: ``BACKWARD_PRE`` is what FSDP2 does; others are refused.
        mixed_precision: a ``MixedPrecisionPolicy`` (or FSDP1's ``MixedPrecision``) to gather weights and
            compute in; the booster takes no other ``mixed_precision`` then.
        ignored_modules: modules whose parameters stay whole, and whose gradients are not averaged.
        param_init_fn: refused, as the weights must have their values before ``boost``.
        sync_module_states: take the weights and buffers of rank 0.  Without it, ranks that do not start alike
            are an error.
    """

    model_type = TorchFSDPModel
    fills_parameters = True

    def __init__(
        self,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | CPUOffloadPolicy | bool | None = None,
        auto_wrap_policy: Policy | None = None,
        backward_prefetch: BackwardPrefetch | None = None,
        mixed_precision: MixedPrecision | MixedPrecisionPolicy | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        sync_module_states: bool = False,
    ) -> None:
        check_process_group(process_group)
        self._process_group = process_group
        self.options = translate(sharding_strategy, cpu_offload, backward_prefetch, mixed_precision)
        super().__init__(process_group if isinstance(process_group, dist.ProcessGroup) else None)
        check_policy(auto_wrap_policy)
        if param_init_fn is not None:
            raise ValueError(
                "TorchFSDPPlugin takes no param_init_fn: FSDP2 leaves initial values to the model; build it"
                " with its weights (sync_module_states=True takes those of rank 0)"
            )
        self.auto_wrap_policy = auto_wrap_policy
        self.ignored_modules = check_ignored(ignored_modules)
        self.sync_module_states = sync_module_states
        self._meshes: dict[str, DeviceMesh] = {}

    def divided_over(self) -> list[int]:
        group = self._process_group
        if group is None or isinstance(group, dist.ProcessGroup):
            return list(range(dist.get_world_size())) if self.options.hybrid else super().divided_over()
        ranks: list[int] = group.mesh.flatten().tolist()
        if dist.get_rank() not in ranks:
            raise ValueError(f"rank {dist.get_rank()} is not on the mesh {group}, so it cannot train on it")
        return ranks

    def supported_precisions(self) -> list[str]:
        # the scaler's decision is exchanged on the device of the gradients, which must be the backend's
        return ["bf16"] if self.options.offload else ["fp16", "bf16"]

    def control_precision(self) -> bool:
        return self.options.precision is not None

    def take_precision(self, precision: Any) -> None:
        if not (precision == "bf16" and self.options.precision.param_dtype is torch.bfloat16):
            raise ValueError(
                f"TorchFSDPPlugin was given mixed_precision={self.options.precision}, and the Booster"
                f" mixed_precision={precision!r}; leave one of them out"
            )

    def get_checkpoint_io(self) -> CheckpointIO:
        group = self._process_group
        if group is None or isinstance(group, dist.ProcessGroup):
            return GatheredCheckpointIO(group)
        return GatheredCheckpointIO(group.get_group() if group.ndim == 1 else None)

    def wrap(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
        module = user_module(model)
        from colossalai.booster.plugin.fsdp_parameter import check_hooks, guard, refuse_local_numbers

        check_hooks(module)
        _check_dense(module)
        _check_regions(module)
        refuse_local_numbers()
        _check_masters(optimizer)
        raw = optimizer.unwrap() if isinstance(optimizer, OptimizerWrapper) else optimizer
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        check_backend(device)
        ignored = {p for part in self.ignored_modules for p in part.parameters()}
        if raw is not None:
            _check_ignored(raw, ignored)
        units = find_units(module, self.auto_wrap_policy, ignored)
        _check_dtypes(module, units, ignored)
        mesh = self._mesh(device.type)
        before = dict(module.named_parameters())
        # FSDP2 does not cut what has no dims; such a parameter is a copy on every rank
        scalars = [p for p in before.values() if p.ndim == 0 and p not in ignored]
        fill_deferred([*scalars, *ignored])
        alike = _Alike(module, mesh, self.sync_module_states)
        alike.make((p for p in before.values() if recording_of(p) is None), module.buffers())
        roots = _roots(module)
        self._cut(roots, units, mesh, ignored | set(scalars), alike)
        watch = None
        if scalars and len(self.divided_over()) > 1:
            watch = GradientWatch(module, scalars, self._everyone(mesh), quiet=True)
        everything = [*units, *roots]
        boosted = TorchFSDPModel(
            model, everything, watch, self._compare_ranks(module, roots, everything, mesh)
        )
        new = {old: new for old, new in _pairs(before, module) if old is not new}
        if raw is not None and optimizer is not None:
            _point_to(raw, new)
            optimizer = TorchFSDPOptimizer(optimizer, boosted)
        for name, old in before.items():
            if old in new:
                copy_tensor_parallel_attributes(old, new[old])
                guard(name, old, new[old])
        if any(placement(p).sharded for p in new.values()):
            _place_gathered(everything)
        return boosted, optimizer

    def _cut(
        self,
        roots: Sequence[nn.Module],
        units: Sequence[nn.Module],
        mesh: DeviceMesh,
        ignored: set[nn.Parameter],
        alike: _Alike,
    ) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        offload = self.options.offload and mesh.device_type != "cpu"  # on the CPU there is nowhere to go
        precision = self.options.precision or MixedPrecisionPolicy()
        inside = replace(precision, output_dtype=None)  # meant for what the model returns, not for its units
        # gloo's averages depend on its version and device; its sums do not
        only_sums = mesh.device_type == "cpu" or dist.get_backend(mesh.get_group(0)) == "gloo"
        for unit in (*units, *roots):
            _prepare(unit, alike)
            cut: Any = fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=self.options.reshard_after_forward,
                mp_policy=precision if unit in roots else inside,
                offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
                ignored_params=ignored or None,
            )
            cut.set_force_sum_reduction_for_comms(only_sums)
            see_outputs(unit)

    def _compare_ranks(
        self, module: nn.Module, roots: Sequence[nn.Module], units: Sequence[nn.Module], mesh: DeviceMesh
    ) -> Lockstep | None:
        group = self._everyone(mesh)
        backend = dist.get_backend(group)
        if group.size() == 1 or backend == "fake":
            return None
        lockstep = Lockstep(host_group(group, "FSDP"), at_once=backend == "gloo")
        compare_ranks(module, roots, units, lockstep)
        return lockstep

    def _everyone(self, mesh: DeviceMesh) -> dist.ProcessGroup:
        """All ranks that train together."""
        world: Any = dist.group.WORLD
        return mesh.get_group() if mesh.ndim == 1 else world

    def _mesh(self, device_type: str) -> DeviceMesh:
        if device_type not in self._meshes:
            self._meshes[device_type] = self._make_mesh(device_type)
        return self._meshes[device_type]

    def _make_mesh(self, device_type: str) -> DeviceMesh:
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        group = self._process_group
        if isinstance(group, DeviceMesh):
            if group.device_type != device_type:
                raise ValueError(
                    f"process_group is a mesh of {group.device_type!r} devices, but the model is on"
                    f" {device_type!r}"
                )
            if self.options.hybrid and group.ndim == 1:
                raise ValueError(
                    f"HYBRID_SHARD needs a mesh of two dims, copies and parts, got process_group={group}"
                )
            return group
        if not self.options.hybrid:
            return DeviceMesh.from_group(group or self._group, device_type)
        per_node, ranks = DistCoordinator().local_world_size, dist.get_world_size(self._group)
        if group is not None or ranks % per_node:
            raise ValueError(
                f"HYBRID_SHARD cuts the model over the {per_node} ranks of each node, which does not fit"
                f" {ranks} ranks{'' if group is None else ' of a process_group'}; pass the mesh as"
                " process_group=init_device_mesh(device, (copies, parts), mesh_dim_names=('copy', 'part'))"
            )
        shape = (ranks // per_node, per_node)
        return init_device_mesh(device_type, shape, mesh_dim_names=("copy", "part"))


def _roots(module: nn.Module) -> list[nn.Module]:
    """The modules that FSDP2 is told to be outermost: the model, or each of the stages that a rank of a
    pipeline has.

    Torch before 2.13 shards no ``ModuleList``, also if it has a ``forward`` of its own.
    """
    if not isinstance(module, nn.ModuleList) or TorchVersion(torch.__version__) >= "2.13":
        return [module]
    roots = list(module)
    users = Counter(p for root in roots for p in root.parameters())
    if shared := [name for name, p in module.named_parameters() if users[p] > 1]:
        raise ValueError(
            f"TorchFSDPPlugin cannot cut {shared[0]}, which two stages of one rank share, with torch"
            f" {torch.__version__}; use torch 2.13 or newer, a schedule with one stage on each rank, or"
            " TorchDDPPlugin"
        )
    return roots


def _place_gathered(units: Sequence[nn.Module]) -> None:
    """Write on the gathered weights, which layers compute with, which pieces of the serial ones they are.

    FSDP2 makes these tensors when it first gathers, and keeps them.
    """
    for unit in units:
        make_room(unit)
        for known in fsdp_params(unit):
            copy_tensor_parallel_attributes(known.sharded_param, known._unsharded_param)


def _pairs(before: dict[str, nn.Parameter], module: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    after = dict(module.named_parameters())
    return ((old, after[name]) for name, old in before.items())


def _check_dense(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise ValueError(
                f"TorchFSDPPlugin takes dense gradients, but {name!r} is an {type(part).__name__} with"
                " sparse=True; build it with sparse=False, or use TorchDDPPlugin"
            )


def _check_dtypes(module: nn.Module, units: Sequence[nn.Module], ignored: set[nn.Parameter]) -> None:
    """Refuse parameters of several dtypes in one unit, which is gathered as one; inner units come first."""
    names = {p: name for name, p in module.named_parameters()}
    seen = {p for p in names if p in ignored or p.ndim == 0}
    for unit in (*units, module):
        own = [p for p in unit.parameters() if p not in seen]
        seen.update(own)
        other = next((p for p in own if p.dtype != own[0].dtype), None)
        if other is not None:
            raise ValueError(
                f"TorchFSDPPlugin gathers {names[own[0]]} ({own[0].dtype}) and {names[other]} ({other.dtype})"
                " together, and FSDP2 needs one dtype for that; cast one of them, or put them into different"
                " units by auto_wrap_policy"
            )


def _check_masters(optimizer: Optimizer | None) -> None:
    if isinstance(optimizer, FP16Optimizer) and optimizer.masters is not None:
        raise ValueError(
            "TorchFSDPPlugin cannot cut the fp32 masters that half_weights=True puts into"
            f" {type(optimizer.unwrap()).__name__}; use HybridAdam, FusedAdam or FusedSGD of"
            " colossalai.nn.optimizer, which hold them in their states, or half_weights=False"
        )


def _check_ignored(optimizer: Optimizer, ignored: set[nn.Parameter]) -> None:
    for i, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p in ignored and p.requires_grad:
                raise ValueError(
                    f"group {i} of the optimizer holds a parameter of shape {tuple(p.shape)} of"
                    " ignored_modules, whose gradient is not averaged: freeze it, or give it an optimizer of"
                    " its own"
                )


def _point_to(optimizer: Optimizer, new: dict[Any, Any]) -> None:
    """Let ``optimizer`` update the cut parameters; the group objects stay, for the scheduler's sake."""
    from torch.distributed.tensor import distribute_tensor

    for group in optimizer.param_groups:
        group["params"] = [new.get(p, p) for p in group["params"]]
    for old, values in list(optimizer.state.items()):
        param: Any = new.get(old, old)
        if param is old:
            continue
        del optimizer.state[old]
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == param.shape:
                cut = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
                values[name] = cut.to(param.device)
        optimizer.state[param] = values


def _prepare(unit: nn.Module, alike: _Alike) -> None:
    """Give what is cut next whole and alike values on all ranks, if it has none yet.

    Its other parameters are in units that were cut before.
    """
    pending = [(p, found) for p in unit.parameters() if (found := recording_of(p)) is not None]
    # the optimizer still holds those without memory, so that no list keeps the whole weights
    filled = [give_storage(unit, p, recording.pending(p)()) for p, recording in pending]
    if pending:
        alike.make(filled, ())
    for p in unit.parameters():
        if not hasattr(p, "to_local"):
            p.data = p.data.contiguous()  # FSDP2 refuses other strides, which do not change the values


class _Alike:
    """Makes or checks that all ranks have the same values: each keeps its part of its own copy, so copies
    that differ would be mixed.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, broadcast: bool) -> None:
        self._module, self._mesh, self._broadcast = module, mesh, broadcast

    def make(self, params: Iterable[Tensor], buffers: Iterable[Tensor]) -> None:
        params, mesh = list(params), self._mesh
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        if self._broadcast:
            for group in reversed(groups):  # within the first copy, then from copy to copy
                broadcast_from_first((*params, *buffers), group)
            return
        sums = [_bits(p.detach()) for p in params]
        own = torch.stack([*sums, torch.zeros((), dtype=torch.int64)]).to(mesh.device_type)
        least, most = own.clone(), own.clone()
        for group in groups:  # one dim after the other, so that in the end all ranks know the same
            dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        differ = (least != most).nonzero().flatten().tolist()
        if differ:
            found = params[differ[0]]
            name = next(name for name, p in self._module.named_parameters() if p is found)
            raise RuntimeError(
                f"the ranks start from different values of {name!r}, and TorchFSDPPlugin would mix them; set"
                " the same seed on every rank before the model is built, or pass sync_module_states=True to"
                " take rank 0's"
            )


def _bits(tensor: Tensor) -> Tensor:
    """The sum of the bit patterns: exact, whatever the order of summation."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size())
    flat = tensor.contiguous().flatten()
    return flat.view(integer or torch.uint8).sum(dtype=torch.int64).cpu()
