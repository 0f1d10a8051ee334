"""The pieces that a Gemini optimizer steps, which states it keeps of each, and how many bytes the states of a
chunk take.

A piece is this rank's slice of a parameter (``colossalai.zero.pieces``).  The bytes of states are counted in
the tier where the chunk rests; the disk counts its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai._numeric import HALF_DTYPES
from colossalai.interface import OptimizerWrapper
from colossalai.mesh import full_shape
from colossalai.nn.optimizer.base import MultiTensorOptimizer, is_cut, wide
from colossalai.nn.optimizer.large_batch import FusedLAMB
from colossalai.utils.lazy_tensor import is_lazy
from colossalai.zero.gemini.chunk import Chunk, ParamSlot
from colossalai.zero.gemini.shadow_optimizer import group_options, stateless_copy
from colossalai.zero.pieces import (
    FlatLayout,
    Piece,
    is_elementwise,
    or_say_so,
    piece_of,
    whole_parameters_problem,
)
from colossalai.zero.sharded import needs_masters

if TYPE_CHECKING:
    from colossalai.zero.gemini.ddp import ZeroDDP
    from colossalai.zero.gemini.disk_states import DiskStates

Places = dict[Piece, tuple[Chunk, ParamSlot]]


class ChunkPiece(NamedTuple):
    """A piece of a chunk, its slot, and the number of its group."""

    group: int
    piece: Piece
    slot: ParamSlot


class ChunkPieces:
    """Finds the pieces of every chunk, also the empty ones."""

    def __init__(
        self, optim: Optimizer, pieces: Sequence[Piece], places: Mapping[Piece, tuple[Chunk, ParamSlot]]
    ):
        numbers = {id(p): n for n, group in enumerate(optim.param_groups) for p in group["params"]}
        self._of: dict[int, list[ChunkPiece]] = {}
        for piece in pieces:
            chunk, slot = places[piece]
            self._of.setdefault(chunk.index, []).append(ChunkPiece(numbers[id(piece.value)], piece, slot))

    def of(self, chunk: Chunk) -> list[ChunkPiece]:
        return self._of.get(chunk.index, [])

    def pieces(self, chunk: Chunk) -> list[Piece]:
        """Return the pieces of ``chunk`` that are not empty."""
        return [member.piece for member in self.of(chunk) if not member.piece.is_empty]


def like(grad: Tensor, piece: Piece) -> Tensor:
    """Return ``grad`` in the shape and dtype of the piece's value: a master weight needs float32."""
    return grad.view(piece.value.shape).to(piece.value.dtype)


def check_params(optim: Any, module: ZeroDDP) -> None:
    if not isinstance(optim, Optimizer) or isinstance(optim, OptimizerWrapper):
        raise TypeError(
            f"a Gemini optimizer wraps a plain torch.optim.Optimizer, got {type(optim).__name__}: {optim!r}"
        )
    if module.optimizer is not None:
        raise RuntimeError(
            f"this {type(module).__name__} has an optimizer already; give all parameters to one, in groups"
        )
    for n, group in enumerate(optim.param_groups):
        group["params"] = [module.replaced.get(p, p) for p in group["params"]]
        for p in group["params"]:
            if not module.chunk_manager.holds(p):
                raise ValueError(
                    f"group {n} of {type(optim).__name__} holds a parameter of shape {tuple(p.shape)} that is"
                    " in no chunk of the model; build the optimizer from the parameters of the model that"
                    " GeminiDDP was given"
                )
    if (problem := whole_parameters_problem(optim, module.chunk_manager.ranks.size)) is not None:
        raise ValueError(problem)
    cut = next((p for group in optim.param_groups for p in group["params"] if is_cut(p)), None)
    if cut is not None and not is_elementwise(optim):
        raise ValueError(
            f"{type(optim).__name__} needs whole parameters, but one of shape {tuple(full_shape(cut))} is cut"
            " over ranks by tensor parallelism; use an optimizer that works element by element, such as"
            f" HybridAdam{or_say_so(optim)}"
        )
    clips = isinstance(optim, FusedLAMB) and optim.defaults["max_grad_norm"]
    if clips and not module.gemini_manager.policy.rests_on_compute:
        raise ValueError(
            f"{type(optim).__name__} clips by the norm of all gradients (max_grad_norm={clips}), but chunks"
            " that rest on the host are updated one by one; give it max_grad_norm=0, and clipping_norm to the"
            " Gemini optimizer, or placement_policy='cuda'"
        )


