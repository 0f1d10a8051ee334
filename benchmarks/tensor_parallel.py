"""A GPT block: cut by our layers beside torch's DTensor, 2D beside 1D, and on one device beside
``nn.Linear``.

All run the same math, which is checked before anything is timed.  Competitors take turns step by step, so a
busy machine is busy for both.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import colossalai.nn as col_nn
from benchmarks.communication import WORD, kept
from benchmarks.table import Row
from colossalai.cli.benchmark.models import BenchmarkBlock
from colossalai.mesh import Mesh, shard
from colossalai.nn.modes import TensorParallel, mode_1d, mode_2d
from colossalai.testing import spawn
from colossalai.utils import synchronize

Size = tuple[int, int, int, int]  # batch, sequence, width, heads

SIZES: dict[str, Size] = {"small": (2, 64, 256, 4), "GPT-2's": (2, 128, 768, 12)}
GRID_SIZE: Size = (8, 128, 256, 8)
GPU_SIZES: dict[str, Size] = {"small": (2, 64, 256, 4), "GPT-2 XL's": (8, 1024, 1600, 25)}


def torch_block(width: int, heads: int) -> BenchmarkBlock:
    """The block from torch's own layers, serial."""
    block = BenchmarkBlock(width, heads, causal=True)
    block.norm1, block.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
    block.attn.query_key_value, block.attn.dense = nn.Linear(width, 3 * width), nn.Linear(width, width)
    block.mlp.dense_1, block.mlp.dense_2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    return block


def our_block(native: BenchmarkBlock, tp: TensorParallel, mesh: Mesh) -> BenchmarkBlock:
    """This rank's piece of ``native``."""
    block = copy.deepcopy(native)
    block.norm1, block.norm2 = (
        col_nn.LayerNorm.from_native(n, tp=tp, mesh=mesh) for n in (native.norm1, native.norm2)
    )
    for part, name, role, fused in (
        ("attn", "query_key_value", "expand", 3),
        ("attn", "dense", "contract", 1),
        ("mlp", "dense_1", "expand", 1),
        ("mlp", "dense_2", "contract", 1),
    ):
        layer = getattr(getattr(native, part), name)
        cut = col_nn.Linear.from_native(layer, role, tp=tp, mesh=mesh, fused=fused)
        setattr(getattr(block, part), name, cut)
    block.attn.heads //= mesh.group_size(*tp.inner.dims[-1])
    return block


def dtensor_block(native: BenchmarkBlock, mesh: Mesh) -> nn.Module:
    """The same by torch's tensor parallelism, with the rows of the fused projection sorted so that a rank
    gets whole heads.
    """
    block, p = copy.deepcopy(native), mesh.size["tp"]
    for tensor in (block.attn.query_key_value.weight, block.attn.query_key_value.bias):
        with torch.no_grad():
            tensor.copy_(tensor.unflatten(0, (3, p, -1)).transpose(0, 1).flatten(0, 2))
    block.attn.heads //= p
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {
        "attn.query_key_value": columns,
        "attn.dense": rows,
        "mlp.dense_1": columns,
        "mlp.dense_2": rows,
    }
    return parallelize_module(block, mesh.device_mesh, plan)


def step(model: nn.Module, x: Tensor, grad: Tensor) -> Tensor:
    """Forward and backward; the output."""
    model.zero_grad()
    x.grad = None
    y = model(x)
    y.backward(grad)
    return y


def in_turns(
    competitors: Mapping[str, Callable[[], object]], repeat: int, inner: int = 1
) -> dict[str, float]:
    """The median time of each in milliseconds, after two rounds that warm up."""
    times: dict[str, list[float]] = {name: [] for name in competitors}
    for turn in range(repeat + 2):
        for name, work in list(competitors.items())[:: -1 if turn % 2 else 1]:
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            for _ in range(inner):
                work()
            synchronize()
            if turn > 1:
                times[name].append((time.perf_counter() - start) * 1000 / inner)
    return {name: median(found) for name, found in times.items()}


