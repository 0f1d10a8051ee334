"""Random numbers that do not depend on the plan.

A number is a pure function of a key (seed, name of the tensor, ...) and of the element's index in the *whole*
tensor.  So a rank draws just its own piece, and the pieces of any plan join to the tensor of the serial
model, bit for bit, also when no rank ever holds it whole.

The generator is SplitMix64 (a Weyl sequence and a 64-bit mixer) evaluated at ``index``.  Only integer
arithmetic and ``+ - * /``, which every device rounds correctly, are used, one operation per kernel so that no
compiler fuses two of them.  Hence CPU and GPU agree bit for bit as well; their ``log``, ``cos`` and even
``sqrt`` do not (measured: the ``sqrt`` of an H200 and of its host differ in 0.6 % of all arguments).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from colossalai.mesh.layout import Layout, local_shape, local_slices, replicated
from colossalai.mesh.mesh import Mesh

_WORD = 1 << 64
# Elements drawn at a time: for each CPU thread as many as stay in its cache, on a GPU enough to keep it busy.
_SLAB_CPU, _SLAB_GPU = 1 << 15, 1 << 24

# For every dim the (start, length) ranges that are selected.
Ranges = tuple[tuple[tuple[int, int], ...], ...]


def random_key(seed: int, *names: str | int) -> int:
    """A 64-bit key for the stream of numbers that ``names`` identify under ``seed``."""
    text = "\0".join([str(int(seed)), *(f"{type(n).__name__}:{n}" for n in names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def random_bits(key: int | Tensor, index: Tensor) -> Tensor:
    """64 random bits (as int64) for every element of the int64 tensor ``index``.

    ``key`` may be a tensor with the keys of the elements, as :func:`signed_key` gives them.
    """
    x = index * signed_key(0x9E3779B97F4A7C15)
    x += key if isinstance(key, Tensor) else signed_key(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= _shift_right(x, shift)
        x *= signed_key(factor)
    x ^= _shift_right(x, 31)
    return x


def signed_key(word: int) -> int:
    """The int64 with the bits of a key."""
    return word - _WORD if word >= _WORD // 2 else word


def _shift_right(x: Tensor, n: int) -> Tensor:
    # int64 shifts keep the sign: mask the copies of it away
    return (x >> n).bitwise_and_((1 << (64 - n)) - 1)


def uniform_numbers(key: int, index: Tensor) -> Tensor:
    """float32 in [0, 1), multiples of 2**-24."""
    return _shift_right(random_bits(key, index), 40).float() * 2.0**-24


def fine_uniform_numbers(key: int | Tensor, index: Tensor) -> Tensor:
    """float64 in [0, 1), multiples of 2**-53."""
    return _shift_right(random_bits(key, index), 11).double() * 2.0**-53


def normal_numbers(key: int, index: Tensor) -> Tensor:
    """float32 from the standard normal distribution, by inversion."""
    bits = random_bits(key, index)
    # p in (0, 1/2]: 47 bits, so that tails reach beyond 7 sigma; the lowest bit is the sign
    high, low = _shift_right(bits, 41).float(), (_shift_right(bits, 17) & 0xFFFFFF).float()
    tail = (high * 2.0**-24).add_(low * 2.0**-48).add_(2.0**-49)
    value = _upper_quantile(tail)
    return torch.where((bits & 1).bool(), value, -value)


def truncated_normal_numbers(key: int, index: Tensor, low: float, high: float) -> Tensor:
    """float32 from the standard normal distribution between ``low`` and ``high``, by inversion."""
    below, above = (0.5 * math.erfc(-bound / math.sqrt(2.0)) for bound in (low, high))
    p = uniform_numbers(key, index).mul_(above - below).add_(below)
    upper = p > 0.5
    value = _upper_quantile(torch.where(upper, 1.0 - p, p).clamp_(2.0**-24, 0.5))
    return torch.where(upper, value, -value).clamp_(low, high)


# Algorithm AS 241 (Wichura 1988), routine PPND7: rational approximations, relative error about 1e-7.
_CENTRE = (
    (59.109374720, 159.29113202, 50.434271938, 3.3871327179),
    (67.187563600, 78.757757664, 17.895169469, 1.0),
)
_TAIL = (0.17023821103, 1.3067284816, 2.7568153900, 1.4234372777), (0.12021132975, 0.73700164250, 1.0)
_FAR = (0.017337203997, 0.42868294337, 3.0812263860, 6.6579051150), (0.012258202635, 0.24197894225, 1.0)


def _ratio(r: Tensor, table: tuple[tuple[float, ...], tuple[float, ...]]) -> Tensor:
    return _polynomial(r, table[0]) / _polynomial(r, table[1])


def _polynomial(r: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    value = r * coefficients[0]
    for c in coefficients[1:-1]:
        value.add_(c).mul_(r)
    return value.add_(coefficients[-1])


def _upper_quantile(p: Tensor) -> Tensor:
    """The z >= 0 that a normal number exceeds with probability p, for p in (0, 1/2]."""
    q = 0.5 - p
    z = q * _ratio(0.180625 - q * q, _CENTRE)
    outer = (q > 0.425).nonzero(as_tuple=True)
    r = _sqrt(_log(p[outer]).neg_())
    far = _ratio(r - 5.0, _FAR)
    z[outer] = torch.where(r <= 5.0, _ratio(r - 1.6, _TAIL), far)
    return z


def _sqrt(x: Tensor) -> Tensor:
    """Square root for x in [2, 40] by Newton's method; the first guess is off by less than a fifth."""
    root = x * 0.14 + 1.25
    for _ in range(4):
        root = (root + x / root) * 0.5
    return root


