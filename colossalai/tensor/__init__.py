"""ColoTensor: any model made tensor-parallel by saying how each of its parameters lies and computes.

Read in this order: ``process_group`` (who shares a tensor), ``distspec`` and ``compute_spec`` (how it lies
and computes), ``colo_tensor`` (the tensor, and what functions do with it), ``ops`` (those that know better
than to gather), ``init_context``.  Beside it lie sharding specs on a grid of devices: ``sharding_spec``
(notation), ``comm_spec`` (one collective), ``conversion`` (the way from one spec to another), with the fronts
``shape_consistency`` and ``d_tensor``.

It stands on the layouts of :mod:`colossalai.mesh`, not on DTensor: a ``ShardSpec`` names a ``Layout`` on the
one axis ``tp``, a ``ProcessGroup`` is a ``Mesh`` and ``ComputePattern.TP1D`` is what ``MatmulPlan`` derives
from the layouts, so gradient norms, checkpoints and the parity check read ColoParameters as they read all our
parameters.  The documented object *is* its piece (``shape`` and ``data`` are local, specs change in place),
whereas a DTensor has the shape of the whole and cannot change its placement; and DTensor's replicate is one
state where gradients need two, I and R.
"""

import torch

import colossalai.tensor.ops  # noqa: F401  # fills the table of functions
from colossalai.tensor.colo_parameter import ColoParameter
from colossalai.tensor.colo_tensor import ColoTensor
from colossalai.tensor.compute_spec import ComputePattern, ComputeSpec
from colossalai.tensor.dist_spec_mgr import DistSpecManager
from colossalai.tensor.distspec import ReplicaSpec, ShardSpec
from colossalai.tensor.init_context import ColoInitContext, post_process_colo_init_ctx
from colossalai.tensor.op_wrapper import colo_op_impl
from colossalai.tensor.param_op_hook import ColoParamOpHook, ColoParamOpHookManager
from colossalai.tensor.process_group import ProcessGroup
from colossalai.tensor.serialization import rebuild
from colossalai.tensor.tensor_spec import ColoTensorSpec
from colossalai.tensor.utils import (
    convert_parameter,
    full_state_dict,
    load_full_state_dict,
    named_params_with_colotensor,
)

torch.serialization.add_safe_globals([rebuild])  # it takes plain values and makes a ColoTensor

__all__ = [
    "ColoInitContext",
    "ColoParamOpHook",
    "ColoParamOpHookManager",
    "ColoParameter",
    "ColoTensor",
    "ColoTensorSpec",
    "ComputePattern",
    "ComputeSpec",
    "DistSpecManager",
    "ProcessGroup",
    "ReplicaSpec",
    "ShardSpec",
    "colo_op_impl",
    "convert_parameter",
    "full_state_dict",
    "load_full_state_dict",
    "named_params_with_colotensor",
    "post_process_colo_init_ctx",
]
