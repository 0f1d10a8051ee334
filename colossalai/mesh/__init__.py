"""The mesh-and-layout core: who talks to whom, where every tensor lies, and what it costs to move it.

Read in this order: ``mesh`` (named axes), ``layout`` (where a tensor lies), ``routes`` (which steps lead from
one layout to another, and their costs), ``movement`` (the same with gradients), ``collectives`` (the counted
primitives), ``products`` (one matrix product for all modes), ``parameter`` (placed parameters),
``gradient_norm``, ``random`` and ``weights`` (numbers that do not depend on the plan; models without memory).

This package imports nothing from the rest of ``colossalai``.
"""

from colossalai.mesh.collectives import CommunicationLog, Transfer, count_communication
from colossalai.mesh.gradient_norm import clip_grads, grad_norm, grad_zeros
from colossalai.mesh.group_mesh import GroupMesh
from colossalai.mesh.layout import Layout, local_range, local_shape, local_slices, replicated, shard
from colossalai.mesh.mesh import (
    DATA_AXES,
    DATA_AXIS,
    EXPERT_AXES,
    PIPELINE_AXIS,
    ROW_AXES,
    SEQUENCE_AXES,
    Axes,
    Mesh,
    expert_axis_sizes,
    mesh_coordinates,
    mesh_groups,
)
from colossalai.mesh.movement import (
    all_to_all,
    all_to_all_ragged,
    collect,
    gather,
    move,
    redistribute,
    reduce,
    ring_shift,
    scatter,
    split,
    spread,
    start_exchange,
    total,
    unshard,
)
from colossalai.mesh.parameter import (
    full_shape,
    own_grad,
    parameter,
    place,
    placement,
    serial_form,
    serial_tensor,
    set_own_grad,
    use,
)
from colossalai.mesh.products.matmul import matmul
from colossalai.mesh.products.plan import MatmulPlan, Order, Role
from colossalai.mesh.random import RandomStream, dropout_mask, random_key
from colossalai.mesh.routes.cost import AxisLink, Links, Prices, price_tensor, route_seconds, route_transfers
from colossalai.mesh.routes.route import route
from colossalai.mesh.routes.steps import RouteStep, one_steps
from colossalai.mesh.weights.initial import (
    Constant,
    Distribution,
    Normal,
    Transposed,
    TruncatedNormal,
    Uniform,
    ZeroRow,
    draw,
    initialize,
    place_parameters,
    set_init,
)

__all__ = [
    "DATA_AXES",
    "DATA_AXIS",
    "EXPERT_AXES",
    "PIPELINE_AXIS",
    "ROW_AXES",
    "SEQUENCE_AXES",
    "Axes",
    "AxisLink",
    "CommunicationLog",
    "Constant",
    "Distribution",
    "GroupMesh",
    "Layout",
    "Links",
    "MatmulPlan",
    "Mesh",
    "Normal",
    "Order",
    "Prices",
    "RandomStream",
    "Role",
    "RouteStep",
    "Transfer",
    "Transposed",
    "TruncatedNormal",
    "Uniform",
    "ZeroRow",
    "all_to_all",
    "all_to_all_ragged",
    "clip_grads",
    "collect",
    "count_communication",
    "draw",
    "dropout_mask",
    "expert_axis_sizes",
    "full_shape",
    "gather",
    "grad_norm",
    "grad_zeros",
    "initialize",
    "local_range",
    "local_shape",
    "local_slices",
    "matmul",
    "mesh_coordinates",
    "mesh_groups",
    "move",
    "one_steps",
    "own_grad",
    "parameter",
    "place",
    "place_parameters",
    "placement",
    "price_tensor",
    "random_key",
    "redistribute",
    "reduce",
    "replicated",
    "ring_shift",
    "route",
    "route_seconds",
    "route_transfers",
    "scatter",
    "serial_form",
    "serial_tensor",
    "set_init",
    "set_own_grad",
    "shard",
    "split",
    "spread",
    "start_exchange",
    "total",
    "unshard",
    "use",
]