def make_pieces(optim: Optimizer, module: ZeroDDP) -> Places:
    """Make a piece for every trained parameter of the optimizer."""
    chunks = module.chunk_manager
    layouts: dict[int, FlatLayout] = {}
    places: Places = {}
    for group in optim.param_groups:
        for param in group["params"]:
            if not param.requires_grad:
                continue
            chunk, slot = chunks.get_chunk(param), chunks.get_slot(param)
            if chunk.index not in layouts:
                layouts[chunk.index] = chunk.layout()
            layout, index = layouts[chunk.index], chunk.slots.index(slot)
            own = chunk.own_part(slot)
            weight = chunk.shard[:0] if own is None else own
            dtype = torch.float32 if needs_masters(optim, chunk.dtype) else None
            piece = piece_of(
                param, layout, index, chunk.ranks.rank, weight, dtype=dtype, group=chunk.ranks.gather
            )
            places[piece] = (chunk, slot)
    return places


Fields = tuple[tuple[str, torch.dtype], ...]
MASTER = "master"


def is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


class StateKinds:
    """Knows which states of ``optim`` have a number for each element of a parameter, also before they are
    made.
    """

    def __init__(self, optim: Optimizer) -> None:
        self.optim = optim
        self._groups = {id(p): n for n, group in enumerate(optim.param_groups) for p in group["params"]}
        self._probed: dict[tuple[int, torch.dtype], Fields] = {}

    def of(self, piece: Piece) -> Fields:
        """Return the names and dtypes of these states; empty if the optimizer does not work element by
        element.
        """
        value, optim = piece.value, self.optim
        known = {n: v for n, v in optim.state.get(value, {}).items() if is_large(v)}
        number = self._groups[id(value)]
        if not isinstance(optim, MultiTensorOptimizer):
            if not is_elementwise(optim):
                return ()
            if known or optim.state.get(
                value
            ):  # of a weight without dims, states that were made are not large
                return tuple((n, v.dtype) for n, v in known.items())
            return self._probe(number, value.dtype)
        found = [(name, wide(value)) for name in optim.state_names(optim.param_groups[number])]
        if value.dtype in HALF_DTYPES:
            extra = MASTER if MASTER in known else optim.extra(value)
            found.append((extra, torch.int16 if extra == "tail" else torch.float32))
        return tuple(found)

    def nbytes(self, piece: Piece) -> int:
        """Return the bytes of the states of ``piece``; for an optimizer that is not ours, those of Adam."""
        if not isinstance(self.optim, MultiTensorOptimizer):
            return piece.value.numel() * 2 * piece.value.dtype.itemsize
        return piece.value.numel() * sum(dtype.itemsize for _, dtype in self.of(piece))

    def sort(self, pieces: Iterable[Piece]) -> dict[Fields, list[Piece]]:
        """Group the pieces that have such states by their kinds."""
        found: dict[Fields, list[Piece]] = {}
        for piece in pieces:
            if fields := self.of(piece):
                found.setdefault(fields, []).append(piece)
        return found

    def splits(self, value: Tensor) -> bool:
        """Whether the optimizer keeps only the digits that a half-precision parameter lacks, and no master
        weight.
        """
        return (
            isinstance(self.optim, MultiTensorOptimizer)
            and value.dtype in HALF_DTYPES
            and self.optim.extra(value) == "tail"
        )

    def with_tail(self, fields: Fields) -> Fields:
        return tuple(("tail", torch.int16) if name == MASTER else (name, dtype) for name, dtype in fields)

    def _probe(self, number: int, dtype: torch.dtype) -> Fields:
        """Let a copy of the optimizer make the states of a parameter of one element."""
        if (number, dtype) not in self._probed:
            dummy = nn.Parameter(torch.zeros(1, dtype=dtype))
            dummy.grad = torch.zeros(1, dtype=dtype)
            copy: Any = stateless_copy(self.optim)
            copy.param_groups = [{**group_options(self.optim)[number], "params": [dummy]}]
            copy.step()
            made = copy.state[dummy].items()
            self._probed[number, dtype] = tuple((name, v.dtype) for name, v in made if is_large(v))
        return self._probed[number, dtype]


