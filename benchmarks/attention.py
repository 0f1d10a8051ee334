"""Attention in blocks beside one ``scaled_dot_product_attention``, and a ring of ranks beside torch's
``context_parallel``: ``python -m benchmarks.attention`` on a machine with a GPU.

1. Every block kernel against float64: PASS or FAIL.
2. A causal sequence on four ranks of a ring, played by one process without communication, beside one call of
   cuDNN's attention for the whole sequence.
3. Two and four gloo ranks that share the GPU, beside ``context_parallel`` if that runs.

Both passes, 16 heads of 128, bfloat16.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.table import Row, show
from colossalai.mesh import Layout, Mesh, shard
from colossalai.mesh.collectives import Pending
from colossalai.nn.attention import kernels, sequence_attention
from colossalai.nn.attention.blocks import documents_in
from colossalai.nn.attention.ring import How, Ring, ring_backward, ring_forward
from colossalai.testing import spawn

HEADS, WIDTH = 16, 128
LAYOUT = Layout(((), (), ("sp",), ()), zigzag=frozenset({"sp"}))


# A ring in one process: one rank after the other.


def ring_messages(size: int, *, backward: bool) -> list[str]:
    """What each message of a rank carries, in the order in which ``ring_forward`` or ``ring_backward`` sends
    them.
    """
    found = []
    for step in range(size):
        found += ["k", "v"] if step < size - 1 else []
        found += ["dk", "dv"] if backward and step > 0 else []
    return found


def played_ring(pieces: list[list[Tensor]], work: Callable[[Ring], object], *, backward: bool) -> Played:
    """``work`` of every rank of a ring, rank 0 first.

    What the rank before has sent is there, but for rank 0.  It is given the keys and values of the last rank,
    which are known; of gradients it is given zeros, and those that come too late are handed back: for each
    rank what is still to be added to the gradients of its keys and values.
    """
    size, kinds = len(pieces), ring_messages(len(pieces), backward=backward)
    sent: list[list[Tensor]] = [[] for _ in range(size)]
    results = []
    for index in range(size):

        def start_shift(x: Tensor, index: int = index) -> Pending:
            number = len(sent[index])
            sent[index].append(x)
            if index > 0:
                return lambda: sent[index - 1][number]
            if (kind := kinds[number]) in ("k", "v"):
                source = -1 - kinds[:number].count(kind)
                return lambda: pieces[source][1 if kind == "k" else 2]
            return lambda: torch.zeros_like(x)

        with torch.no_grad():
            results.append(work(Ring(index, size, start_shift)))
    late: list[dict[str, Tensor]] = [{} for _ in range(size)]
    for number, kind in enumerate(kinds):
        if kind in ("dk", "dv"):
            step = 1 + kinds[:number].count(kind)  # in which the last rank had the keys of this owner
            late[size - 1 - step][kind] = sent[-1][number]
    return Played(results, late)


class Played(NamedTuple):
    results: list[object]
    late: list[dict[str, Tensor]]


def zigzag(x: Tensor, size: int) -> list[Tensor]:
    """The pieces of (batch, heads, length, width) that the ranks of a ring hold."""
    chunks = x.chunk(2 * size, 2)
    return [torch.cat([chunks[i], chunks[2 * size - 1 - i]], 2) for i in range(size)]


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """The whole of what :func:`zigzag` cut."""
    halves = [piece.chunk(2, 2) for piece in pieces]
    return torch.cat([*(first for first, _ in halves), *(second for _, second in reversed(halves))], 2)


def forward_blocks(pieces: list[list[Tensor]], how: How) -> list[tuple[Tensor, Tensor]]:
    """Output and log-sum-exp of all ranks."""
    run = played_ring(pieces, lambda ring: ring_forward(*pieces[ring.index][:3], ring, how), backward=False)
    return run.results  # type: ignore[return-value]


def both_passes(pieces: list[list[Tensor]], how: How) -> Played:
    """Output and gradients of all ranks; ``pieces`` are q, k, v and the gradient of the output, for each."""
    forward = forward_blocks(pieces, how)

    def backward(ring: Ring) -> tuple[Tensor, ...]:
        q, k, v, grad = pieces[ring.index]
        out, lse = forward[ring.index]
        return out, *ring_backward(grad, q, k, v, out, lse, ring, how)

    return played_ring(pieces, backward, backward=True)


def in_blocks(pieces: list[list[Tensor]], how: How) -> list[tuple[Tensor, ...]]:
    """The same, with the gradients that came too late to rank 0, which a real ring has in time."""
    run = both_passes(pieces, how)
    whole = []
    for result, late in zip(run.results, run.late, strict=True):
        out, dq, dk, dv = result  # type: ignore[misc]
        for name, own in (("dk", dk), ("dv", dv)):
            if name in late:
                torch.add(late[name], own, out=own)
        whole.append((out, dq, dk, dv))
    return whole


# Correctness of every kernel.


def visible(numbers: Tensor | None, length: int, causal: bool, device: str) -> Tensor:
    """Which token sees which, (batch or 1, 1, length, length), by the definition."""
    seen = torch.ones(1, length, length, dtype=torch.bool, device=device)
    if numbers is not None:
        seen = (numbers[:, None, :] == numbers[:, :, None].abs()) & (numbers[:, None, :] > 0)
    return (seen.tril() if causal else seen).unsqueeze(1)


def documents_of(kind: str, batch: int, length: int, device: str) -> Tensor | None:
    if kind == "none":
        return None
    numbers = 1 + torch.arange(length, device=device) * 3 // length
    numbers = numbers.repeat(batch, 1) if kind == "packed" else torch.ones_like(numbers).repeat(batch, 1)
    numbers[0, -(length // 4 or 1) :] = -1
    numbers[-1, -1] = -9  # sees nothing
    return numbers


def errors(
    dtype: torch.dtype,
    length: int,
    causal: bool,
    documents: str,
    key_heads: int,
    width: int,
    size: int,
    device: str,
) -> dict[str, float]:
    """The greatest error of the output and each gradient, relative to the greatest value, in units of the
    rounding of ``dtype``.
    """
    batch, heads = 2, 4
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, grad = (
        torch.randn(batch, h, length, width, generator=generator, device=device).to(dtype)
        for h in (heads, key_heads, key_heads, heads)
    )
    numbers = documents_of(documents, batch, length, device)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    mask = visible(numbers, length, causal, device)
    sees = mask.any(-1, keepdim=True)
    out = F.scaled_dot_product_attention(*wide, attn_mask=mask | ~sees, enable_gqa=True) * sees
    expected = (out, *torch.autograd.grad(out, wide, grad.double()))
    known = None if numbers is None else documents_in(numbers, 2 * size if size > 1 else 1)
    how = How(causal, 1 / math.sqrt(width), documents=known)
    parts = [zigzag(x, size) if size > 1 else [x] for x in (q, k, v, grad)]
    ours = in_blocks([list(rank) for rank in zip(*parts, strict=True)], how)
    found = [joined(x) if size > 1 else x[0] for x in zip(*ours, strict=True)]
    unit = torch.finfo(dtype).eps
    return {
        name: ((a.double() - b).abs().amax() / b.abs().amax()).item() / unit
        for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True)
    }


@contextmanager
def only(names: Sequence[str]) -> Iterator[None]:
    """Let the block kernels be ``names``."""
    table = kernels.KERNELS
    kernels.KERNELS = tuple(k for k in table if k.name in names)
    try:
        yield
    finally:
        kernels.KERNELS = table


def kernel_cases(device: str) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """Each case of each kernel by name.  Where a mask is needed the efficient kernel takes over from those
    without one.
    """
    half = (torch.bfloat16, torch.float16)
    tables = {
        "cudnn": (["cudnn", "efficient"], half),
        "flash": (["flash", "efficient"], half),
        "efficient": (["efficient"], (*half, torch.float32)),
        "plain": ([], (torch.float32, torch.float64)),
    }
    if device == "cpu":
        tables = {
            "cpu": (["cpu"], (torch.float32, torch.float64, *half)),
            "plain": ([], (torch.float32, torch.float64)),
        }
    for name, (names, dtypes) in tables.items():
        for dtype, causal, documents in itertools.product(
            dtypes, (True, False), ("none", "padded", "packed")
        ):
            # (240, ...): more blocks than are added at once; the last: one token for each chunk
            for length, key_heads, width, size in (
                (256, 4, 64, 1),
                (200, 4, 64, 4),
                (200, 2, 128, 4),
                (240, 4, 64, 6),
                (8, 4, 64, 4),
            ):

                def run(
                    names: list[str] = names,
                    case: tuple = (dtype, length, causal, documents, key_heads, width, size, device),
                ) -> dict[str, float]:
                    with only(names):
                        return errors(*case)

                words = f"{str(dtype)[6:]} length {length} in {size} ranks, {key_heads} of 4 key heads"
                yield f"{name:10}{words}{', causal' if causal else ''}, documents {documents}", run


def check_kernels(device: str) -> list[str]:
    """The cases that fail, each with its errors; all are run."""
    failed, count = [], 0
    for name, run in kernel_cases(device):
        count += 1
        try:
            found = run()
            # sums of products of rounded numbers err by a few roundings; NaN is not less than any number
            problem = "" if all(e < 32 for e in found.values()) else f"errors in roundings {found}"
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error)[:300]}"
        if problem:
            failed.append(f"{name}: {problem}")
    print(f"{count - len(failed)} of {count} cases of kernels on {device} PASS")
    return failed


# Times.


def milliseconds(work: Callable[[], object], repeat: int = 7) -> float:
    """The median time of a call on the GPU, after calls that warm up."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1000)
    return median(times)


