"""``GeminiManager``: which chunks are on the compute tier when.

A module that is about to compute *accesses* its chunks, and *releases* them afterwards.  A chunk that is
accessed is fetched if it is not there; chunks that the trace says are next are prefetched; where room is
needed, the chunk that is needed last is evicted.  All of this is the same on every rank, since fetching a
chunk that ranks share is a collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colossalai.utils.disk import padded
from colossalai.zero.gemini.access_order import (
    AGAIN,
    BACKWARD,
    END,
    FORWARD,
    LOOK,
    NEVER,
    STEP,
    AccessTrace,
    RankAgreement,
)
from colossalai.zero.gemini.chunk import Chunk, ParamSlot, TensorState
from colossalai.zero.gemini.chunk_manager import ChunkManager
from colossalai.zero.gemini.disk_tier import passing_bytes
from colossalai.zero.gemini.gradients import Gradients
from colossalai.zero.gemini.placement import (
    MemStats,
    MemStatsCollector,
    PlacementPolicy,
    PlacementPolicyFactory,
)
from colossalai.zero.gemini.tiers import UNLIMITED, OutOfCapacity, Tier, nowhere
from colossalai.zero.gemini.timeline import Timeline
from colossalai.zero.gemini.update_worker import UpdateWorker

GRADIENTS = 2  # buffers at least that wait on the host, where there is a disk for the others


class ChunkOptimizer(Protocol):
    """What a model in chunks and its manager ask of the optimizer that updates the chunks."""

    def check_cleared(self) -> None:
        """Refuse a backward pass that would add to gradients which the last step has used up."""

    def gradients_reduced(self, chunk: Chunk) -> None:
        """The gradients of ``chunk`` are on their way to its home: its update may begin."""

    def gradients_cleared(self) -> None:
        """The model has dropped all gradients."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those of the model."""

    def used_up(self, param: nn.Parameter) -> bool:
        """Whether the last step has used up a gradient of ``param`` that plain PyTorch would still show."""

    def before_fetch(self, chunk: Chunk) -> None:
        """Roll back a speculative update of ``chunk``, whose weights are about to be read at its home."""

    def roll_back(self) -> None:
        """Roll back all speculative updates."""

    def settle(self) -> None:
        """Wait until all updates that a step has asked for are done, and roll back the speculative ones."""

    def write(self, slot: ParamSlot, part: Tensor) -> bool:
        """Write this rank's part of a weight at its home; False if the optimizer does not train it."""