def beside_dtensor(
    rank: int, world_size: int, port: int, sizes: Mapping[str, Size] = SIZES, repeat: int = 25
) -> dict[str, dict[str, float]]:
    """Times of a step by name of the size, ours and the peer's."""
    dist.init_process_group("gloo")
    tp = mode_1d(world_size)
    mesh, found = Mesh(tp.axes), {}
    for name, (batch, length, width, heads) in sizes.items():
        torch.manual_seed(0)
        native = torch_block(width, heads)
        ours, peer = our_block(native, tp, mesh), dtensor_block(native, mesh)
        x = torch.randn(batch, length, width, requires_grad=True)
        grad = torch.randn(batch, length, width)
        expected, dx = step(peer, x, grad), x.grad
        torch.testing.assert_close(step(ours, x, grad), expected)
        torch.testing.assert_close(x.grad, dx, rtol=1e-4, atol=1e-4)
        rounds = {
            "ours": lambda m=ours, x=x, g=grad: step(m, x, g),
            "peer": lambda m=peer, x=x, g=grad: step(m, x, g),
        }
        found[name] = in_turns(rounds, repeat)
    return found


def grid_beside_line(
    rank: int, world_size: int, port: int, size: Size = GRID_SIZE, repeat: int = 9
) -> dict[str, tuple[float, float]]:
    """Time of a step and bytes kept for the backward pass, of both modes."""
    dist.init_process_group("gloo")
    batch, length, width, heads = size
    torch.manual_seed(0)
    native, whole, whole_grad = torch_block(width, heads), *torch.randn(2, batch, length, width)
    expected = native(whole)
    rounds, memory = {}, {}
    for name, tp in (("1D", mode_1d(world_size)), ("2D", mode_2d(2))):
        mesh = Mesh(tp.axes)
        model = our_block(native, tp, mesh)
        x = shard(whole, tp.hidden, mesh).requires_grad_()
        grad = shard(whole_grad, tp.hidden, mesh)
        torch.testing.assert_close(
            step(model, x, grad), shard(expected, tp.hidden, mesh), rtol=1e-4, atol=1e-4
        )
        with kept(model.parameters()) as found:
            y = model(x)
        memory[name] = sum(found.values()) * WORD
        del y
        rounds[name] = lambda m=model, x=x, g=grad: step(m, x, g)
    times = in_turns(rounds, repeat)
    return {name: (times[name], memory[name]) for name in times}


def one_device(compiled: bool) -> list[Row]:
    """Our layers with nothing to cut beside torch's: the same kernels, so the difference is ours."""
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows = []
    for name, (batch, length, width, heads) in (GPU_SIZES if device == "cuda" else SIZES).items():
        torch.manual_seed(0)
        ours = BenchmarkBlock(width, heads, causal=True).to(device, dtype)
        peer = torch_block(width, heads).to(device, dtype)
        peer.load_state_dict(ours.state_dict())
        x = torch.randn(batch, length, width, device=device, dtype=dtype, requires_grad=True)
        grad = torch.randn_like(x)
        assert torch.equal(step(ours, x, grad), step(peer, x, grad))
        if compiled:
            ours, peer = (torch.compile(model, fullgraph=True) for model in (ours, peer))
        rounds = {
            "ours": lambda m=ours, x=x, g=grad: step(m, x, g),
            "peer": lambda m=peer, x=x, g=grad: step(m, x, g),
        }
        times = in_turns(rounds, repeat=25, inner=20 if device == "cuda" else 1)
        how = "one graph" if compiled else "eager"
        what = f"{name} GPT block on one {device}, {how}"
        rows.append(Row(what, times["ours"], times["peer"], "nn.Linear, nn.LayerNorm"))
    return rows


def rows() -> list[Row]:
    found = spawn(beside_dtensor, 2, timeout=300)[0]
    result = [
        Row(f"{name} GPT block, 1D on 2 ranks", times["ours"], times["peer"], "DTensor parallelize_module")
        for name, times in found.items()
    ]
    grid = spawn(grid_beside_line, 4, timeout=300)[0]
    (line_time, line_memory), (grid_time, grid_memory) = grid["1D"], grid["2D"]
    result += [
        Row("GPT block, 2D on 4 ranks", grid_time, line_time, "1D on 4 ranks"),
        Row("its activations kept, 2D", grid_memory / 2**20, line_memory / 2**20, "1D on 4 ranks", unit="MB"),
        *one_device(compiled=False),
    ]
    if torch.cuda.is_available():
        result += one_device(compiled=True)
    return result