def tensors(length: int) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(1, HEADS, length, WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(4)
    ]


def whole_attention(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)


def difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The greatest difference, relative to the greatest value."""
    return max(
        ((a.float() - b.float()).abs().amax() / b.float().abs().amax()).item()
        for a, b in zip(ours, theirs, strict=True)
    )


def block_rows(length: int, size: int = 4) -> Iterator[Row]:
    parts = tensors(length)
    pieces = [list(rank) for rank in zip(*(zigzag(x, size) for x in parts), strict=True)]
    how = How(True, 1 / math.sqrt(WIDTH))
    ours = [joined(x) for x in zip(*in_blocks(pieces, how), strict=True)]
    off = difference(ours, whole_attention(*parts))
    print(f"{length} tokens in {size} blocks: {'PASS' if off < 0.02 else 'FAIL'} (off by {off:.1e})")
    blocks = milliseconds(lambda: both_passes(pieces, how))
    whole = milliseconds(lambda: whole_attention(*parts))
    yield Row(f"{length} tokens in {size} blocks, one process", blocks, whole, "one cuDNN attention")
    forward = milliseconds(lambda: forward_blocks(pieces, how))
    with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        peer = milliseconds(lambda: F.scaled_dot_product_attention(*parts[:3], is_causal=True))
    yield Row("   forward pass only", forward, peer, "one cuDNN attention")


def _start(rank: int, world_size: int, port: int) -> Mesh:
    torch.cuda.set_device(0)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=world_size,
        init_method=f"tcp://127.0.0.1:{port}",
        timeout=timedelta(seconds=120),
    )
    return Mesh({"sp": world_size}, "cuda")


def _ours(rank: int, world_size: int, port: int, length: int) -> tuple[float, float]:
    """Milliseconds, and the difference from the serial result."""
    mesh = _start(rank, world_size, port)
    parts = tensors(length)
    expected = [shard(x, LAYOUT, mesh) for x in whole_attention(*parts)]
    q, k, v, grad = (shard(x, LAYOUT, mesh) for x in parts)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    del parts

    def step() -> tuple[Tensor, ...]:
        out = sequence_attention(q, k, v, mesh, ring="sp", heads=None, causal=True)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)

    off = difference(step(), expected)
    dist.barrier()
    return milliseconds(step, repeat=5), off


def _theirs(rank: int, world_size: int, port: int, length: int, method: str, backend: str) -> float:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    mesh = _start(rank, world_size, port)
    set_rotate_method(method)
    q, k, v, grad = tensors(length)
    grad = grad.chunk(world_size, 2)[rank].contiguous()
    names = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    with (
        sdpa_kernel(names[backend]),
        context_parallel(mesh.device_mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]),
    ):
        for x in (q, k, v):
            x.requires_grad_()

        def step() -> tuple[Tensor, ...]:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(out, (q, k, v), grad)

        step()
        dist.barrier()
        found = milliseconds(step, repeat=5)
        for x in (q, k, v):
            x.requires_grad_(False)
    return found


def ring_rows(length: int, size: int) -> Iterator[Row]:
    results = spawn(_ours, size, timeout=300, length=length)
    ours, off = (max(x) for x in zip(*results, strict=True))
    print(f"{length} tokens on {size} gloo ranks: {'PASS' if off < 0.02 else 'FAIL'} (off by {off:.1e})")
    found = {}
    for method, backend in itertools.product(("alltoall", "allgather"), ("cudnn", "flash")):
        try:
            times = spawn(_theirs, size, timeout=30, length=length, method=method, backend=backend)
            found[f"context_parallel, {method}, {backend}"] = max(times)
        except Exception as error:
            print(
                f"context_parallel ({method}, {backend}) on {size} gloo ranks does not run: {_short(error)}"
            )
    if not found:
        found = {"none: context_parallel does not run here": math.nan}
    for name, peer in found.items():
        yield Row(f"{length} tokens on {size} gloo ranks of one GPU", ours, peer, name)


def _short(error: BaseException) -> str:
    return " | ".join(line.strip() for line in str(error).splitlines() if line.strip())[:400]


def rows() -> Iterator[Row]:
    for length in (32768, 8192):
        yield from block_rows(length)
        torch.cuda.empty_cache()
    for size in (2, 4):
        yield from ring_rows(32768, size)


def main() -> int:
    parser = argparse.ArgumentParser(description="Attention in blocks and rings beside torch's own.")
    parser.add_argument("--only", choices=["kernels", "times"], help="one of the two parts")
    only = parser.parse_args().only
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {where}, cuDNN {torch.backends.cudnn.version()}", flush=True)
    failed = [] if only == "times" else check_kernels(device)
    for line in failed:
        print("FAIL", line)
    if device == "cpu" or only == "kernels":
        print("times need a GPU" if device == "cpu" else "times were left out")
        return bool(failed)
    found: list[Row] = []
    try:
        for row in rows():
            found.append(row)
            print(show([row]), flush=True)
    except Exception:
        traceback.print_exc()
        failed.append("times")
    if found:
        print("\n" + show(found))
    return bool(failed)


if __name__ == "__main__":
    from benchmarks.attention import main as of_module  # ranks find its functions by the module's name

    sys.exit(of_module())
