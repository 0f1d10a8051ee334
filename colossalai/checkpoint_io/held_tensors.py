"""``HeldTensor``: a tensor of the serial model, and the boxes of it that this rank holds.

The tensors in it are views into the memory of the model or optimizer, in the orientation of the serial model.
Saving reads them, loading writes into them; no other module needs to know how a plan lays tensors out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from colossalai.checkpoint_io.boxes import Box, Shape, boxes_of_flat, boxes_of_ranges, whole
from colossalai.interface.holding import Holding
from colossalai.mesh import Mesh, full_shape, local_slices, placement
from colossalai.mesh._compat import plain_torch
from colossalai.mesh.parameter import SHARED_MARK, own_mesh


@dataclass(eq=False)
class HeldBox:
    """The elements ``box`` of a tensor.

    ``tensor`` is a view of them, or, to save, a function that computes them.
    """

    box: Box
    tensor: Tensor | Callable[[], Tensor]

    def read(self) -> Tensor:
        return self.tensor if isinstance(self.tensor, Tensor) else self.tensor()

    def read_part(self, box: Box) -> Tensor:
        """The elements ``box`` of the tensor, all of which are here."""
        return self.read()[box.within(self.box)]

    def view(self) -> Tensor:
        assert isinstance(self.tensor, Tensor), "what is computed cannot be loaded"
        return self.tensor


@dataclass(eq=False)
class HeldTensor:
    """A tensor of the serial model, and the pieces of it that this rank holds."""

    name: str
    shape: Shape
    dtype: torch.dtype
    pieces: list[HeldBox]
    shared: tuple[int, int] | None = None
    """A mark that the entries of all pipeline stages which share this tensor have, under whatever names."""
    stage: int | None = None
    """The pipeline stage, if no other stage may have another tensor of this name."""
    aliases: list[str] = field(default_factory=list)
    """Further names of the same tensor (tied weights)."""
    by_first: bool = False
    """Ranks may hold different values (statistics of BatchNorm), so that those of the first are stored."""


def is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")  # its class is expensive to import


def is_piece(param: Tensor) -> bool:
    """Whether ``param`` is a part of the serial model's tensor, or its transpose."""
    return is_dtensor(param) or bool(placement(param).sharded) or getattr(param, "transposed", False)


def serial_shape(param: Tensor) -> Shape:
    """The shape of ``param`` in the serial model."""
    shape = tuple(full_shape(param))
    return shape[::-1] if getattr(param, "transposed", False) else shape


def pieces_of(like: Tensor, value: Tensor, mesh: Mesh | None, name: str) -> list[HeldBox]:
    """Return the boxes of ``value``, which is laid out like the parameter ``like``: a gradient, a state."""
    return [
        HeldBox(box, _turned(_local(value), like)[place.within(whole_of(like))])
        for box, place in _places(like, mesh, name)
    ]


def pieces_of_holding(
    holding: Holding, value: Tensor | Callable[[], Tensor], mesh: Mesh | None, name: str
) -> list[HeldBox]:
    """The boxes of ``value``, which has the elements that ``holding.value`` has."""
    if not isinstance(value, Tensor):
        return _computed_pieces(holding, value, mesh, name)
    if holding.end is None:
        return pieces_of(holding.param, value, mesh, name)
    flat = _local(value).view(-1)
    found = []
    for place, start in boxes_of_flat(_local_shape(holding.param), holding.start, holding.end):
        part = flat[start : start + place.numel].view(place.sizes)
        turned, spot = _turned(part, holding.param), _turned_box(place, holding.param)
        for box, own in _places(holding.param, mesh, name):
            if (common := own.common(spot)) is not None:
                found.append(HeldBox(common.moved(own, box), turned[common.within(spot)]))
    return found


def _computed_pieces(
    holding: Holding, value: Callable[[], Tensor], mesh: Mesh | None, name: str
) -> list[HeldBox]:
    """Boxes whose values are computed when they are asked for, one at a time."""
    patterns = pieces_of_holding(holding, torch.empty_like(_local(holding.value), device="meta"), mesh, name)

    def read(index: int) -> Callable[[], Tensor]:
        return lambda: pieces_of_holding(holding, value(), mesh, name)[index].read()

    return [HeldBox(pattern.box, read(index)) for index, pattern in enumerate(patterns)]


