"""Compares what the ranks of one sequence are about to cut: all of them must hold it alike.

Ranks with other lengths would end each other's processes or wait for ever, and ranks with other tokens learn
something else without a word.  Shapes are compared in every call, by one small message between hosts, which
no device waits for; values in the first calls and then in calls 16, 32, 64 and so on.
"""

from __future__ import annotations

import ast
import math
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.mesh import Mesh
from colossalai.mesh.agreement import can_compare, differ, fingerprint, project

_BYTES = 256  # of a rank's words: a size that all know, so that one gather is enough
_FIRST = 16

_calls: WeakKeyDictionary[Mesh, int] = WeakKeyDictionary()  # of a launched job; alike on all ranks


def check_same_tokens(what: str, x: Tensor, mesh: Mesh) -> None:
    """Refuse, on every rank of a sequence, ``x`` that is not the same on all of them."""
    if not can_compare(x) or not gpc.is_initialized(ParallelMode.SEQUENCE) or gpc.mesh is not mesh:
        return
    call = _calls.get(mesh, 0) + 1
    with_values = call <= _FIRST or not call & (call - 1)
    own = _words(what, x, with_values)
    told = [torch.empty_like(own) for _ in range(gpc.get_world_size(ParallelMode.SEQUENCE))]
    dist.all_gather(told, own, group=gpc.get_cpu_group(ParallelMode.SEQUENCE))
    if any(not torch.equal(other, told[0]) for other in told[1:]):
        _compare([ast.literal_eval(bytes(t.tolist()).rstrip(b"\0").decode()) for t in told], x)
    _calls[mesh] = call  # what was refused does not count


def _words(what: str, x: Tensor, with_values: bool) -> Tensor:
    values: tuple[float, ...] = ()
    if with_values and x.is_floating_point():
        found = project(x.detach())
        values = found if all(map(math.isfinite, found)) else ()
    elif with_values:
        values = (fingerprint(x)[2],)
    text = repr((what, str(x.dtype), tuple(x.shape), values)).encode()
    return torch.frombuffer(bytearray(text.ljust(_BYTES, b"\0")), dtype=torch.uint8)


def _compare(told: list[tuple[str, str, tuple[int, ...], tuple[float, ...]]], x: Tensor) -> None:
    ranks = gpc.get_ranks_in_group(ParallelMode.SEQUENCE)
    for rank, other in zip(ranks[1:], told[1:], strict=True):
        problem = _difference(told[0], other, x)
        if problem is not None:
            raise ValueError(
                f"ranks {ranks[0]} and {rank} share one sequence and were given different batches: {problem}."
                " All ranks of a sequence take the same whole batch, which is cut here; give the sampler the"
                " data-parallel rank and size (booster.plugin.prepare_dataloader and"
                " colossalai.utils.get_dataloader do) and the same seed, and do not cut it before"
            )


def _difference(
    one: tuple[str, str, tuple[int, ...], tuple[float, ...]],
    other: tuple[str, str, tuple[int, ...], tuple[float, ...]],
    x: Tensor,
) -> str | None:
    if one[:3] != other[:3]:
        (what, dtype, shape, _), (their, kind, size, _) = one, other
        return f"{what} of {dtype} and shape {shape} on one, {their} of {kind} and shape {size} on the other"
    alike = one[3] == other[3]
    if x.is_floating_point():  # the same computation may be rounded in other ways
        alike = not (one[3] and other[3]) or not differ(
            [one[3], other[3]],  # type: ignore[list-item]
            math.sqrt(torch.finfo(x.dtype).eps),
        )
    return None if alike else f"{one[0]} of shape {one[2]} with other values"
