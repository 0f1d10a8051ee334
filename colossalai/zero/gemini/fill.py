"""How the parameters of a model get into their chunks, one chunk at a time.

A model that was built in the ordinary way gives its tensors away while its chunks are filled; ranks take the values of the first
rank.  A model on the meta device has no values yet: they are drawn here, each straight into its chunk, and depend on the seed and
the parameter's name alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colossalai.amp.casting import is_batch_norm
from colossalai.mesh.initial import give_storage, initial_values
from colossalai.mesh.mesh import Mesh
from colossalai.zero.gemini.chunk import Chunk
from colossalai.zero.gemini.chunk_manager import ChunkManager
from colossalai.zero.gemini.tiers import Tier

Replaced = dict[nn.Parameter, nn.Parameter]


def give_meta_storage(module: nn.Module, device: torch.device) -> Replaced:
    """Replace parameters on the meta device by ones that can be given memory; returns new ones by old ones."""
    params = list(module.named_parameters())
    empty = [(name, p) for name, p in params if p.is_meta]
    if not empty:
        return {}
    if len(empty) < len(params):
        full = next(name for name, p in params if not p.is_meta)
        raise ValueError(
            f"the parameter {empty[0][0]!r} is on the meta device, {full!r} is not; build all of the model under"
            " torch.device('meta'), to have it initialized here, or none of it"
        )
    replaced: Replaced = {}
    for _, p in empty:
        blank = torch.full((), float("nan"), dtype=p.dtype, device=device)
        replaced[p] = give_storage(module, p, blank.expand(p.shape))
    return replaced


def register(module: nn.Module, chunks: ChunkManager, dtype: torch.dtype) -> None:
    """Lay all parameters into chunks, in the order in which the model made them."""
    exact = {p for m in module.modules() if is_batch_norm(m) for p in m.parameters(recurse=False)}
    for name, param in module.named_parameters():
        if not param.is_floating_point():
            raise TypeError(f"chunks hold floating-point parameters; {name!r} is of {param.dtype}")
        chunks.register_tensor(param, name, torch.float32 if param in exact else dtype)
    chunks.close_all_groups()


def fill(
    module: nn.Module,
    chunks: ChunkManager,
    home: Callable[[Chunk], Tier],
    *,
    seed: int | None,
    mesh: Mesh | None,
) -> None:
    """Give all chunks memory and values; ``seed`` draws them, None takes them from the parameters."""
    values = (
        initial_values(module, seed, mesh, chunks.device)
        if seed is not None
        else ((p, p.data) for p in module.parameters())  # of a ColoParameter, its piece
    )
    missing = {chunk.index: len(chunk.slots) for chunk in chunks.chunks}
    with torch.no_grad():
        for param, value in values:
            chunk, slot = chunks.get_chunk(param), chunks.get_slot(param)
            if chunk.home is None:
                where = home(chunk)
                chunk.place(chunks.compute, where, chunks.shelf is not None and where is chunks.shelf.tier)
            slot.view.copy_(value)
            param.data = slot.blank  # its old memory is free from here on
            missing[chunk.index] -= 1
            if not missing[chunk.index]:
                _close(chunk, chunks, alike=seed is not None)


def _close(chunk: Chunk, chunks: ChunkManager, alike: bool) -> None:
    """All values are in: agree on them, keep this rank's shard, and let the whole go."""
    ranks = chunk.ranks
    if ranks.size > 1 and not alike:
        source = dist.get_global_rank(ranks.gather, 0)
        if ranks.staged:
            values = chunk.flat.cpu()
            dist.broadcast(values, src=source, group=ranks.gather)
            chunk.flat.copy_(values)
        else:
            dist.broadcast(chunk.flat, src=source, group=ranks.gather)
    chunks.keep_own(chunk)
    if chunk.resident:
        chunk.show()
    else:
        chunk.drop()
    chunk.guard()


def place_buffers(module: nn.Module, chunks: ChunkManager, dtype: torch.dtype) -> None:
    """Buffers are not model data in the sense of chunks: they lie on the compute device, those of the first rank."""
    for owner in module.modules():
        keep = is_batch_norm(owner)
        for name, buffer in owner.named_buffers(recurse=False):
            keeps = keep or (
                buffer.dtype is torch.float64 and dtype is torch.float32
            )  # in the serial model it stays
            wanted = dtype if buffer.is_floating_point() and not keeps else buffer.dtype
            owner._buffers[name] = _first_ranks(buffer.to(chunks.device, wanted), chunks)


def _first_ranks(buffer: Tensor, chunks: ChunkManager) -> Tensor:
    ranks = chunks.ranks
    if ranks.size == 1:
        return buffer
    values = (buffer.cpu() if ranks.staged else buffer).contiguous()
    dist.broadcast(values, src=dist.get_global_rank(ranks.gather, 0), group=ranks.gather)
    return values.to(buffer.device)
