"""What the tests of the layers share: the modes with their sizes, a mesh, and plain torch modules with equal
weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colossalai.mesh import Layout, Mesh, full_shape, placement, serial_form, shard, unshard
from colossalai.nn.modes import (
    TensorParallel,
    at_rank,
    mode_1d,
    mode_2d,
    mode_2p5d,
    mode_3d,
    with_data_parallel,
)

MODES: dict[str, TensorParallel] = {
    "1d": mode_1d(2),
    "1d-4": mode_1d(4),
    "1d-sequence": mode_1d(2, sequence_parallel=True),
    "2d": mode_2d(2),
    "2d-3x3": mode_2d(3),
    "2.5d": mode_2p5d(2, 2),
    "2.5d-3-deep": mode_2p5d(2, 3),
    "3d": mode_3d(2),
    "3d-refetch": mode_3d(2, keep_operands=False),
    "dp-1d": with_data_parallel(mode_1d(2), 2),
    "dp-2d-zero3": with_data_parallel(mode_2d(2), 2, shard_weights=True),
    "dp-3d": with_data_parallel(mode_3d(2), 1),
}
BATCH, SEQUENCE, HIDDEN, INNER = 36, 6, 36, 72


def size(name: str) -> int:
    return math.prod(MODES[name].axes.values())


def start(rank: int, world_size: int, port: int, name: str) -> tuple[TensorParallel, Mesh]:
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    torch.manual_seed(0)
    return MODES[name], Mesh(MODES[name].axes)


def whole(piece: Tensor, param: Tensor, mesh: Mesh) -> Tensor:
    """A parameter's value or gradient as the serial model has it."""
    return serial_form(unshard(piece, placement(param), mesh, tuple(full_shape(param))), param)


def copy_to_serial(layer: nn.Module, serial: nn.Module, mesh: Mesh) -> None:
    with torch.no_grad():
        for (name, mine), (other, theirs) in zip(
            layer.named_parameters(), serial.named_parameters(), strict=True
        ):
            assert name == other
            theirs.copy_(whole(mine, mine, mesh))


def compare(
    layer: Callable[..., Tensor],
    serial: Callable[..., Tensor],
    x: Tensor,
    src: Layout,
    dst: Layout,
    mesh: Mesh,
    *,
    rtol: float = 2e-5,
    uneven: bool = False,
) -> None:
    """Values, gradients of the input and gradients of all parameters equal the serial module's."""
    src, dst = at_rank(src, x.ndim) if x.is_floating_point() else src, dst
    for module in (layer, serial):
        if isinstance(module, nn.Module):
            module.zero_grad()
    expected_x = x.clone().requires_grad_(x.is_floating_point())
    expected = serial(expected_x)
    mine_x = shard(x, src, mesh).requires_grad_(x.is_floating_point())
    got = layer(mine_x)
    dst = at_rank(dst, expected.ndim)
    close(got, shard(expected, dst, mesh, uneven=uneven), "output", rtol)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3)).to(expected.dtype)
    (expected * weight).sum().backward()
    (got * shard(weight, dst, mesh, uneven=uneven)).sum().backward()
    if x.is_floating_point():
        close(mine_x.grad, shard(expected_x.grad, src, mesh), "gradient of the input", rtol)
    if isinstance(layer, nn.Module) and isinstance(serial, nn.Module):
        theirs = dict(serial.named_parameters())
        for name, p in layer.named_parameters():
            close(whole(p.grad, p, mesh), theirs[name].grad, f"gradient of {name}", rtol)


def close(got: Tensor, expected: Tensor, what: str, rtol: float = 2e-5) -> None:
    assert got.shape == expected.shape, f"{what}: {tuple(got.shape)}, expected {tuple(expected.shape)}"
    error = (got.double() - expected.double()).abs().amax() if got.numel() else torch.zeros(())
    scale = expected.double().abs().amax().clamp(min=1e-3) if got.numel() else torch.ones(())
    assert error <= rtol * scale, f"{what}: differs by {float(error):.2e} of {float(scale):.2e}"