class GeminiManager:
    """Fetches, keeps and evicts the chunks of ``chunk_manager``.

    Args:
        placement_policy: ``"cpu"``, ``"cuda"``, ``"auto"`` or ``"const"``, see ``placement``.
        memstats: what an earlier run measured (``manager.memstats()``); then ``auto`` need not measure.
        prefetch: how many chunks are fetched ahead.
        host_buffers: gradient buffers on the host, by default as many as there are chunks.
    """

    def __init__(
        self,
        placement_policy: str,
        chunk_manager: ChunkManager,
        memstats: MemStats | None = None,
        *,
        prefetch: int = 2,
        host_buffers: int | None = None,
    ) -> None:
        self.policy: PlacementPolicy = PlacementPolicyFactory.create(placement_policy)()
        self.policy_name = placement_policy
        if not isinstance(prefetch, int) or prefetch < 0:
            raise ValueError(f"prefetch is a number of chunks, at least 0; got {prefetch!r}")
        if host_buffers is not None and not (isinstance(host_buffers, int) and host_buffers >= 1):
            raise ValueError(
                f"host_buffers is a number of gradient buffers, at least 1; got {host_buffers!r}"
            )
        self.chunk_manager, self.prefetch = chunk_manager, prefetch
        self.trace = AccessTrace()
        self.worker = UpdateWorker()
        self.timeline = Timeline(chunk_manager)
        self.agreement = RankAgreement(chunk_manager)
        self.gradients = Gradients(
            chunk_manager, self.make_room, self.worker.wait_any, self._may_reduce, host_buffers
        )
        self.collector = MemStatsCollector(chunk_manager, memstats)
        self._is_measured = memstats is not None and memstats.samples > 0
        self.strict = False  # chunks stay from the forward pass to the end of the backward pass
        self.optimizer: ChunkOptimizer | None = None
        self._warmup_limit = UNLIMITED
        self._stale: set[int] = set()
        self._present_bytes = 0

    # What older scripts ask for

    @property
    def default_device(self) -> torch.device:
        return self.policy.get_default_device()

    @staticmethod
    def get_default_device(policy_name: str) -> torch.device:
        return PlacementPolicyFactory.get_default_device(policy_name)

    def is_warmup(self) -> bool:
        """Return whether the order of use is still being recorded."""
        return not self.trace.complete

    @property
    def need_warmup(self) -> bool:
        """Whether the policy cannot work without a measured step."""
        return self.policy.measures

    def memstats(self) -> MemStats:
        return self.collector.memstats

    def sample_overall_data(self) -> None:
        """Take a sample in the first step, see ``MemStatsCollector``."""
        self.collector.sample_overall_data()

    def record_model_data_volume(self) -> None:
        """Note, in the first step, how much model data there is at the begin of a period."""
        self.collector.record_model_data_volume()

    @property
    def is_cuda_margin_mem_avail(self) -> bool:
        """Whether it is known, from the first step, how much of the compute tier a step leaves free."""
        return not self.is_warmup()

    @property
    def cuda_margin_mem(self) -> int:
        """The bytes of the compute tier that a step leaves free, as the first step measured it."""
        if not self.is_cuda_margin_mem_avail:
            raise RuntimeError(
                "cuda_margin_mem is known when the first training step is over; ask is_cuda_margin_mem_avail"
                " before"
            )
        return self.collector.margin()

    def pre_iter(self, *args: Any) -> None:
        """Start a training step."""
        self.trace.begin()
        self.timeline.begin()
        if self.is_warmup():
            self.collector.start_collection()
            self._warmup_limit = self._limit_in_warmup()

    def fetch_all(self) -> None:
        """Fetch all chunks, before a pass that may use any of them, also one that other ranks do not use."""
        self.adjust_layout([c for c in self.chunk_manager.chunks if not c.present])

    def end_forward(self, asked: int, trains: bool) -> None:
        """Wait until all ranks have ended a forward pass, before which ``asked`` numbers were sent.

        Without gradients, ranks may compute as often as they like with chunks that are on the compute tier.
        """
        if trains or self.agreement.asked > asked:
            self._meet(FORWARD)

    def begin_backward(self) -> None:
        if self.gradients.sync or self.is_warmup():  # the end of the first one is a meeting in any case
            self.agreement.ask(BACKWARD, self.is_warmup())

    def end_backward(self) -> None:
        """Wait until all ranks have ended the backward pass; gradients may still be averaged."""
        if self.gradients.sync or self.is_warmup():
            self._meet(AGAIN if self.gradients.has_second() else END)

    def begin_step(self) -> None:
        """Wait until all ranks begin a step, or read all gradients: all must have had their backward pass."""
        self._meet(STEP)

    def begin_look(self) -> None:
        """Wait until all ranks are about to read all weights."""
        self._meet(LOOK)

    def _meet(self, number: int) -> None:
        """Wait until all ranks have come to the same moment, or asked for the same chunk."""
        self.agreement.ask(number, self.is_warmup())
        self.agreement.confirm()

    def _may_reduce(self, chunk: Chunk) -> bool:
        return self.agreement.may_reduce(chunk.index, self.is_warmup())

    def post_iter(self) -> None:
        """End the backward pass."""
        if self.is_warmup():
            self.collector.finish_collection()
            self.trace.close()
            self.gradients.agree_on_order()

    def adjust_layout(self, chunks: Sequence[Chunk]) -> None:
        """Fetch ``chunks`` to the compute tier, and evict others where room is needed."""
        for chunk in chunks:
            self._bring(chunk, chunk.name, chunks)

    def first_home(self, chunk: Chunk) -> Tier:
        """Return where ``chunk`` rests from the beginning: on the disk if the host has no room."""
        tiers = self.chunk_manager
        if self.policy.rests_on_compute:
            return tiers.compute
        if tiers.shelf is None or chunk.shard_nbytes <= tiers.host.free - self._host_reserve():
            return tiers.host
        disk = tiers.shelf.tier
        if padded(chunk.shard_nbytes) > disk.free:
            raise nowhere([tiers.host, disk], f"the weights of {chunk.name}", chunk.shard_nbytes)
        return disk

    def _host_reserve(self) -> int:
        """Return the bytes of the host that gradients and transfers from and to the disk will take."""
        chunks = self.chunk_manager.chunks
        waiting = self.gradients.memory.host
        reserve = min(waiting.most or GRADIENTS, len(chunks)) * waiting.largest
        reserve += passing_bytes(chunks)
        reserve += sum(buffers.missing_bytes for buffers in self.chunk_manager.passing)
        host = self.chunk_manager.host
        if reserve > host.limit:
            raise OutOfCapacity(
                f"the host tier has a capacity of {host.limit:,} bytes, but gradients and what passes between"
                f" the host and the disk need {reserve:,}; give it more, use smaller chunks"
                " (min_chunk_size_mb, search_range_mb), or keep few gradients there (host_buffers=2 with"
                " update_in_backward=True)"
            )
        return reserve

    # Access and release

    def access(self, chunks: Sequence[Chunk], slots: Iterable[ParamSlot], user: Any, who: str) -> None:
        """Make ``slots`` readable until ``user`` releases their ``chunks``; errors name ``who``."""
        self.sample_overall_data()
        for chunk in chunks:
            chunk.users.add(user)
        for chunk in chunks:
            self._bring(chunk, who, chunks)
        for chunk in chunks:
            if chunk.arriving is not None:
                chunk.arriving.wait()
                chunk.arriving = None
            self.trace.visit(chunk.index)
        for slot in slots:
            slot.open(user)
            if slot.state is not TensorState.READY_FOR_REDUCE:
                slot.to(TensorState.COMPUTE)
        self._prefetch()
        self._read_ahead()

    def release(self, chunks: Sequence[Chunk], slots: Iterable[ParamSlot], user: Any) -> None:
        """End the access of ``user``."""
        for slot in slots:
            slot.close(user)
            if slot.state is TensorState.COMPUTE:
                slot.to(TensorState.HOLD)
        for chunk in chunks:
            chunk.users.discard(user)
            if not chunk.users and chunk.index in self._stale:
                self._evict(chunk)
        self._keep_to_limit()

    def _bring(self, chunk: Chunk, who: str, together: Sequence[Chunk]) -> None:
        if chunk.present:
            return
        if not self.worker.is_done(chunk.index):
            before = perf_counter()
            self.worker.wait(chunk.index)
            self.timeline.blocked += perf_counter() - before
        need = sum(c.nbytes for c in together)
        try:
            self.make_room(chunk.nbytes, chunk.name)
        except OutOfCapacity as error:
            compute = self.chunk_manager.compute
            raise OutOfCapacity(
                f"{who} needs {need:,} bytes of weights at the same time"
                f" ({', '.join(c.name for c in together)}), but the compute tier has a capacity of"
                f" {compute.limit:,} bytes, of which {compute.used:,} are in use; give it more, or make"
                " chunks smaller (min_chunk_size_mb, search_range_mb) so that less comes along with them"
            ) from error
        self._fetch(chunk)

    def _fetch(self, chunk: Chunk) -> None:
        self._meet(chunk.index)
        if self.optimizer is not None:
            self.optimizer.before_fetch(chunk)
        self.chunk_manager.start_gather(chunk)
        self._present_bytes += chunk.nbytes
        self.timeline.note("fetch", chunk)

    def _evict(self, chunk: Chunk) -> None:
        self._stale.discard(chunk.index)
        if chunk.present and not chunk.resident:
            self.chunk_manager.free_whole(chunk)
            self._present_bytes -= chunk.nbytes
            self.timeline.note("drop", chunk)

    # Room

    def limit(self) -> int:
        """Return the bytes of whole chunks that come and go, beyond which unused ones are evicted."""
        if self.strict:
            return UNLIMITED
        wanted = self._warmup_limit if self.is_warmup() else UNLIMITED
        return max(min(self.policy.limit(), wanted), (self.prefetch + 2) * self.chunk_manager.largest_moving)

    def _limit_in_warmup(self) -> int:
        """Return the limit for whole chunks while it is not known how much the activations need."""
        if not self.policy.measures or self._is_measured:
            return UNLIMITED
        limit = self.policy.warmup_limit(self.collector.capacity())
        ranks = self.chunk_manager.ranks
        if ranks.size > 1 and self.chunk_manager.device.type == "cuda":  # ranks must evict the same chunks
            number = torch.tensor([limit], dtype=torch.int64, device=self.gradients.meeting)
            dist.all_reduce(number, op=dist.ReduceOp.MIN, group=ranks.reduce)
            limit = int(number.item())
        return limit

    def make_room(self, nbytes: int, what: str) -> None:
        """Free ``nbytes`` of the compute tier, by evicting chunks and gradients."""
        compute = self.chunk_manager.compute
        while compute.free < nbytes:
            victim = self._needed_last()
            if victim is not None:
                self._evict(victim)
            elif not self.gradients.evict():
                compute.reserve(nbytes, what)  # raises, with the reason

    def _needed_last(self) -> Chunk | None:
        movable = self.chunk_manager.get_cuda_movable_chunks()
        return max(movable, key=lambda c: (self.trace.distance(c.index), c.index), default=None)

    def _keep_to_limit(self) -> None:
        limit = self.limit()
        while self._present_bytes > limit:
            victim = self._needed_last()
            if victim is None:
                return
            self._evict(victim)

    def _prefetch(self) -> None:
        """Prefetch what comes next, unless something that is needed earlier must be evicted for it."""
        ahead, seen = 0, set()
        compute, limit = self.chunk_manager.compute, self.limit()
        for index in self.trace.ahead():
            if ahead >= self.prefetch:
                return
            if index in seen:
                continue
            seen.add(index)
            chunk = self.chunk_manager.chunks[index]
            ahead += not chunk.resident
            if chunk.present:
                continue
            if self.chunk_manager.ranks.size == 1 and not self.worker.is_done(index):
                return  # ranks that share chunks must not decide by the clock
            self.worker.wait(index)
            while compute.free < chunk.nbytes or self._present_bytes + chunk.nbytes > limit:
                victim = self._needed_last()
                if victim is None or self.trace.distance(victim.index) <= self.trace.distance(index):
                    return
                self._evict(victim)
            self._fetch(chunk)

    def _read_ahead(self) -> None:
        """Begin to read weights that will be fetched soon from the disk."""
        reader, chunks = self.chunk_manager.reader, self.chunk_manager.chunks
        if reader is None or not any(map(self.chunk_manager.is_on_disk, chunks)):
            return
        seen: set[int] = set()
        for index in self.trace.ahead():
            if len(seen) >= reader.buffers.most:
                return
            chunk = chunks[index]
            if index in seen or chunk.present or not self.chunk_manager.is_on_disk(chunk):
                continue
            seen.add(index)
            if not self.worker.is_done(index) or not reader.begin(chunk):
                return

    # After the backward pass of a chunk

    def mark_stale(self, chunk: Chunk) -> None:
        """Evict ``chunk``, whose whole is out of date or about to be, as soon as it is not in use."""
        if self.chunk_manager.reader is not None:
            self.chunk_manager.reader.forget(chunk.index)
        if chunk.resident:
            return
        if chunk.users:
            self._stale.add(chunk.index)
        else:
            self._evict(chunk)

    def evict_if_done(self, chunk: Chunk) -> None:
        """Evict ``chunk`` if this step does not need it again."""
        if (
            self.trace.complete
            and not self.strict
            and not chunk.users
            and self.trace.next_use(chunk.index) == NEVER
        ):
            self._evict(chunk)

    def evict_stale(self) -> None:
        """Evict the chunks that were marked stale while they were in use."""
        for index in list(self._stale):
            self.mark_stale(self.chunk_manager.chunks[index])

    def evict_all(self) -> None:
        """Evict every chunk that has a home elsewhere."""
        for chunk in self.chunk_manager.chunks:
            self.mark_stale(chunk)
