"""Nests of tensors between the ranks of a pipeline.

Before the tensors of a message goes one number: 0 if they are described as those before them on this way, n
if a new description of n bytes follows, -n if the sender failed and n bytes say why.  So shapes are sent when
they change, and not at all where both sides know them beforehand; and a rank that waits for one that failed
hears of it at once.  The same number without tensors ends a step.

Sends never wait.  A rank receives what another sends it in the order of sending, which it knows from the
timetable, and keeps what it does not need yet.  So no two ranks wait for each other, and it does not matter
whether the backend has tags. The timetable also says which messages a neighbour must have taken before it
could send the present one: these are let go.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.logging import get_dist_logger
from colossalai.mesh import PIPELINE_AXIS, Mesh, mesh_groups
from colossalai.mesh.collectives import all_gather
from colossalai.pipeline.schedule.base import Message, Timetable
from colossalai.pipeline.stage import pipeline_rank, pipeline_size
from colossalai.pipeline.wire import Description, as_bytes

Way = tuple[int, int]  # from one virtual stage to another

# How long a rank that fails tries to tell its neighbours.
_LAST_WORDS = timedelta(seconds=3)

_upstream_groups: WeakKeyDictionary[Mesh, dist.ProcessGroup] = WeakKeyDictionary()

# Meshes on which a step broke off.
_failed: WeakSet[Mesh] = WeakSet()


class PipelineError(RuntimeError):
    """Another stage of the pipeline failed; ``source`` is the rank of the pipeline that told."""

    def __init__(self, message: str, source: int | None = None) -> None:
        super().__init__(message)
        self.source = source


class Link:
    """The connections of this rank with the other ranks of its pipeline.

    Every rank of the mesh makes its link at the same time.

    Args:
        device: where received tensors are put.
        known: what every activation looks like, if that is known beforehand.
        scatter: an axis whose ranks all hold the same activations: each sends a piece, and the receivers
            gather them.
    """

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        known: Description | None = None,
        scatter: str | None = None,
    ) -> None:
        self._mesh = mesh
        self.rank = pipeline_rank(mesh)
        self.device = device
        self.known = known
        self._scatter = scatter
        self._ranks = mesh.ranks(PIPELINE_AXIS) if pipeline_size(mesh) > 1 else [mesh.rank]
        self._groups = _groups_of(mesh)
        # gloo refuses to send tensors of CUDA: they go through the memory of the host
        staged = not self._groups or not is_nccl(self._groups[0], device)
        self._wire = torch.device("cpu") if staged else device
        self._described: dict[Way, Description] = {}
        self._warned = False
        self._timetable: Timetable | None = None
        self._pending: dict[int, list[tuple[Message, list[tuple[dist.Work, Tensor]]]]] = {}

    def check_usable(self) -> None:
        """Refuse a pipeline in which a stage has failed: the ranks are no longer in step."""
        if self._mesh in _failed:
            raise PipelineError("this pipeline has failed before; start the job again")

    def begin(self, timetable: Timetable) -> None:
        """Get ready for the messages of ``timetable``; every rank begins the same one."""
        self.check_usable()
        if timetable is not self._timetable:
            self._study(timetable)
        self._expected = {r: deque(messages) for r, messages in self._coming.items()}
        self._early: dict[Message, Any] = {}

    def _study(self, timetable: Timetable) -> None:
        """Find out who sends what to this rank, and when the others make and need their messages."""
        self._timetable = timetable
        placement = self._placement = timetable.placement
        others = [r for r in range(placement.ranks) if r != self.rank]
        self._targets = [r for r in others if next(timetable.sent(self.rank, r), None) is not None]
        self._coming = {r: tuple(timetable.sent(r, self.rank)) for r in others}
        self._made_at: dict[Message, int] = {}
        self._needed_at: dict[Message, int] = {}
        for r in {*self._targets, *(r for r, messages in self._coming.items() if messages)}:
            for at, action in enumerate(timetable.ranks[r]):
                if (made := timetable.makes(r, action)) is not None:
                    self._made_at[made] = at
                if (needed := timetable.needs(r, action)) is not None:
                    self._needed_at[needed] = at

    def send(self, message: Message, nest: Any) -> None:
        """Start to send; ``nest`` must not be changed after."""
        target = self._placement.rank(message.target)
        if target == self.rank:
            self._early[message] = _handed_over(nest)
            return
        way = (message.source, message.target)
        description, tensors = Description.of(nest)
        works = []
        if description == self._last(way):
            works.append(self._post(torch.tensor([0]), target))
        else:
            self._warn_unknown(way, description)
            self._described[way] = description
            works += self._post_text(description.to_bytes(), target, sign=1)
        for tensor in tensors:
            if tensor.numel():
                on_wire = self._piece(tensor.detach()).to(self._wire).contiguous()
                works.append(self._post(as_bytes(on_wire), target))
        self._pending.setdefault(target, []).append((message, works))

    def receive(self, message: Message) -> Any:
        """Wait for ``message``; its tensors are leaves that require gradients where those sent did."""
        source = self._placement.rank(message.source)
        while message not in self._early:
            if source == self.rank or not self._expected[source]:
                raise AssertionError(f"{message} is received before it is sent")
            coming = self._expected[source].popleft()
            self._early[coming] = self._take(coming, source)
            self._let_go(source, self._made_at[coming])
        return self._early.pop(message)

    def finish(self) -> None:
        """Wait until every rank has done its part of the step.

        A rank whose own part is done waits for no message, and would not hear of another rank that fails
        later.  So word that all is well goes from the last rank, which is done first, to the first rank and
        back; or word that it is not.
        """
        before, after = self.rank - 1, self.rank + 1
        words = []  # no rank may receive them after a failure, so they are waited for when all went well
        if after < self._placement.ranks:
            self._hear(after)
        if before >= 0:
            words.append((before, self._post(torch.tensor([0]), before)))
            self._hear(before)
        if after < self._placement.ranks:
            words.append((after, self._post(torch.tensor([0]), after)))
        for target, work in words:
            self._wait([work], target)
        for target, waiting in self._pending.items():
            for _, works in waiting:
                self._wait(works, target)
        self._pending.clear()

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks, which may be waiting for messages from this one."""
        _failed.add(self._mesh)  # messages are on their way that no rank will receive
        heard_from = error.source if isinstance(error, PipelineError) else None
        reason = str(error) if isinstance(error, PipelineError) else self._own_failure(error)
        last: list[tuple[dist.Work, Tensor]] = []
        for target in range(self._placement.ranks):
            is_near = abs(target - self.rank) == 1 or target in self._targets
            if target == heard_from or not is_near:
                continue
            # it may be gone: what counts is the error that is on its way up
            with suppress(RuntimeError):
                last += self._post_text(reason.encode(), target, sign=-1)
        for work, _ in last:
            with suppress(RuntimeError):
                work.wait(_LAST_WORDS)

    def _own_failure(self, error: BaseException) -> str:
        me = self._ranks[self.rank]
        return f"pipeline stage {self.rank} (rank {me}) failed with {type(error).__name__}: {error}"

    def _hear(self, source: int) -> bytes:
        """The description that ``source`` sends before its tensors, empty if there is no new one; raises if
        it failed.
        """
        code = int(self._get(torch.empty(1, dtype=torch.int64), source).item())
        if code == 0:
            return b""
        data = bytes(self._get(torch.empty(abs(code), dtype=torch.uint8), source).tolist())
        if code < 0:
            raise PipelineError(data.decode(), source)
        return data

    def _take(self, message: Message, source: int) -> Any:
        way = (message.source, message.target)
        if data := self._hear(source):
            self._described[way] = Description.from_bytes(data)
        description = self._last(way)
        assert description is not None, "the first message on a way has a description"
        tensors = []
        for leaf in description.leaves:
            tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device=self._wire)
            if tensor.numel():
                piece = self._piece(tensor)
                self._get(as_bytes(piece), source)
                tensor = tensor if piece is tensor else self._gathered(piece).view(leaf.shape)
            tensors.append(tensor.to(self.device))
        return description.rebuild(tensors)

    def _piece(self, tensor: Tensor) -> Tensor:
        """What this rank sends and receives of ``tensor``; small ones that do not divide go whole."""
        if self._scatter is None or tensor.numel() % self._mesh.size[self._scatter]:
            return tensor
        return tensor.reshape(-1).chunk(self._mesh.size[self._scatter])[self._mesh.coord[self._scatter]]

    def _gathered(self, piece: Tensor) -> Tensor:
        assert self._scatter is not None
        return all_gather(piece.to(self.device), self._mesh, self._scatter, 0)

    def _last(self, way: Way) -> Description | None:
        """What the last message on ``way`` looked like, or what all are known to look like."""
        return self._described.get(way, self._known_on(way))

    def _known_on(self, way: Way) -> Description | None:
        if self.known is None or way[0] < way[1]:
            return self.known
        return Description(replace(self.known.nest, requires_grad=False))

    def _warn_unknown(self, way: Way, description: Description) -> None:
        if self.known is not None and way[0] < way[1] and not self._warned:
            self._warned = True
            known = self.known.leaves[0]
            found = ", ".join(f"{leaf.shape} in {leaf.dtype}" for leaf in description.leaves)
            get_dist_logger().warning(
                f"tensor_shape says that stages exchange {known.shape} in {known.dtype}, but stage {way[0]}"
                f" sends {found}; shapes are sent along then, which tensor_shape was to spare"
            )

    def _post_text(self, text: bytes, target: int, sign: int) -> list[tuple[dist.Work, Tensor]]:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return [self._post(torch.tensor([sign * len(text)]), target), self._post(data, target)]

    def _post(self, tensor: Tensor, target: int) -> tuple[dist.Work, Tensor]:
        try:
            work = dist.isend(tensor, self._ranks[target], group=self._group(self.rank, target))
        except RuntimeError as error:
            self._lost(target, error)
        assert work is not None
        return work, tensor

    def _get(self, tensor: Tensor, source: int) -> Tensor:
        try:
            dist.recv(tensor, self._ranks[source], group=self._group(source, self.rank))
        except RuntimeError as error:
            self._lost(source, error)
        return tensor

    def _wait(self, works: list[tuple[dist.Work, Tensor]], target: int) -> None:
        try:
            for work, _ in works:
                work.wait()
        except RuntimeError as error:
            self._lost(target, error)

    def _lost(self, rank: int, error: RuntimeError) -> NoReturn:
        raise PipelineError(
            f"pipeline stage {rank} (rank {self._ranks[rank]}) is gone or cannot be reached: {error}", rank
        ) from error

    def _let_go(self, target: int, until: int) -> None:
        """Forget the messages that ``target`` has taken before it did its action number ``until``."""
        waiting = self._pending.get(target, [])
        for message, works in waiting:
            if self._needed_at[message] <= until:
                self._wait(works, target)
        self._pending[target] = [pair for pair in waiting if self._needed_at[pair[0]] > until]

    def _group(self, source: int, target: int) -> dist.ProcessGroup:
        return self._groups[0 if source < target else 1]


def _groups_of(mesh: Mesh) -> tuple[dist.ProcessGroup, ...]:
    """A group for messages to later ranks and one for messages to earlier ones.

    NCCL does the sends and receives of a pair of ranks in one order, so two ranks that send to each other at
    the same time need two groups; gloo does with one.
    """
    if pipeline_size(mesh) == 1:
        return ()
    down = mesh.group(PIPELINE_AXIS)
    if not is_nccl(down, torch.device(mesh.device_type)):
        return down, down
    if mesh not in _upstream_groups:
        for ranks in mesh_groups(mesh.size, (PIPELINE_AXIS,)):
            group = dist.new_group(ranks)
            if mesh.rank in ranks:
                _upstream_groups[mesh] = group
    return down, _upstream_groups[mesh]


def is_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    return device.type == "cuda" and "nccl" in group._get_backend(device).name().lower()


def _handed_over(nest: Any) -> Any:
    """``nest`` for the next stage on the same rank: cut off from the graph of this one."""
    description, tensors = Description.of(nest)
    return description.rebuild([tensor.detach() for tensor in tensors])
