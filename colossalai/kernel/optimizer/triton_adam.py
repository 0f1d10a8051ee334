"""Adam in one launch: gradients of any dtype in, float32 weights and moments updated, half-precision weights
out.

The half-precision weights are copies of float32 ones (``HAS_HALF``), or the upper halves of their bits
(``SPLIT``).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from colossalai.kernel.optimizer.adam import adam_foreach_
from colossalai.kernel.optimizer.adam_lists import AdamLists, AdamOptions
from colossalai.kernel.optimizer.multi_tensor import (
    BLOCK,
    CHUNK,
    load,
    load_split,
    pointer,
    store,
    store_split,
    table,
    type_of,
)


@triton.jit
def _block(  # type: ignore[no-untyped-def]
    at, size, rows, numbers, HAS_HALF: tl.constexpr, SPLIT: tl.constexpr, MASKED: tl.constexpr
):
    w_row, g_row, m_row, v_row, h_row = rows
    decay, l2, beta1, rest1, beta2, rest2, step_size, root, eps, scale = numbers
    if SPLIT:  # noqa: SIM108 - the compiler would evaluate both sides
        w = load_split(w_row, h_row, at, size, MASKED)
    else:
        w = load(w_row, at, size, MASKED)
    g = load(g_row, at, size, MASKED) * scale + l2 * w
    m = beta1 * load(m_row, at, size, MASKED) + rest1 * g
    v = beta2 * load(v_row, at, size, MASKED) + rest2 * g * g
    w = decay * w - step_size * m / (tl.sqrt(v) * root + eps)
    if SPLIT:
        store_split(w_row, h_row, at, w, size, MASKED)
    else:
        store(w_row, at, w, size, MASKED)
    store(m_row, at, m, size, MASKED)
    store(v_row, at, v, size, MASKED)
    if HAS_HALF:
        store(h_row, at, w, size, MASKED)


@triton.jit
def _adam(  # type: ignore[no-untyped-def]
    addresses,
    owners,
    firsts,
    sizes,
    tensors,
    decay,
    l2,
    beta1,
    rest1,
    beta2,
    rest2,
    step_size,
    root,
    eps,
    scale,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    HALF: tl.constexpr,
    HAS_HALF: tl.constexpr,
    SPLIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners + program)
    start = (program - tl.load(firsts + owner)) * CHUNK
    size = tl.load(sizes + owner)
    rows = (
        pointer(addresses, owner, WEIGHT, ALIGNED),
        pointer(addresses, tensors + owner, GRAD, ALIGNED),
        pointer(addresses, 2 * tensors + owner, tl.float32, ALIGNED),
        pointer(addresses, 3 * tensors + owner, tl.float32, ALIGNED),
        pointer(addresses, 4 * tensors + owner, HALF, ALIGNED),
    )
    numbers = (decay, l2, beta1, rest1, beta2, rest2, step_size, root, eps, scale)
    full = (tl.minimum(CHUNK, size - start) // BLOCK) * BLOCK  # [Note: full blocks first]
    for offset in range(0, full, BLOCK):
        _block(start + offset + tl.arange(0, BLOCK), size, rows, numbers, HAS_HALF, SPLIT, False)
    if full < CHUNK:
        _block(start + full + tl.arange(0, BLOCK), size, rows, numbers, HAS_HALF, SPLIT, True)


def adam_(lists: AdamLists, step: int, options: AdamOptions) -> None:
    # the last column: the rounded weights, or the tails of the weights, or an unused list
    halves = lists.halves or lists.tails or lists.weights
    addresses, chunks, aligned = table(lists.weights, lists.grads, lists.exp_avgs, lists.exp_avg_sqs, halves)
    if not chunks.programs:  # only empty tensors
        return
    c1, c2 = options.corrections(step)
    shrink = options.lr * options.weight_decay
    _adam[(chunks.programs,)](
        addresses,
        *chunks,
        len(lists.weights),
        decay=1 - shrink if options.decoupled else 1.0,
        l2=0.0 if options.decoupled else float(options.weight_decay),
        beta1=float(options.beta1),
        rest1=1 - options.beta1,
        beta2=float(options.beta2),
        rest2=1 - options.beta2,
        step_size=options.lr / c1,
        root=1 / math.sqrt(c2),
        eps=float(options.eps),
        scale=1 / options.div_scale if options.div_scale > 0 else 1.0,
        WEIGHT=tl.int16 if lists.tails else tl.float32,
        GRAD=type_of(lists.grads),
        HALF=type_of(halves),
        HAS_HALF=bool(lists.halves),
        SPLIT=bool(lists.tails),
        ALIGNED=aligned,
        CHUNK=CHUNK,
        BLOCK=BLOCK,
    )


def try_it() -> None:
    """One step on a few numbers, compared with plain PyTorch."""

    def numbers() -> AdamLists:
        def some() -> list[torch.Tensor]:
            return [torch.linspace(0.1, 1, 5, device="cuda")]

        return AdamLists(
            weights=some(),
            grads=[some()[0].bfloat16()],
            halves=[some()[0].bfloat16()],
            exp_avgs=some(),
            exp_avg_sqs=some(),
        )

    options = AdamOptions(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)
    ours, plain = numbers(), numbers()
    adam_(ours, 2, options)
    adam_foreach_(plain, 2, options)
    torch.testing.assert_close(ours.weights, plain.weights)
    torch.testing.assert_close(ours.halves, plain.halves)
