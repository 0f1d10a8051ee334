"""Adam on the host in one pass: half-precision gradients in, float32 weights and moments updated, rounded
weights out.

Memory is what limits it: 26 bytes are moved for each parameter in bfloat16 with its tail, 38 if what was
there before is kept, which takes 1.5 times as long on 16 cores (a copy before the update 2 times).  The work
is cut into blocks, and threads take one after the other; a thread that the operating system holds up delays
one block only.  One call does all of an update, without the interpreter, so that it can run beside a script
that keeps the interpreter busy.
"""

from __future__ import annotations

import ctypes
import math
import warnings
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

import colossalai.kernel.native.build as build
from colossalai._numeric import round_up
from colossalai.kernel.optimizer.adam_lists import AdamLists, AdamOptions
from colossalai.kernel.optimizer.lists import row
from colossalai.kernel.optimizer.snapshot import TensorSnapshot

# Elements of a block: 2^18 to 2^20 are equally fast on 16 cores.  Less work is cut finer, so that threads end
# together.
BLOCK = 1 << 19
LEAST = 1 << 15
ROUNDS = 8  # blocks for each thread
UNIT = 64  # elements: blocks are multiples of it, so that copies of aligned tensors are aligned
BLOCK_FIELDS = 10  # addresses of 4 arrays and of what they were, and of gradients; the number of elements
NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

Columns = Sequence[Sequence[Tensor | None]]


class _Options(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_float)
        for name in ("beta1", "beta2", "eps", "rate", "root", "shrink", "decay", "grad_scale")
    ]


@cache
def _library() -> ctypes.CDLL:
    return build.load("adam")


@cache
def native_works() -> bool:
    """Whether the kernel compiles here; if not, one warning says why."""
    try:
        _library()
    except (
        Exception
    ) as error:  # no compiler, an old one, a folder that cannot be written to: there is plain PyTorch
        warnings.warn(
            f"the host kernel of Adam cannot be built ({error}); a slower one of PyTorch is used",
            stacklevel=2,
        )
        return False
    return True


def _kind(lists: AdamLists) -> str:
    weights = "split" if lists.tails else NAMES[lists.halves[0].dtype] if lists.halves else "f32"
    return f"adam_{weights}_{NAMES[lists.grads[0].dtype]}"


def takes(lists: AdamLists) -> bool:
    """Whether there is a function for these dtypes."""
    weights = torch.bfloat16 if lists.tails else torch.float32
    return lists.weights[0].dtype == weights and lists.grads[0].dtype in NAMES


def adam_native_(
    lists: AdamLists, step: int, options: AdamOptions, kept: TensorSnapshot | None = None
) -> None:
    """One update in place, on as many threads as torch may use; what was there before is copied to where
    ``kept`` says.
    """
    c1, c2 = options.corrections(step)
    decay = options.lr * options.weight_decay if options.decoupled else 0.0
    packed = _Options(
        beta1=options.beta1,
        beta2=options.beta2,
        eps=options.eps,
        rate=options.lr / c1,
        root=1 / math.sqrt(c2),
        shrink=1 - decay,
        decay=0.0 if options.decoupled else options.weight_decay,
        grad_scale=1 / options.div_scale if options.div_scale > 0 else 1.0,
    )
    library, threads = _library(), torch.get_num_threads()
    share = sum(w.numel() for w in lists.weights) // (threads * ROUNDS)
    length = round_up(min(max(share, LEAST), BLOCK), UNIT)
    nowhere: list[Tensor | None] = [None] * len(lists.weights)
    before = [kept.places(column) if kept is not None and column else nowhere for column in lists.changed]
    columns = [column or lists.weights for column in lists.changed]
    blocks = [number for block in _blocks(columns, before, lists.grads, length) for number in block]
    sizes = [column[0].element_size() for column in (*columns, lists.grads)]
    library.adam_on_threads(
        getattr(library, _kind(lists)),
        (ctypes.c_int64 * len(blocks))(*blocks),
        ctypes.c_int64(len(blocks) // BLOCK_FIELDS),
        ctypes.byref(packed),
        (ctypes.c_int64 * len(sizes))(*sizes),
        ctypes.c_int64(threads),
    )


def _blocks(
    columns: Columns, before: Columns, grads: Sequence[Tensor], length: int
) -> Iterator[tuple[int, ...]]:
    """The work in blocks of at most ``length`` elements: the fields of a ``Block`` in C, which are all of 8
    bytes.
    """
    for tensors in zip(*columns, *before, grads, strict=True):
        # where each begins, and bytes of an element
        rows = [(0, 0) if t is None else (row(t).data_ptr(), t.element_size()) for t in tensors]
        total = tensors[-1].numel()
        for start in range(0, total, length):
            yield *(address + start * size for address, size in rows), min(length, total - start)
