"""What ``GeminiOptimizer`` is made of: pieces of parameters in chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from colossalai.interface import OptimizerWrapper
from colossalai.mesh import full_shape
from colossalai.nn.optimizer.base import is_cut
from colossalai.nn.optimizer.large_batch import FusedLAMB
from colossalai.zero.gemini.chunk import Chunk, Slot
from colossalai.zero.gemini.ddp import ZeroDDP
from colossalai.zero.pieces import (
    FlatLayout,
    Piece,
    is_elementwise,
    or_say_so,
    piece_of,
    whole_parameters_problem,
)
from colossalai.zero.sharded import needs_masters

Places = dict[Piece, tuple[Chunk, Slot]]


class Member(NamedTuple):
    """A piece of a chunk, with the number of its group."""

    group: int
    piece: Piece
    slot: Slot


class Members:
    """The pieces of every chunk, also those that are empty."""

    def __init__(self, optim: Optimizer, pieces: Sequence[Piece], places: Mapping[Piece, tuple[Chunk, Slot]]):
        numbers = {id(p): n for n, group in enumerate(optim.param_groups) for p in group["params"]}
        self._of: dict[int, list[Member]] = {}
        for piece in pieces:
            chunk, slot = places[piece]
            self._of.setdefault(chunk.index, []).append(Member(numbers[id(piece.value)], piece, slot))

    def of(self, chunk: Chunk) -> list[Member]:
        return self._of.get(chunk.index, [])

    def pieces(self, chunk: Chunk) -> list[Piece]:
        """Those that are not empty."""
        return [member.piece for member in self.of(chunk) if not member.piece.is_empty]


def like(grad: Tensor, piece: Piece) -> Tensor:
    """A gradient as the piece's value takes it: a master wants it in float32."""
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
                    f"group {n} of {type(optim).__name__} holds a parameter of shape {tuple(p.shape)} that is in no chunk of the"
                    " model; build the optimizer from the parameters of the model that GeminiDDP was given"
                )
    if (problem := whole_parameters_problem(optim, module.chunk_manager.ranks.size)) is not None:
        raise ValueError(problem)
    cut = next((p for group in optim.param_groups for p in group["params"] if is_cut(p)), None)
    if cut is not None and not is_elementwise(optim):
        raise ValueError(
            f"{type(optim).__name__} needs whole parameters, but one of shape {tuple(full_shape(cut))} is cut over ranks by tensor"
            f" parallelism; use an optimizer that works element by element, such as HybridAdam{or_say_so(optim)}"
        )
    clips = isinstance(optim, FusedLAMB) and optim.defaults["max_grad_norm"]
    if clips and not module.gemini_manager.policy.rests_on_compute:
        raise ValueError(
            f"{type(optim).__name__} clips by the norm of all gradients (max_grad_norm={clips}), but chunks that rest on the host are"
            " updated one by one; give it max_grad_norm=0, and clipping_norm to the Gemini optimizer, or placement_policy='cuda'"
        )


def make_pieces(optim: Optimizer, module: ZeroDDP) -> Places:
    """A piece for every parameter of the optimizer that is trained."""
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
            piece = piece_of(param, layout, index, chunk.ranks.rank, weight, dtype=dtype)
            places[piece] = (chunk, slot)
    return places
