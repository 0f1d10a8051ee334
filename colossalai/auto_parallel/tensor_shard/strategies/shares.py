"""``insert_shares``: an identity in front of equal products that take one tensor.

Queries, keys and values are three products of one tensor.  If their columns are cut, each needs the whole
tensor and gives a part of its gradient: moved once for all three, that is one sum instead of three.  The
identity is an operation like others, so a plan chooses where its tensor is brought, and a runtime does
nothing special.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import torch
from torch import fx

from colossalai.fx import OpGraph, OpNode, OpWork
from colossalai.tensor.letters.calls import operation_name, tensor_arguments

_PRODUCTS = ("linear", "addmm", "mm", "matmul", "conv1d", "conv2d", "conv3d")
SHARE = "share"
"""The key of ``node.meta`` that marks such an identity."""


def insert_shares(graph: OpGraph) -> list[str]:
    """Change ``graph`` in place; the names of the new nodes."""
    made = []
    for node in list(graph.module.graph.nodes):
        if (
            SHARE in node.meta
            or node.name not in graph.nodes
            or not isinstance(node.meta.get("val"), torch.Tensor)
        ):
            continue
        if not graph.nodes[node.name].outputs[0].requires_grad:
            continue
        groups: dict[tuple[str, int], list[fx.Node]] = defaultdict(list)
        for user in node.users:
            name = operation_name(user)
            if name not in _PRODUCTS or tensor_arguments(user).count(node) != 1:
                continue
            # what runs without gradients (torch.no_grad) takes the tensor itself: an identity made there for
            # others would keep their gradients from it
            if graph.nodes[user.name].outputs[0].requires_grad:
                groups[name, tensor_arguments(user).index(node)].append(user)
        made += [_insert(graph, node, users) for users in groups.values() if len(users) > 1]
    if made:
        graph.module.recompile()
    return made


def _insert(graph: OpGraph, node: fx.Node, users: list[fx.Node]) -> str:
    with graph.module.graph.inserting_before(min(users)):
        share = graph.module.graph.call_function(torch.ops.aten.alias.default, (node,))
    share.meta = {"val": node.meta["val"], SHARE: True}
    for user in users:
        user.replace_input_with(node, share)
    info = graph.nodes[node.name].outputs[0]
    graph.nodes[share.name] = OpNode(
        name=share.name,
        operation=str(share.target),
        module="",
        inputs=(node.name,),
        parameters=(),
        outputs=(replace(info),),
        forward=OpWork(),
        backward=OpWork(),
        saved={},
    )
    return share.name