def _log(x: Tensor) -> Tensor:
    """Natural logarithm: x = m 2**e, log m = 2 atanh((m - 1) / (m + 1))."""
    m, e = torch.frexp(x)
    small = m < math.sqrt(0.5)
    m, e = torch.where(small, m * 2.0, m), torch.where(small, e - 1, e)
    s = (m - 1.0) / (m + 1.0)
    series = _polynomial(s * s, (2 / 11, 2 / 9, 2 / 7, 2 / 5, 2 / 3, 2.0))
    return (s * series).add_(e.float() * math.log(2.0))


def fill_from(
    numbers: Callable[[Tensor], Tensor],
    out: Tensor,
    shape: tuple[int, ...],
    layout: Layout | None = None,
    mesh: Mesh | None = None,
    *,
    uneven: bool = False,
) -> Tensor:
    """Write ``numbers(index)`` into ``out``, this rank's piece of a tensor of ``shape`` that lies in
    ``layout``.
    """
    if layout is None or mesh is None:
        ranges: Ranges = tuple(((0, n),) for n in shape)
    else:
        ranges = local_slices(tuple(shape), layout, mesh, uneven=uneven)
    expected = tuple(sum(n for _, n in pieces) for pieces in ranges)
    if expected != tuple(out.shape):
        raise ValueError(
            f"out has shape {tuple(out.shape)}, but the piece of {tuple(shape)} in {layout} has {expected}"
        )
    flat = (
        out.view(-1) if out.is_contiguous() else torch.empty(out.numel(), dtype=out.dtype, device=out.device)
    )
    position = 0
    for index in _index_slabs(tuple(shape), ranges, out.device):
        flat[position : position + len(index)] = numbers(index)
        position += len(index)
    return out if out.is_contiguous() else out.copy_(flat.view(out.shape))