class StateBytes:
    """Counts the bytes of optimizer states in memory, chunk by chunk, in the tier where the chunk rests."""

    def __init__(
        self, model: ZeroDDP, optim: Optimizer, chunk_pieces: ChunkPieces, disk: DiskStates | None
    ) -> None:
        self.model, self.chunks = model, model.chunk_manager
        self.optim, self.chunk_pieces, self.disk = optim, chunk_pieces, disk
        # chunks with something on a disk, on some rank: they are not promoted
        self.on_disk: set[int] = set()
        self._counted: dict[int, int] = {}
        self._kinds = StateKinds(optim)

    def of(self, chunk: Chunk) -> int:
        """Return the bytes that are counted for ``chunk``."""
        return self._counted.get(chunk.index, 0)

    def room(self) -> int:
        """Return the bytes of the host that are free for states and snapshots."""
        return self.chunks.host_room() - self.model.gradients.memory.host.missing_bytes

    def count(self, chunk: Chunk, coming: int = 0) -> None:
        """Count the states of ``chunk``, and ``coming`` bytes more, if that is more than before."""
        now = self._bytes(chunk) + coming
        if now > self.of(chunk):
            self._set(chunk, now)

    def forget(self, chunk: Chunk) -> None:
        """Count no states of ``chunk``: others will replace them."""
        assert chunk.home is not None
        chunk.home.release(self._counted.pop(chunk.index, 0))

    def expected(self) -> dict[int, int]:
        """Return the bytes of the states of every chunk when all have been made: the most of any rank, the
        same on all.
        """
        chunks = self.chunks.chunks
        found = self._most([self._expected_of(chunk) for chunk in chunks])
        return {chunk.index: nbytes for chunk, nbytes in zip(chunks, found, strict=True)}

    def coming(self, chunk: Chunk) -> int:
        """Return the bytes of states of ``chunk`` that have not been made yet."""
        return max(self._expected_of(chunk) - self.of(chunk), 0)

    def _expected_of(self, chunk: Chunk) -> int:
        pieces = self.chunk_pieces.pieces(chunk)
        masters = sum(piece.value.nbytes for piece in pieces if not piece.is_shared)
        return masters + sum(map(self._kinds.nbytes, pieces))

    def agree(self) -> None:
        """Count the same on all ranks, the most of any: ranks must fetch and evict the same chunks."""
        every, disk = self.chunks.chunks, self.disk
        if disk is None and self.chunks.ranks.size == 1:
            return
        self.model.gemini_manager.worker.wait_all()
        if disk is not None:
            flags = self._most([int(disk.has(chunk)) for chunk in every])
            self.on_disk = {chunk.index for chunk, flag in zip(every, flags, strict=True) if flag}
        for chunk, most in zip(every, self._most([self.of(chunk) for chunk in every]), strict=True):
            if disk is None or not disk.has(chunk):
                self._set(chunk, most)

    def _set(self, chunk: Chunk, nbytes: int) -> None:
        assert chunk.home is not None
        chunk.home.reserve(nbytes - self.of(chunk), f"optimizer states of {chunk.name}")
        self._counted[chunk.index] = nbytes

    def _most(self, numbers: list[int]) -> list[int]:
        if self.chunks.ranks.size == 1:
            return numbers
        most = torch.tensor(numbers, dtype=torch.int64, device=self.model.gradients.meeting)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.chunks.ranks.reduce)
        return most.tolist()

    def _bytes(self, chunk: Chunk) -> int:
        total = 0
        for _, piece, _ in self.chunk_pieces.of(chunk):
            state = self.optim.state.get(piece.value, {})
            total += sum(t.nbytes for t in state.values() if is_large(t) and not is_lazy(t))
            if not piece.is_shared:
                total += piece.value.nbytes
        return total
