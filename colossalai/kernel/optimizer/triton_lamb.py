"""LAMB in two launches, and the second half of LARS in one; see ``lamb.py`` and ``lars.py`` for the formulas.

The first launch leaves the squared norms of each chunk in a table, and the programs of the second add up
those of their tensor, always in the same order: the result does not depend on how the launch was scheduled.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from colossalai.kernel.optimizer.lamb import LambLists, LambOptions
from colossalai.kernel.optimizer.lars import LarsLists, LarsOptions
from colossalai.kernel.optimizer.multi_tensor import BLOCK, CHUNK, load, pointer, store, table, type_of


@triton.jit
def _moments_block(at, size, rows, numbers, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Update the moments; the squares of the weights and of the step."""
    w_row, m_row, v_row, g_row = rows
    decay, l2, beta1, beta3, beta2, rest2, unbias, root, eps, scale = numbers
    w = load(w_row, at, size, MASKED)
    g = load(g_row, at, size, MASKED) * scale + l2 * w
    m = beta1 * load(m_row, at, size, MASKED) + beta3 * g
    v = beta2 * load(v_row, at, size, MASKED) + rest2 * g * g
    u = unbias * m / (tl.sqrt(v) * root + eps) + decay * w
    if MASKED:
        u = tl.where(at < size, u, 0.0)  # with eps = 0 the padding is 0 / 0
    store(m_row, at, m, size, MASKED)
    store(v_row, at, v, size, MASKED)
    return w * w, u * u


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
    rows = (
        pointer(addresses, owner, tl.float32, ALIGNED),
        pointer(addresses, tensors + owner, tl.float32, ALIGNED),
        pointer(addresses, 2 * tensors + owner, tl.float32, ALIGNED),
        pointer(addresses, 3 * tensors + owner, GRAD, ALIGNED),
    )
    numbers = (decay, l2, beta1, beta3, beta2, rest2, unbias, root, eps, scale)
    w_sum = tl.zeros((BLOCK,), tl.float32)
    u_sum = tl.zeros((BLOCK,), tl.float32)
    full = (tl.minimum(CHUNK, size - start) // BLOCK) * BLOCK  # [Note: full blocks first]
    for offset in range(0, full, BLOCK):
        ww, uu = _moments_block(start + offset + tl.arange(0, BLOCK), size, rows, numbers, False)
        w_sum += ww
        u_sum += uu
    if full < CHUNK:
        ww, uu = _moments_block(start + full + tl.arange(0, BLOCK), size, rows, numbers, True)
        w_sum += ww
        u_sum += uu
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
def _weights_block(  # type: ignore[no-untyped-def]
    at, size, rows, numbers, HAS_HALF: tl.constexpr, MASKED: tl.constexpr
):
    w_row, m_row, v_row, h_row = rows
    decay, rate, unbias, root, eps = numbers
    w = load(w_row, at, size, MASKED)
    m = load(m_row, at, size, MASKED)
    v = load(v_row, at, size, MASKED)
    w -= rate * (unbias * m / (tl.sqrt(v) * root + eps) + decay * w)
    store(w_row, at, w, size, MASKED)
    if HAS_HALF:
        store(h_row, at, w, size, MASKED)


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
    rows = (
        pointer(addresses, owner, tl.float32, ALIGNED),
        pointer(addresses, tensors + owner, tl.float32, ALIGNED),
        pointer(addresses, 2 * tensors + owner, tl.float32, ALIGNED),
        pointer(addresses, 4 * tensors + owner, HALF, ALIGNED),
    )
    numbers = (decay, rate, unbias, root, eps)
    full = (tl.minimum(CHUNK, size - start) // BLOCK) * BLOCK  # [Note: full blocks first]
    for offset in range(0, full, BLOCK):
        _weights_block(start + offset + tl.arange(0, BLOCK), size, rows, numbers, HAS_HALF, False)
    if full < CHUNK:
        _weights_block(start + full + tl.arange(0, BLOCK), size, rows, numbers, HAS_HALF, True)


def lamb_(lists: LambLists, step: int, options: LambOptions, divisor: Tensor | None = None) -> None:
    # without halves nothing is written into the last column
    addresses, chunks, aligned = table(
        lists.weights, lists.exp_avgs, lists.exp_avg_sqs, lists.grads, lists.halves or lists.weights
    )
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
def _lars_block(  # type: ignore[no-untyped-def]
    at, size, rows, numbers, HAS_HALF: tl.constexpr, HAS_MOMENTUM: tl.constexpr, MASKED: tl.constexpr
):
    w_row, g_row, b_row, h_row = rows
    rate, decay, momentum = numbers
    w = load(w_row, at, size, MASKED)
    d = rate * (load(g_row, at, size, MASKED) + decay * w)
    if HAS_MOMENTUM:
        d += momentum * load(b_row, at, size, MASKED)
        store(b_row, at, d, size, MASKED)
    w -= d
    store(w_row, at, w, size, MASKED)
    if HAS_HALF:
        store(h_row, at, w, size, MASKED)


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
    rows = (
        pointer(addresses, owner, tl.float32, ALIGNED),
        pointer(addresses, tensors + owner, GRAD, ALIGNED),
        pointer(addresses, 2 * tensors + owner, tl.float32, ALIGNED),
        pointer(addresses, 3 * tensors + owner, HALF, ALIGNED),
    )
    numbers = (rate, decay, momentum)
    full = (tl.minimum(CHUNK, size - start) // BLOCK) * BLOCK  # [Note: full blocks first]
    for offset in range(0, full, BLOCK):
        at = start + offset + tl.arange(0, BLOCK)
        _lars_block(at, size, rows, numbers, HAS_HALF, HAS_MOMENTUM, False)
    if full < CHUNK:
        at = start + full + tl.arange(0, BLOCK)
        _lars_block(at, size, rows, numbers, HAS_HALF, HAS_MOMENTUM, True)


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