def _index_slabs(shape: tuple[int, ...], ranges: Ranges, device: torch.device) -> Iterator[Tensor]:
    """The indices in the whole tensor of the elements that ``ranges`` select, in order, a slab at a time."""
    outer, runs = _rows_and_runs(shape, ranges)
    slab = _SLAB_CPU * torch.get_num_threads() if device.type == "cpu" else _SLAB_GPU
    starts = torch.zeros(1, dtype=torch.int64, device=device)
    for pieces, stride in outer:
        step = torch.cat([torch.arange(a, a + n, device=device) for a, n in pieces]) * stride
        starts = (starts[:, None] + step).flatten()
    width = sum(n for _, n in runs)
    if width <= slab:  # many short rows: several of them make a slab
        row = torch.cat([torch.arange(a, a + n, device=device) for a, n in runs])
        for block in starts.split(max(1, slab // max(1, width))):
            yield (block[:, None] + row).flatten()
        return
    for start in starts.tolist():
        for a, n in runs:
            for begin in range(a, a + n, slab):
                yield torch.arange(start + begin, start + min(begin + slab, a + n), device=device)


def _rows_and_runs(
    shape: tuple[int, ...], ranges: Ranges
) -> tuple[list[tuple[tuple[tuple[int, int], ...], int]], tuple[tuple[int, int], ...]]:
    """The selection as rows (ranges and stride of each outer dim) of runs that are contiguous in the whole
    tensor.
    """
    outer: list[tuple[tuple[tuple[int, int], ...], int]] = []
    runs: tuple[tuple[int, int], ...] = ((0, 1),)
    stride, joined = 1, True
    for size, pieces in reversed(list(zip(shape, ranges, strict=True))):
        if joined:  # everything further inside is whole: this dim's ranges are runs
            runs = tuple((a * stride, n * stride) for a, n in pieces)
            joined = pieces == ((0, size),)
        else:
            outer.insert(0, (pieces, stride))
        stride *= size
    return outer, runs


def dropout_mask(
    key: int, p: float, shape: tuple[int, ...], layout: Layout, mesh: Mesh | None, device: torch.device
) -> Tensor:
    """This rank's piece of the mask that the serial model would draw: True where an element is kept."""
    local = shape if mesh is None else local_shape(shape, layout, mesh)
    out = torch.empty(local, dtype=torch.bool, device=device)
    return fill_from(lambda index: uniform_numbers(key, index) >= p, out, shape, layout, mesh)


_streams: WeakSet[RandomStream] = WeakSet()


def stream_positions() -> dict[RandomStream, int]:
    """Where every stream of this process stands; activation checkpointing goes back there to repeat its
    draws.
    """
    return {stream: stream.step for stream in _streams}


def set_stream_positions(positions: dict[RandomStream, int]) -> None:
    for stream, step in positions.items():
        stream.step = step


class RandomStream:
    """A seed and a counter: each draw takes the next key, and the state can be saved and set back.

    All ranks advance it alike; what differs between ranks is which elements of a draw they hold.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> RandomStream:
        stream = super().__new__(cls)
        _streams.add(stream)  # here, so that copies and unpickled streams are known as well
        return stream

    def __init__(self, seed: int, name: str = "") -> None:
        self.seed, self.name, self.step = seed, name, 0

    def next_key(self) -> int:
        self.step += 1
        return random_key(self.seed, self.name, self.step)

    def state_dict(self) -> dict[str, int | str]:
        return {"seed": self.seed, "name": self.name, "step": self.step}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        self.seed, self.name, self.step = int(state["seed"]), str(state["name"]), int(state["step"])

    def dropout(
        self,
        x: Tensor,
        p: float,
        mesh: Mesh | None = None,
        layout: Layout | None = None,
        *,
        training: bool = True,
    ) -> Tensor:
        """Dropout whose mask is that of the serial model; ``x`` is this rank's piece in ``layout``, cut
        evenly.
        """
        if not 0.0 <= p < 1.0:
            raise ValueError(f"the dropout probability must lie in [0, 1), got {p}")
        if not training or p == 0.0:
            return x
        key = self.next_key()
        shape, layout = tuple(x.shape), replicated(x.ndim) if layout is None else layout
        if mesh is not None:
            shape = tuple(n * mesh.group_size(*axes) for n, axes in zip(shape, layout.dims, strict=True))
        keep = dropout_mask(key, p, shape, layout, mesh, x.device)
        return x * keep * (1.0 / (1.0 - p))
