"""``ChunkManager``: all chunks of a model, the tiers they lie in, and the elementary moves between these.

``GeminiManager`` decides what is moved when.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colossalai.context.initializer import joined_group
from colossalai.logging import get_dist_logger
from colossalai.mesh import Mesh
from colossalai.mesh._compat import all_gather_single, reduce_scatter_single
from colossalai.mesh.rows import row_axes
from colossalai.tensor import ColoTensor, ProcessGroup
from colossalai.utils.disk import Buffers
from colossalai.utils.parallel import (
    averaging_group_of,
    broadcast_from_first,
    is_cut_over_rows,
    launched_mesh,
    pieces_over_rows,
)
from colossalai.zero.gemini.chunk import (
    Chunk,
    ChunkRanks,
    ParamSlot,
    TensorState,
    aligned,
    check_transition,
    default_device,
    group_ranks,
    padded,
)
from colossalai.zero.gemini.chunk_search import (
    HIDDEN,
    MB,
    check_configuration,
    check_search,
    model_mesh,
    search,
    search_chunk_configuration,
    sharing_ranks,
)
from colossalai.zero.gemini.disk_tier import DiskShelf, TierMemory, WeightReader, weights_of
from colossalai.zero.gemini.tiers import Copier, PendingCopy, Tier

STAGES = 4  # buffers for weights that are read ahead from the disk


class ChunkManager:
    """Holds the chunks of a model, in the order in which their parameters are registered.

    Args:
        chunk_configuration: by the number of ranks that share chunks, as ``search_chunk_configuration``
            returns; or the chunk size in elements.
        init_device: where chunks rest, the compute device or the CPU; by default the CPU.  Older scripts have
            a ``ProcessGroup`` in its place, whose data-parallel ranks share the chunks, and name
            ``init_device``.
        enable_distributed_storage: of those scripts; chunks are always shared.
        device: the compute device.
        ranks: the data-parallel ranks; by default those of the model that is put into the chunks.
        compute_capacity: bytes that model data may take on the compute device, by default as much as there
            is.
        host_capacity: the same for the host.
        disk_dir: a directory on a disk, for what does not fit on the host.
        disk_capacity: bytes that may lie there.
    """

    def __init__(
        self,
        chunk_configuration: Mapping[int, Mapping[str, Any]] | int,
        place: torch.device | str | ProcessGroup | None = None,
        enable_distributed_storage: bool = True,
        init_device: torch.device | str | None = None,
        *,
        device: torch.device | str | None = None,
        ranks: ChunkRanks | None = None,
        compute_capacity: int | None = None,
        host_capacity: int | None = None,
        disk_dir: str | os.PathLike[str] | None = None,
        disk_capacity: int | None = None,
    ) -> None:
        if not enable_distributed_storage:
            raise ValueError(
                "ChunkManager shares chunks between data-parallel ranks and cannot keep them whole on each,"
                " as enable_distributed_storage=False asks for; use strict_ddp_mode=True of GeminiDDP to keep"
                " them during a step"
            )
        check_configuration(chunk_configuration)
        check_disk(disk_dir, disk_capacity, host_capacity)
        self.device = torch.device(device or default_device())
        if self.device.type == "cuda" and self.device.index is None:
            self.device = default_device()
        if isinstance(place, ProcessGroup):
            ranks = ranks or data_ranks(place.mesh, self.device)
        elif place is not None:
            init_device = place
        self.init_device = torch.device(init_device or "cpu")
        self.configuration = chunk_configuration
        self.ranks, self._ranks_are_named = ranks or ChunkRanks(), ranks is not None
        self.compute = Tier("compute", self.device, compute_capacity)
        self.host = Tier("host", torch.device("cpu"), host_capacity, self.device.type == "cuda")
        self.copier = Copier(self.device)
        self.shelf: DiskShelf | None = None
        self.reader: WeightReader | None = None
        self.passing: list[Buffers] = []
        if disk_dir is not None:
            self.add_disk(disk_dir, disk_capacity)
        self.chunks: list[Chunk] = []
        self._model: str | None = None  # the class of the model in the chunks
        self._open: dict[Any, Chunk] = {}
        self._by_hand: dict[
            nn.Parameter, Tensor
        ] = {}  # tensors that scripts have registered, and their values
        self._slots: dict[nn.Parameter, tuple[Chunk, ParamSlot]] = {}
        self.bytes_up = self.bytes_down = 0
        self._largest_moving: int | None = None

    @staticmethod
    def search_chunk_size(
        module: nn.Module,
        search_range: int,
        n_grids: int,
        min_chunk_size: int | None = None,
        filter_exlarge_params: bool = True,
    ) -> int:
        """Return the chunk size in elements that wastes least, of ``n_grids`` sizes within ``search_range``
        above the smallest.
        """
        if not (isinstance(n_grids, int) and n_grids >= 1 and search_range >= 0):
            raise ValueError(
                "search_chunk_size needs search_range at least 0 and n_grids at least 1, got"
                f" {search_range!r} and {n_grids!r}"
            )
        numels = [p.numel() for p in module.parameters()]
        smallest = 1024 if min_chunk_size is None else min_chunk_size
        interval = max(1, search_range // n_grids)
        ranks = sharing_ranks(module)
        return search(
            numels, smallest, search_range, interval, ranks, filter_large=filter_exlarge_params
        ).size

    def add_disk(self, directory: str | os.PathLike[str] | None, capacity: int | None = None) -> None:
        """Add a disk as third tier."""
        self.shelf = DiskShelf(directory, capacity)
        memory = TierMemory(self.host, "weights on their way from the disk", pinned=True)
        self.reader = WeightReader(self.shelf, Buffers(STAGES, memory))
        self.host.below = self.shelf.tier
        self.passing.append(self.reader.buffers)

    def host_room(self) -> int:
        """Return the bytes of the host that are free and not reserved for transfers from and to the disk."""
        return self.host.free - sum(buffers.missing_bytes for buffers in self.passing)

    # Registration

    def take(self, model: nn.Module) -> None:
        """Serve ``model``; a second one is refused, as names, gradients and homes of chunks are those of one
        model.
        """
        name = type(model).__name__
        if self._model is not None:
            raise ValueError(
                f"this ChunkManager holds the chunks of a {self._model} already, and cannot hold those of a"
                f" {name} too; make a ChunkManager and a GeminiManager for each model, or put both models"
                " into one module"
            )
        self._model = name

    def share_with(self, mesh: Mesh | None) -> None:
        """Let the ranks of ``mesh`` with the same weights share the chunks, unless they were named."""
        if not self._ranks_are_named:
            self.ranks, self._ranks_are_named = data_ranks(mesh, self.device), True

    def _configured(self, ranks: int) -> Mapping[str, Any]:
        if isinstance(self.configuration, int):
            return {"chunk_size": self.configuration}
        if ranks not in self.configuration:
            known = ", ".join(map(str, self.configuration))
            raise ValueError(
                f"the chunk configuration is for {known} data-parallel ranks, but {ranks} share the"
                " chunks; search it again under this plan"
            )
        return self.configuration[ranks]

    @property
    def chunk_size(self) -> int:
        return int(self._configured(self.ranks.size)["chunk_size"])

    @property
    def keep_gathered(self) -> bool:
        """Whether the configuration asks for chunks that stay whole during a step."""
        if isinstance(self.configuration, int):
            return False
        return any(config.get("keep_gathered", False) for config in self.configuration.values())

    def ranks_of(self, tensor: Tensor, every: ChunkRanks) -> ChunkRanks:
        """Return those of ``every`` rank that share the chunk of ``tensor``: all, or those that hold the same
        experts.
        """
        if not is_cut_over_rows(tensor):
            return every
        group = averaging_group_of(tensor, every.gather)
        return group_ranks(group, self.device, pieces_over_rows(tensor))

    @property
    def has_pieces(self) -> bool:
        """Whether some chunks hold other values on other ranks of ``ranks``: those of experts."""
        return any(chunk.ranks.pieces > 1 for chunk in self.chunks)

    def register(self, tensor: nn.Parameter, name: str, dtype: torch.dtype) -> None:
        """Put ``tensor`` into the open chunk of its dtype and ranks, or into a new one."""
        if tensor not in self._slots:
            ranks = self.ranks_of(tensor, self.ranks)
            size = int(self._configured(ranks.size)["chunk_size"])
            self._append(tensor, name, (dtype, ranks), size, dtype=dtype, ranks=ranks)

    def _append(self, tensor: nn.Parameter, name: str, group: Any, size: int, **chunk: Any) -> None:
        """Put ``tensor`` into the open chunk of ``group``; ``chunk`` says how a new one is made."""
        ranks, numel = chunk["ranks"].size, tensor.numel()
        size = padded(size, ranks)
        if numel > size:
            found = self._new(padded(numel, ranks), **chunk)
        else:
            found = self._open.get(group) or self._new(size, **chunk)
            if aligned(found.used) + numel > found.size:
                found = self._new(size, **chunk)
            self._open[group] = found
        self._slots[tensor] = (found, found.append(tensor, name))

    def _new(self, size: int, **chunk: Any) -> Chunk:
        made = Chunk(size, None, index=len(self.chunks), **chunk)
        self.chunks.append(made)
        return made

    @torch.no_grad()
    def lay_in(
        self,
        values: Iterable[tuple[nn.Parameter, Tensor | None]],
        home: Callable[[Chunk], Tier],
        *,
        alike: bool,
    ) -> None:
        """Allocate all chunks and fill them; without ``alike``, all ranks take the values of the first, and
        the others may have None.
        """
        missing = {chunk.index: len(chunk.slots) for chunk in self.chunks}
        for param, value in values:
            chunk, slot = self._find(param)
            if chunk.home is None:
                where = home(chunk)
                chunk.place(self.compute, where, self.shelf is not None and where is self.shelf.tier)
            if value is not None:
                slot.view.copy_(value)
            del value  # the next one is computed before the name is used again
            param.data = slot.blank  # its old memory is free from here on
            missing[chunk.index] -= 1
            if not missing[chunk.index]:
                self._filled(chunk, alike)

    def _filled(self, chunk: Chunk, alike: bool) -> None:
        """Take the first rank's values unless ``alike``, keep this rank's shard, and free the whole."""
        if not alike:
            chunk.flat.copy_(first_ranks(chunk.flat, chunk.ranks))  # nothing is copied in the same memory
        self.keep_own(chunk)
        if chunk.resident:
            chunk.show()
        else:
            chunk.drop()
        chunk.guard()

    def add_extern_static_tensor(self, tensor: Tensor) -> None:
        """Count a tensor that stays beside the chunks in the tier of its device, which has less room for
        chunks then.
        """
        tier = self.compute if tensor.device == self.device else self.host
        tier.reserve(tensor.nbytes, f"a tensor of shape {tuple(tensor.shape)} beside the chunks")

    def close_all_groups(self) -> None:
        """End the registration: cut the last chunk of each group to what it holds.

        Tensors that scripts have registered themselves are laid into their chunks.
        """
        for chunk in self._open.values():
            chunk.size = padded(chunk.used, chunk.ranks.size)
        self._open.clear()
        if self._by_hand:
            self.host.pinned = self.device.type == "cuda" and any(c.pin_memory for c in self.chunks)
            self.lay_in(self._by_hand.items(), lambda c: self._tier_of(c.first_device), alike=False)
            self._by_hand.clear()

    # What scripts call that have no model, only tensors; every rank that shares a chunk must call it.

    def register_tensor(
        self,
        tensor: nn.Parameter,
        group_type: str,
        config_key: int,
        cpu_offload: bool = False,
        pin_memory: bool = False,
    ) -> None:
        """Put ``tensor`` into the open chunk of ``group_type`` and its dtype, or into a new one.

        ``config_key`` is the number of ranks that share it, a key of the configuration.  Chunks rest on
        ``init_device``, or with ``cpu_offload`` in host memory, which is page-locked with ``pin_memory``.
        """
        if tensor in self._slots:
            return
        ranks = self.ranks
        if not self._ranks_are_named:
            mesh = tensor.process_group.mesh if isinstance(tensor, ColoTensor) else launched_mesh()
            ranks = data_ranks(mesh, self.device)
        ranks = self.ranks_of(tensor, ranks)
        if ranks.size != config_key:
            raise ValueError(
                f"register_tensor got config_key={config_key!r}, but {ranks.size} data-parallel ranks share a"
                f" tensor of shape {tuple(tensor.shape)}; config_key is their number"
            )
        config = self._configured(config_key)
        group = group_type, tensor.dtype, ranks
        self._append(
            tensor,
            f"{group_type} {len(self._slots)}",
            group,
            int(config["chunk_size"]),
            dtype=tensor.dtype,
            ranks=ranks,
            init_device=self.init_device,
            cpu_shard_init=cpu_offload,
            keep_gathered=bool(config.get("keep_gathered", False)),
            pin_memory=pin_memory,
        )
        self._by_hand[tensor] = tensor.data

    def access_chunk(self, chunk: Chunk) -> None:
        """Gather the whole of ``chunk`` on the compute device; its tensors can be read and written then."""
        self.start_gather(chunk)
        if chunk.arriving is not None:
            chunk.arriving.wait()
            chunk.arriving.finish()
            chunk.arriving = None

    def release_chunk(self, chunk: Chunk) -> None:
        """Keep this rank's shard of what the whole of ``chunk`` has become, and free the whole.

        A chunk with ``keep_gathered`` stays.
        """
        if chunk.present and not chunk.resident:
            for slot in chunk.slots:
                check_transition(slot.name, slot.state, TensorState.FREE)
            self.keep_own(chunk)
            if not chunk.keep_gathered:
                chunk.drop()

    def fake_release_chunk(self, chunk: Chunk) -> None:
        """End the use of the tensors of ``chunk``, whose whole stays where it is."""
        for slot in chunk.slots:
            if slot.state is TensorState.COMPUTE:
                slot.to(TensorState.HOLD)

    def move_chunk(self, chunk: Chunk, device: torch.device | str | int, force_copy: bool = False) -> None:
        """Let ``chunk`` rest on another device; moves are copies, so ``force_copy`` changes nothing."""
        device = torch.device(device)
        if device.type != "cpu" and (
            device.type != self.device.type or device.index not in (None, self.device.index)
        ):
            raise ValueError(f"move_chunk lets a chunk rest on {self.device} or cpu, got {device}")
        self.give_home(chunk, self._tier_of(device))

    def _tier_of(self, device: torch.device) -> Tier:
        return self.compute if device.type == self.device.type != "cpu" else self.host

    # Questions

    def get_chunk(self, tensor: nn.Parameter) -> Chunk:
        return self._find(tensor)[0]

    def get_slot(self, tensor: nn.Parameter) -> ParamSlot:
        return self._find(tensor)[1]

    def _find(self, tensor: nn.Parameter) -> tuple[Chunk, ParamSlot]:
        if tensor not in self._slots:
            raise ValueError(
                f"a parameter of shape {tuple(tensor.shape)} is in no chunk: it was not in the model when its"
                " chunks were made"
            )
        return self._slots[tensor]

    def holds(self, tensor: nn.Parameter) -> bool:
        return tensor in self._slots

    def get_chunks(self, tensors: Iterable[nn.Parameter]) -> tuple[Chunk, ...]:
        """Return the chunks of ``tensors``, each once, in order."""
        found = {chunk.index: chunk for chunk in map(self.get_chunk, tensors)}
        return tuple(found[i] for i in sorted(found))

    def get_cuda_movable_chunks(self) -> list[Chunk]:
        """Return the chunks whose whole is on the compute tier and could be evicted now."""
        return [c for c in self.chunks if c.present and not c.resident and not c.users]

    @property
    def largest_moving(self) -> int:
        """The bytes of the largest chunk that comes and goes; cached until a chunk gets another home."""
        if self._largest_moving is None:
            self._largest_moving = max((c.nbytes for c in self.chunks if not c.resident), default=0)
        return self._largest_moving

    @property
    def total_mem(self) -> dict[str, int]:
        return {tier.name: tier.used for tier in self.tiers}

    @property
    def tiers(self) -> list[Tier]:
        """All tiers, from the nearest to the farthest."""
        return [self.compute, self.host, *([self.shelf.tier] if self.shelf is not None else [])]

    def is_on_disk(self, chunk: Chunk) -> bool:
        """Whether the weights of ``chunk`` rest on the disk."""
        return self.shelf is not None and chunk.home is self.shelf.tier

    # Moves

    @torch.no_grad()
    def start_gather(self, chunk: Chunk) -> None:
        """Begin to gather ``chunk`` on the compute tier; ``chunk.arriving`` is the pending copy."""
        if chunk.present:
            return
        chunk.allocate()
        chunk.arriving = self._gather(chunk)
        self.bytes_up += chunk.shard_nbytes if chunk.home is not self.compute else 0

    def _gather(self, chunk: Chunk) -> PendingCopy:
        if not self.is_on_disk(chunk):
            return self._gather_from(chunk, chunk.shard)
        assert self.reader is not None
        move = self._gather_from(chunk, self.reader.get(chunk))
        self.reader.used(chunk, move)
        return move

    def _gather_from(self, chunk: Chunk, shard: Tensor) -> PendingCopy:
        if chunk.ranks.size == 1:
            return self.copier.start(chunk.flat, shard)
        if chunk.ranks.staged:
            whole = torch.empty(chunk.size, dtype=chunk.dtype)
            all_gather_single(whole, shard.cpu(), group=chunk.ranks.gather)
            chunk.flat.copy_(whole)
            return PendingCopy()
        if not self.copier.is_async:
            work = all_gather_single(chunk.flat, shard, group=chunk.ranks.gather, async_op=True)
            return PendingCopy(work=work)
        own = chunk.flat[chunk.own]
        move = self.copier.start(own, shard)
        with torch.cuda.stream(self.copier.upload):  # the collective follows the copy
            move.work = all_gather_single(chunk.flat, own, group=chunk.ranks.gather, async_op=True)
        return move

    def keep_own(self, chunk: Chunk) -> None:
        """Copy this rank's shard out of the whole of ``chunk`` to the chunk's home."""
        if not self.is_on_disk(chunk):
            chunk.keep_own()
            return
        with self.edited(chunk, fresh=True) as shard:
            shard.copy_(chunk.flat[chunk.own])

    @contextmanager
    def edited(self, chunk: Chunk, fresh: bool = False) -> Iterator[Tensor]:
        """Lend the shard of a chunk that rests on the disk, to be written; ``fresh`` if there is none yet.

        After an exception the disk keeps what it had.
        """
        assert self.shelf is not None
        assert self.reader is not None
        name, what = weights_of(chunk), f"the weights of {chunk.name}"
        self.reader.forget(chunk.index)
        buffer = self.reader.buffers.get()
        assert buffer is not None
        row = buffer[: chunk.shard_nbytes]
        try:
            if not fresh and (pending := self.shelf.read(name, row)) is not None:
                pending.wait()
            yield row.view(chunk.dtype)
            self.shelf.room(name, chunk.shard_nbytes, what)
            writing = self.shelf.write(name, row, what)
        except BaseException:
            self.reader.buffers.give(buffer)
            raise
        self.reader.buffers.give(buffer, writing.finish)

    def read_shard(self, chunk: Chunk) -> Tensor:
        """Return a copy of the shard of ``chunk`` that is on the disk."""
        assert self.shelf is not None
        found = torch.empty(chunk.shard_size, dtype=chunk.dtype)
        if (pending := self.shelf.read(weights_of(chunk), found)) is not None:
            pending.wait()
        return found

    def free_whole(self, chunk: Chunk) -> None:
        """Free the whole of ``chunk``; its shard stays."""
        if chunk.present and not chunk.resident:
            chunk.drop()

    @torch.no_grad()
    def reduce_chunk(self, chunk: Chunk, grads: Tensor) -> tuple[Tensor, PendingCopy]:
        """Average ``grads``, a whole gradient buffer, over the ranks, and return this rank's shard; ``grads``
        is used up.
        """
        ranks = chunk.ranks
        if ranks.size == 1:
            return grads, PendingCopy()
        if ranks.staged:
            own = torch.empty(chunk.shard_size, dtype=chunk.dtype)
            reduce_scatter_single(own, grads.div_(ranks.size).cpu(), group=ranks.reduce)
            return own.to(self.device), PendingCopy()
        own = torch.empty(chunk.shard_size, dtype=chunk.dtype, device=self.device)
        if not self.copier.is_async:
            reduce_scatter_single(own, grads, group=ranks.reduce)
            return own.div_(ranks.size), PendingCopy()
        stream = self.copier.download
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            work = reduce_scatter_single(own, grads, op=dist.ReduceOp.AVG, group=ranks.reduce, async_op=True)
            work.wait()
            event = torch.cuda.Event()
            event.record(stream)
        own.record_stream(stream)
        grads.record_stream(stream)
        return own, PendingCopy(event)

    @torch.no_grad()
    def give_home(self, chunk: Chunk, tier: Tier) -> None:
        """Give ``chunk`` another home; it must not be in use or on its way."""
        if chunk.home is tier:
            return
        assert chunk.home is not None, chunk.name
        assert not chunk.users, chunk.name
        assert chunk.arriving is None, chunk.name
        old, was = chunk.shard, chunk.home
        if tier is self.compute and chunk.ranks.size == 1:
            if not chunk.present:
                self.access_chunk(chunk)  # which ends before the memory that it is copied from goes
            chunk.shard = chunk.flat
        else:
            chunk.shard = tier.empty(chunk.shard_size, chunk.dtype, chunk.name)
            chunk.shard.copy_(old)
        chunk.home = tier
        chunk.guard()
        self._largest_moving = None
        if was is self.compute and chunk.ranks.size == 1:
            return  # the whole stays where it is, as any other
        was.release(chunk.shard_nbytes)

    def trans_tensor_state(self, tensor: nn.Parameter, state: TensorState) -> None:
        self.get_slot(tensor).to(state)

    def copy_tensor_to_chunk_slice(self, tensor: nn.Parameter, data: Tensor) -> None:
        """Write ``data`` into the place of ``tensor`` in the whole of its chunk, which must be on the compute
        tier.
        """
        chunk, slot = self._find(tensor)
        if not chunk.present:
            raise RuntimeError(f"{chunk.name} is not on the compute tier; access it first")
        with torch.no_grad():
            slot.view.copy_(data)

    def table(self) -> str:
        """Return a table of the chunks: where each rests, and what is wasted."""
        lines = [f"{'chunk':>5} {'elements':>14} {'wasted':>10} {'home':>8} {'parameters'}"]
        for chunk in self.chunks:
            home = chunk.home.name if chunk.home is not None else "-"
            inside = chunk.name.split("(", 1)[1][:-1]
            lines.append(f"{chunk.index:5} {chunk.size:14,} {chunk.wasted:10,} {home:>8} {inside}")
        wasted, total = sum(c.wasted for c in self.chunks), sum(c.size for c in self.chunks)
        lines.append(
            f"{len(self.chunks)} chunks, {wasted:,} of {total:,} elements wasted"
            f" ({wasted / max(total, 1):.2%})"
        )
        return "\n".join(lines)


def check_disk(
    directory: str | os.PathLike[str] | None, capacity: int | None, host_capacity: int | None
) -> None:
    """Refuse options of the disk tier that contradict each other."""
    if directory is None and capacity is not None:
        raise ValueError(f"disk_capacity={capacity!r} needs disk_dir, a directory on the disk")
    if directory is not None and host_capacity is None:
        raise ValueError(
            f"disk_dir={str(directory)!r} needs host_capacity: the bytes of host memory beyond which the disk"
            " is used"
        )


def data_ranks(mesh: Mesh | None, device: torch.device | None) -> ChunkRanks:
    """Return the ranks of ``mesh`` with the same weights."""
    if mesh is None or mesh.group_size(*row_axes(mesh)) == 1:
        return ChunkRanks()
    return group_ranks(joined_group(mesh, row_axes(mesh)), device or default_device())


def first_ranks(tensor: Tensor, ranks: ChunkRanks) -> Tensor:
    """Return the values of the first rank, in the memory of ``tensor`` if that can be sent from there."""
    if ranks.size == 1:
        return tensor
    values = (tensor.cpu() if ranks.staged else tensor).contiguous()
    broadcast_from_first([values], ranks.gather)
    return values.to(tensor.device)


def init_chunk_manager(
    model: nn.Module,
    init_device: torch.device | str | None = None,
    hidden_dim: int | None = None,
    verbose: bool = False,
    *,
    search_range_mb: float = 32,
    min_chunk_size_mb: float = 32,
    filter_exlarge_params: bool = True,
    strict_ddp_flag: bool = False,
    dtype: torch.dtype = torch.float16,
    **manager: Any,
) -> ChunkManager:
    """Make a chunk manager with the chunk size that wastes least for ``model``; ``manager`` are options of
    ``ChunkManager``.
    """
    interval = HIDDEN if hidden_dim is None else hidden_dim
    check_search(search_range_mb, interval, min_chunk_size_mb)
    config, total, wasted = search_chunk_configuration(
        model,
        search_range_mb,
        interval,
        min_chunk_size_mb,
        filter_exlarge_params,
        strict_ddp_flag,
        dtype=dtype,
    )
    if verbose:
        size = max(found["chunk_size"] for found in config.values())
        mb = size * dtype.itemsize / MB
        get_dist_logger().info(
            f"chunks of {mb:.1f} MB for {total * dtype.itemsize / MB:.1f} MB of parameters;"
            f" {wasted * dtype.itemsize / MB:.2f} MB ({wasted / max(total + wasted, 1):.2%}) are wasted",
            ranks=[0],
        )
    if manager.get("ranks") is None:
        manager["ranks"] = data_ranks(model_mesh(model), manager.get("device"))
    return ChunkManager(config, init_device, **manager)
