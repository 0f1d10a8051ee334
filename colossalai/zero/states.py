"""The states of a sharded optimizer as those of the serial one: every slice in its place.

A state of a piece (a moment, a master) is a slice of the state of its parameter.  :class:`SlicedTensor`
stands for the whole of it and is put together when a caller asks, so that saving never holds more than one of
them.  Loading cuts a whole tensor at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.checkpoint_io.assembly import assemble
from colossalai.checkpoint_io.boxes import Box
from colossalai.utils.lazy_tensor import fetched
from colossalai.zero.pieces import Piece

Source = tuple[int, int, int]  # rank, and where its slice begins and ends in the flattened whole


class SlicedTensor(Tensor):
    """A tensor whose slices lie on the ranks of a group; it has a shape and a dtype, and ``full_tensor``."""

    local: Tensor | None
    sources: Sequence[Source]
    group: dist.ProcessGroup | None

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        local: Tensor | None,
        sources: Sequence[Source],
        group: dist.ProcessGroup | None,
    ) -> SlicedTensor:
        made = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device("cpu"))
        made.local, made.sources, made.group = local, sources, group
        return made

    def full_tensor(self) -> Tensor:
        """Put the tensor together on the CPU of every rank of the group; each of them must ask."""
        found = self.gathered(everywhere=True)
        assert found is not None
        return found

    def gathered(self, *, everywhere: bool) -> Tensor | None:
        """Put the tensor together on the CPU of the first rank, or ``everywhere``; None on the others."""
        sources = [(Box((start,), (end - start,)), rank) for rank, start, end in self.sources]
        numel = self.shape.numel()
        found = assemble((numel,), self.dtype, sources, self._read, self.group, everywhere=everywhere)
        return None if found is None else found.view(self.shape)

    def _read(self, box: Box) -> Tensor:
        assert self.local is not None, f"this rank should hold {box} of {self!r}"
        return fetched(self.local).reshape(-1)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"SlicedTensor({tuple(self.shape)}, {self.dtype}, slices of ranks {[s[0] for s in self.sources]})"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            f"{func} was called with a tensor that lies in slices on several ranks; put it together with"
            " full_tensor() on all of them first"
        )


def sliced_states(
    pieces: Mapping[int, Piece],
    state_of: Callable[[Piece], Mapping[str, Any]],
    group: dist.ProcessGroup | None,
) -> dict[int, dict[str, Any]]:
    """The states of the serial optimizer by the numbers of ``pieces``; every rank of ``group`` must ask.

    Ranks with an empty piece have no state of that parameter, so one exchange tells all what there is.
    """
    own = {number: dict(state_of(piece)) for number, piece in pieces.items() if not piece.is_empty}
    mine = {n: {name: _describe(v, pieces[n]) for name, v in state.items()} for n, state in own.items()}
    everyone: list[dict[int, dict[str, Any]]] = [mine]
    if group is not None and dist.get_world_size(group) > 1:
        everyone = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everyone, mine, group=group)
    found: dict[int, dict[str, Any]] = {}
    for number, piece in pieces.items():
        described = next((theirs[number] for theirs in everyone if theirs.get(number)), {})
        state = {
            name: _joined(kind, piece, own.get(number, {}).get(name)) for name, kind in described.items()
        }
        if state:
            found[number] = state
    return found


def _describe(value: Any, piece: Piece) -> Any:
    """What other ranks must know of a state: that it is a slice, a tensor of its own shape, or its value."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return ("value", value.detach().cpu().clone() if isinstance(value, Tensor) else value)
    if value.shape == piece.value.shape:
        return ("slice", value.dtype)
    return ("own", (tuple(value.shape), value.dtype))


def _joined(kind: tuple[str, Any], piece: Piece, own: Any) -> Any:
    (what, detail), group = kind, piece.group
    if what == "value":
        return detail
    if what == "slice":
        return SlicedTensor(piece.param.shape, detail, own, piece.layout.owners(piece.index), group)
    shape, dtype = detail  # an optimizer of whole parameters: all of it is with the owner
    assert piece.layout.owner is not None
    return SlicedTensor(shape, dtype, own, [(piece.layout.owner, 0, torch.Size(shape).numel())], group)


def cut_state(state: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
    """This rank's slices of a state of the serial optimizer; nothing for an empty piece."""
    return {} if piece.is_empty else {name: piece.fit(value) for name, value in state.items()}


def whole(value: Any) -> Any:
    """``value``, or nested dicts of values, with every :class:`SlicedTensor` put together."""
    if isinstance(value, dict):
        return {name: whole(inner) for name, inner in value.items()}
    return value.full_tensor() if isinstance(value, SlicedTensor) else value
