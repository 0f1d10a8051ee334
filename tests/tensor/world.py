"""What the tests of ColoTensor share: a job, and the comparison of a function of ColoTensors with the serial
one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import colossalai
from colossalai.mesh import shard
from colossalai.tensor import ColoTensor, ColoTensorSpec, ComputePattern, ComputeSpec, ProcessGroup, ShardSpec


def start(rank: int, world_size: int, port: int) -> None:
    colossalai.launch({}, rank, world_size, "localhost", port, backend="gloo", verbose=False)


def cut(full: Tensor, dim: int | None, pg: ProcessGroup, output_replicate: bool | None = None) -> ColoTensor:
    """A leaf with the values of ``full`` that is cut along ``dim``; with a compute spec unless
    ``output_replicate`` is None.
    """
    whole = ColoTensor(full.detach().clone(), ColoTensorSpec(pg))
    if dim is not None:
        whole.set_dist_spec(ShardSpec([dim], [pg.tp_world_size()]))
    if output_replicate is not None:
        whole.compute_spec = ComputeSpec(ComputePattern.TP1D)
        whole.compute_spec.set_output_replicate(output_replicate)
    return whole.requires_grad_(full.requires_grad)


def whole(value: Any) -> Any:
    return value.to_replicate().data if isinstance(value, ColoTensor) else value


def assert_same(
    function: Callable[..., Any], serial: list[Tensor], parallel: list[Any], pg: ProcessGroup, what: str
) -> Any:
    """``function`` of ``parallel`` has the value that it has of ``serial``, and so has each gradient; returns
    the result.
    """
    expected, result = function(*serial), function(*parallel)
    together = result.to_replicate() if isinstance(result, ColoTensor) else result
    assert together.shape == expected.shape, f"{what}: {together.shape} for {expected.shape}"
    torch.testing.assert_close(torch.as_tensor(together.data), expected.data, msg=lambda m: f"{what}: {m}")
    if expected.requires_grad:
        weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5))
        (expected * weights).sum().backward()
        (together * weights).sum().backward()
    for i, (a, b) in enumerate(zip(serial, parallel, strict=True)):
        if a.grad is not None:
            mine = shard(a.grad, b.placement, pg.mesh) if isinstance(b, ColoTensor) else a.grad
            assert b.grad is not None, f"{what}: no gradient of argument {i}"
            torch.testing.assert_close(
                b.grad, mine, rtol=1e-5, atol=1e-6, msg=lambda m, i=i: f"{what}: gradient {i}: {m}"
            )
        else:
            assert b.grad is None, f"{what}: argument {i} has a gradient"
    return result
