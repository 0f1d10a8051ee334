"""LAMB in two launches, and the second half of LARS in one; see ``lamb.py`` and ``lars.py`` for the formulas.

The first launch leaves the squared norms of each chunk in a table, and the programs of the second add up those of their
tensor, always in the same order: the result does not depend on how the launch was scheduled.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from colossalai.kernel.lamb import LambLists, LambOptions
from colossalai.kernel.lars import LarsLists, LarsOptions
from colossalai.kernel.multi_tensor import BLOCK, CHUNK, pointer, table, type_of


@triton.jit
def _moments(  # type: ignore[no-untyped-def]
    addresses,
    owners,
    firsts,
    sizes,
    tensors,
    divisor,
    weight_squares,
    update_squares,
    decay,
    l2,
    beta1,
    beta3,
    beta2,
    rest2,
    unbias,
    root,
    eps,
    GRAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners + program)
    start = (program - tl.load(firsts + owner)) * CHUNK
    size = tl.load(sizes + owner)
    scale = 1.0 / tl.load(divisor)
    w_row = pointer(addresses, owner, tl.float32, ALIGNED)
    m_row = pointer(addresses, tensors + owner, tl.float32, ALIGNED)
    v_row = pointer(addresses, 2 * tensors + owner, tl.float32, ALIGNED)
    g_row = pointer(addresses, 3 * tensors + owner, GRAD, ALIGNED)
    w_sum = tl.zeros((BLOCK,), tl.float32)
    u_sum = tl.zeros((BLOCK,), tl.float32)
    for offset in range(0, CHUNK, BLOCK):
        at = start + offset + tl.arange(0, BLOCK)
        inside = at < size
        w = tl.load(w_row + at, mask=inside, other=0.0)
        g = tl.load(g_row + at, mask=inside, other=0.0).to(tl.float32) * scale + l2 * w
        m = beta1 * tl.load(m_row + at, mask=inside, other=0.0) + beta3 * g
        v = beta2 * tl.load(v_row + at, mask=inside, other=0.0) + rest2 * g * g
        u = unbias * m / (tl.sqrt(v) * root + eps) + decay * w
        u = tl.where(inside, u, 0.0)  # with eps = 0 the padding would be 0 / 0
        tl.store(m_row + at, m, mask=inside)
        tl.store(v_row + at, v, mask=inside)
        w_sum += w * w
        u_sum += u * u
    tl.store(weight_squares + program, tl.sum(w_sum))
    tl.store(update_squares + program, tl.sum(u_sum))


@triton.jit
def _total(squares, first, last, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    sums = tl.zeros((BLOCK,), tl.float32)
    for begin in range(first, last, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        sums += tl.load(squares + at, mask=at < last, other=0.0)
    return tl.sum(sums)


@triton.jit
def _weights(  # type: ignore[no-untyped-def]
    addresses,
    owners,
    firsts,
    sizes,
    tensors,
    weight_squares,
    update_squares,
    decay,
    lr,
    unbias,
    root,
    eps,
    HALF: tl.constexpr,
    HAS_HALF: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners + program)
    first = tl.load(firsts + owner)
    start = (program - first) * CHUNK
    size = tl.load(sizes + owner)
    rate = lr
    if ADAPTIVE:
        last = tl.load(firsts + owner + 1)
        w_norm = tl.sqrt(_total(weight_squares, first, last, BLOCK))
        u_norm = tl.sqrt(_total(update_squares, first, last, BLOCK))
        usable = (w_norm > 0.0) & (u_norm > 0.0)
        rate = lr * tl.where(usable, w_norm / tl.where(usable, u_norm, 1.0), 1.0)
    w_row = pointer(addresses, owner, tl.float32, ALIGNED)
    m_row = pointer(addresses, tensors + owner, tl.float32, ALIGNED)
    v_row = pointer(addresses, 2 * tensors + owner, tl.float32, ALIGNED)
    for offset in range(0, CHUNK, BLOCK):
        at = start + offset + tl.arange(0, BLOCK)
        inside = at < size
        w = tl.load(w_row + at, mask=inside, other=0.0)
        m = tl.load(m_row + at, mask=inside, other=0.0)
        v = tl.load(v_row + at, mask=inside, other=1.0)
        w -= rate * (unbias * m / (tl.sqrt(v) * root + eps) + decay * w)
        tl.store(w_row + at, w, mask=inside)
        if HAS_HALF:
            h_row = pointer(addresses, 4 * tensors + owner, HALF, ALIGNED)
            tl.store(h_row + at, w.to(HALF), mask=inside)


def lamb_(lists: LambLists, step: int, options: LambOptions, divisor: Tensor | None = None) -> None:
    columns = [lists.weights, lists.exp_avgs, lists.exp_avg_sqs, lists.grads]
    if lists.halves:
        columns.append(lists.halves)
    addresses, chunks, aligned = table(*columns)
    if not chunks.programs:  # only empty tensors
        return
    if divisor is None:
        divisor = torch.ones((), device=lists.device)
    squares = torch.empty(2, chunks.programs, device=lists.device)
    c1, c2 = options.corrections(step)
    shared = {
        "decay": float(options.weight_decay) if options.decoupled else 0.0,
        "unbias": 1 / c1,
        "root": 1 / math.sqrt(c2),
        "eps": float(options.eps),
        "ALIGNED": aligned,
        "CHUNK": CHUNK,
        "BLOCK": BLOCK,
    }
    tables = (addresses, *chunks, len(lists.weights))
    _moments[(chunks.programs,)](
        *tables,
        divisor.float(),
        squares[0],
        squares[1],
        l2=0.0 if options.decoupled else float(options.weight_decay),
        beta1=float(options.beta1),
        beta3=options.beta3,
        beta2=float(options.beta2),
        rest2=1 - options.beta2,
        GRAD=type_of(lists.grads),
        **shared,
    )
    _weights[(chunks.programs,)](
        *tables,
        squares[0],
        squares[1],
        lr=float(options.lr),
        HALF=type_of(lists.halves or lists.weights),
        HAS_HALF=bool(lists.halves),
        ADAPTIVE=options.adaptive,
        **shared,
    )


@triton.jit
def _lars(  # type: ignore[no-untyped-def]
    addresses,
    owners,
    firsts,
    sizes,
    tensors,
    rates,
    decay,
    momentum,
    GRAD: tl.constexpr,
    HALF: tl.constexpr,
    HAS_HALF: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners + program)
    start = (program - tl.load(firsts + owner)) * CHUNK
    size = tl.load(sizes + owner)
    rate = tl.load(rates + owner)
    w_row = pointer(addresses, owner, tl.float32, ALIGNED)
    g_row = pointer(addresses, tensors + owner, GRAD, ALIGNED)
    for offset in range(0, CHUNK, BLOCK):
        at = start + offset + tl.arange(0, BLOCK)
        inside = at < size
        w = tl.load(w_row + at, mask=inside, other=0.0)
        d = rate * (tl.load(g_row + at, mask=inside, other=0.0).to(tl.float32) + decay * w)
        if HAS_MOMENTUM:
            b_row = pointer(addresses, 2 * tensors + owner, tl.float32, ALIGNED)
            d += momentum * tl.load(b_row + at, mask=inside, other=0.0)
            tl.store(b_row + at, d, mask=inside)
        w -= d
        tl.store(w_row + at, w, mask=inside)
        if HAS_HALF:
            h_row = pointer(addresses, 3 * tensors + owner, HALF, ALIGNED)
            tl.store(h_row + at, w.to(HALF), mask=inside)


def lars_(lists: LarsLists, rates: Tensor, options: LarsOptions) -> None:
    # a list that is absent is not read: any other list stands in its column
    columns = [lists.weights, lists.grads, lists.buffers or lists.weights, lists.halves or lists.weights]
    addresses, chunks, aligned = table(*columns)
    if not chunks.programs:  # only empty tensors
        return
    _lars[(chunks.programs,)](
        addresses,
        *chunks,
        len(lists.weights),
        rates.float(),
        decay=float(options.weight_decay),
        momentum=float(options.momentum),
        GRAD=type_of(lists.grads),
        HALF=type_of(lists.halves or lists.weights),
        HAS_HALF=bool(lists.halves),
        HAS_MOMENTUM=bool(lists.buffers),
        ALIGNED=aligned,
        CHUNK=CHUNK,
        BLOCK=BLOCK,
    )
