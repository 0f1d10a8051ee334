"""Cut the linear layers of a recorded graph over the ranks of a process group, by specs of ``ColoTensor``."""

from __future__ import annotations

import torch.distributed as dist
from torch import fx, nn

from colossalai.tensor import (
    ColoParameter,
    ColoTensorSpec,
    ComputePattern,
    ComputeSpec,
    ProcessGroup,
    ShardSpec,
)


def column_shard_linear_pass(gm: fx.GraphModule, process_group: ProcessGroup | None = None) -> fx.GraphModule:
    """Cut the output features of every linear layer of ``gm``; what it returns is brought together.

    Without a process group, all ranks share the layers.
    """
    for layer in _linear_layers(gm):
        _cut(layer, "weight", 0, process_group)
        if layer.bias is not None:
            _cut(layer, "bias", 0, process_group)
    return gm


def row_shard_linear_pass(gm: fx.GraphModule, process_group: ProcessGroup | None = None) -> fx.GraphModule:
    """Cut the input features of every linear layer of ``gm``; the ranks add up what they compute."""
    for layer in _linear_layers(gm):
        _cut(layer, "weight", -1, process_group)
    return gm


def transformer_mlp_pass(gm: fx.GraphModule, process_group: ProcessGroup | None = None) -> fx.GraphModule:
    """Cut pairs of linear layers, the outputs of the first and the inputs of the second, so that only the
    result of the second is added up.

    Between the two there are only element-wise modules and functions of one tensor; a layer in no such pair
    stays whole.
    """
    for first, second in _pairs(gm):
        _cut(first, "weight", 0, process_group, gather=False)
        if first.bias is not None:
            _cut(first, "bias", 0, process_group, gather=False)
        _cut(second, "weight", -1, process_group)
    return gm


def _linear_layers(gm: fx.GraphModule) -> list[nn.Linear]:
    found = []
    for node in gm.graph.nodes:
        if node.op == "call_module" and isinstance(layer := gm.get_submodule(str(node.target)), nn.Linear):
            found.append(layer)
    return list(dict.fromkeys(found))


_BETWEEN = (nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity)


def _pairs(gm: fx.GraphModule) -> list[tuple[nn.Linear, nn.Linear]]:
    found: list[tuple[nn.Linear, nn.Linear]] = []
    taken: set[nn.Module] = set()
    for node in gm.graph.nodes:
        layer = _module(gm, node)
        if not isinstance(layer, nn.Linear) or layer in taken:
            continue
        after = _only_user(node)
        while after is not None and isinstance(_module(gm, after), _BETWEEN):
            after = _only_user(after)
        second = None if after is None else _module(gm, after)
        if isinstance(second, nn.Linear) and second not in taken:
            found.append((layer, second))
            taken |= {layer, second}
    return found


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _module(gm: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return gm.get_submodule(str(node.target)) if node.op == "call_module" else None


def _cut(layer: nn.Linear, name: str, dim: int, group: ProcessGroup | None, gather: bool = True) -> None:
    group = group or ProcessGroup(tp_degree=dist.get_world_size())
    parameter = getattr(layer, name)
    if not isinstance(parameter, ColoParameter):
        whole = ColoTensorSpec(group)
        parameter = ColoParameter(parameter.data, parameter.requires_grad, whole)
        setattr(layer, name, parameter)
    compute = ComputeSpec(ComputePattern.TP1D)
    compute.set_output_replicate(gather)
    parameter.set_tensor_spec(ShardSpec([dim], [group.tp_world_size()]), compute)