def whole_piece(tensor: Tensor) -> list[HeldBox]:
    """A tensor that is the same on every rank that has it."""
    return [HeldBox(whole(tuple(tensor.shape)), tensor.detach())]


@torch.no_grad()
def fill(pieces: Iterable[HeldBox], box: Box, values: Tensor) -> None:
    """Copy to ``pieces`` their part of ``values``, the elements ``box`` of the same tensor."""
    for piece in pieces:
        if (common := piece.box.common(box)) is not None:
            piece.view()[common.within(piece.box)].copy_(values[common.within(box)])


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements share one memory (``expand``), so that the tensor cannot be loaded."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def whole_of(param: Tensor) -> Box:
    """The box of the local tensor of ``param``, in the orientation of the serial model."""
    shape = _local_shape(param)
    return whole(shape[::-1] if getattr(param, "transposed", False) else shape)


def shared_mark(param: Tensor) -> tuple[int, int] | None:
    """Return the mark of a parameter that several pipeline stages share, the same on all its ranks."""
    mark: tuple[int, int] | None = getattr(param, SHARED_MARK, None)
    return mark


def _places(like: Tensor, mesh: Mesh | None, name: str) -> Sequence[tuple[Box, Box]]:
    """Return the boxes of the parameter ``like`` here: their places in the serial and in the local tensor."""
    piece = _places_of_piece(like, mesh, name)
    if not is_dtensor(like):
        return piece
    own = _box_of_dtensor(like)
    here = whole(own.sizes)
    return [
        (common.moved(place, box), common.moved(own, here))
        for box, place in piece
        if (common := place.common(own)) is not None
    ]


def _places_of_piece(like: Tensor, mesh: Mesh | None, name: str) -> Sequence[tuple[Box, Box]]:
    """The same, if FSDP had not cut the local tensor."""
    layout = placement(like)
    own = getattr(like, "process_group", None)  # a ColoTensor has a mesh of its own
    mesh = own.mesh if own is not None else own_mesh(like) or mesh
    if not layout.sharded:
        if getattr(like, "is_tensor_parallel", False) and getattr(like, "num_partitions", 2) > 1:
            raise ValueError(
                f"{name} is marked as one of several pieces (is_tensor_parallel), but nothing says which"
                " piece of what it"
                " is; tell with colossalai.mesh.place(parameter, layout, full_shape)"
            )
        box = whole(serial_shape(like))
        return [(box, box)] if box.numel else []
    if mesh is None:
        raise ValueError(f"{name} is cut as {layout}, but no mesh says over which ranks: launch first")
    if getattr(like, "transposed", False):
        layout = layout.transposed()
    return boxes_of_ranges(local_slices(serial_shape(like), layout, mesh, uneven=True))


def _box_of_dtensor(tensor: Any) -> Box:
    """The elements that this rank holds of ``tensor``, in the orientation of the serial model."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(kind.is_partial() for kind in tensor.placements):
        raise ValueError(
            f"a DTensor with the placements {tensor.placements} is a partial sum and cannot be saved"
        )
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return _turned_box(Box(tuple(offset), tuple(shape)), tensor)


def _local(tensor: Any) -> Tensor:
    """The memory of this rank, as a plain tensor without history."""
    part: Tensor = tensor.detach()
    if is_dtensor(part):
        part = part.to_local()  # type: ignore[attr-defined]
    if type(part) is Tensor:
        return part
    with plain_torch():
        return part.as_subclass(Tensor)


def _local_shape(param: Any) -> Shape:
    """The shape of what ``_local`` gives, also where a plan keeps the values elsewhere."""
    if is_dtensor(param):
        return tuple(_local(param).shape)
    with plain_torch():
        return tuple(Tensor.size(param))


def _turned(tensor: Tensor, param: Tensor) -> Tensor:
    """As the serial model stores it."""
    return tensor.t() if getattr(param, "transposed", False) else tensor


def _turned_box(box: Box, param: Tensor) -> Box:
    return Box(box.offsets[::-1], box.sizes[::-1]) if getattr(param, "transposed", False) else box
