"""Gradients of the ranks become averaged shards, bucket by bucket, while the backward pass goes on.

[Note: one order] Every rank reduces every bucket once in every synchronized pass, in the order of their
numbers, whatever the order in which its gradients come: a bucket that is complete waits for those before it,
and what is not complete at the end of the pass is reduced then.  So parameters that a rank does not use, or
uses in another order than other ranks, lock nothing up.

A bucket is complete when each of its parameters has got as many gradients as in the last pass: a weight in
two checkpointed parts gets two.  A gradient that comes after its bucket has left waits in ``.grad``, and
after the pass the ranks tell each other which buckets must go again.  The same message says which parameters
any rank has used; one that no rank used has no gradient, as in serial training.

Buckets of experts are the last, and wait for the end of the pass.  A rank whose experts get no token has no
gradient of them; if others waited for its bucket in the pass, it would wait for these in the layer, where
tokens are exchanged.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.interface.hooks import arrived_gradient
from colossalai.mesh import own_grad, set_own_grad
from colossalai.utils.parallel import is_cut_over_rows
from colossalai.zero.low_level.bucket import Bucket
from colossalai.zero.low_level.wire import Wait, start_flags, start_reduction

IN_FLIGHT = 2  # buckets that travel at a time, where nothing else bounds the memory they take


class Reducer:
    """Averages the gradients of the parameters of ``buckets`` over ``group``.

    A bucket travels in its own group.  Of experts that has the ranks with the same ones, whose gradients are
    sums over the tokens of all: so all are divided by the ranks of ``group``.

    Args:
        scatter: drop each gradient as soon as it has been reduced, and add up reduced ones (stage 2).
            Otherwise ``.grad`` keeps the gradients of this rank, and reducing takes all of them (stage 1).
        overlap: reduce while the backward pass goes on.
        dtype: in which gradients travel; None: in that of their parameters.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: dist.ProcessGroup | None,
        *,
        scatter: bool,
        overlap: bool,
        dtype: torch.dtype | None,
    ) -> None:
        self.buckets, self.group = list(buckets), group
        self._scatter, self._overlap, self._dtype = scatter, overlap, dtype
        self._ranks = 1 if group is None else dist.get_world_size(group)
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self._place_of = {p: i for bucket in self.buckets for i, p in enumerate(bucket.params)}
        self._got = dict.fromkeys(self._bucket_of, 0)
        self._expected = dict.fromkeys(self._bucket_of, 1)
        self._is_open = False  # a synchronized pass is under way
        self._next = 0  # the bucket to be reduced next
        self._in_pass = sum(not is_cut_over_rows(bucket.params[0]) for bucket in self.buckets)
        self._missing: list[int] = []  # for each bucket: parameters that still expect a gradient
        self._late: set[int] = set()
        self._waiting: deque[tuple[Bucket, Tensor, Wait]] = deque()
        self._lost: list[tuple[Bucket, Tensor, Wait]] = []
        self._flags: Callable[[], list[bool]] | None = None
        self._used: list[bool] | None = None  # by any rank, for every parameter
        self.has_local = False  # gradients that no pass has reduced
        device = self.buckets[0].params[0].device if self.buckets else torch.device("cpu")
        by_nccl = (
            group is not None and device.type == "cuda" and "nccl" in str(dist.get_backend_config(group))
        )
        self._stream = torch.cuda.Stream(device) if by_nccl and overlap else None
        self._device = device
        for p in self._bucket_of:
            # a weak reference: Python does not look into hooks for cycles, so the parameters would hold us,
            # and we them, for ever
            p.register_post_accumulate_grad_hook(partial(_arrive, weakref.ref(self)))

    # One backward pass

    def begin(self) -> None:
        """A pass begins whose gradients are to be reduced."""
        self.settle()
        self._is_open, self._next = True, 0
        self._late.clear()
        self._got = dict.fromkeys(self._got, 0)
        self._missing = [sum(self._expected[p] > 0 for p in bucket.params) for bucket in self.buckets]

    def end(self) -> None:
        """The pass is over: reduce what is left, and exchange what the ranks must know of each other."""
        self._is_open = False
        while self._next < len(self.buckets):
            self._launch(self.buckets[self._next])
            self._next += 1
        self._receive(0)
        for bucket in self.buckets:
            for i, p in enumerate(bucket.params):
                bucket.used[i] = bucket.used[i] or own_grad(p) is not None
        used = [flag for bucket in self.buckets for flag in bucket.used]
        late = [bucket.number in self._late for bucket in self.buckets]
        self._flags = start_flags([*used, *late], self.group, self._device)
        self._learn()
        self.has_local = False

    def abandon(self) -> None:
        """The pass failed; its gradients are worth nothing."""
        self._is_open = False
        # not waited for: other ranks may never have sent; the buffers must live, as they may still be written
        # to
        self._lost.extend(self._waiting)
        self._waiting.clear()

    def _learn(self) -> None:
        if any(self._got.values()):
            self._expected = dict(self._got)

    def _arrive(self, param: Tensor) -> None:
        """Called by autograd whenever ``param.grad`` may have become more."""
        grad = arrived_gradient(param)
        if grad is None:
            return
        if grad.layout != torch.strided:
            shape = tuple(param.shape)
            raise TypeError(
                f"ZeRO takes dense gradients, got one in layout {grad.layout} of a parameter of shape"
                f" {shape}; build its layer with sparse=False"
            )
        if not self._is_open:
            self.has_local = True
            return
        bucket = self._bucket_of[param]
        self._got[param] += 1
        if bucket.number < self._next:
            self._late.add(bucket.number)
            return
        if self._got[param] == self._expected[param]:
            self._missing[bucket.number] -= 1
        while self._overlap and self._next < self._in_pass and self._missing[self._next] == 0:
            self._launch(self.buckets[self._next])
            self._next += 1

    def has_reduced(self, param: Tensor) -> bool:
        """Whether a gradient of ``param`` has left it for its bucket."""
        bucket = self._bucket_of[param]
        return bucket.grad is not None and bucket.used[self._place_of[param]]

    # The way of a bucket

    @torch.no_grad()
    def _launch(self, bucket: Bucket) -> None:
        for i, p in enumerate(bucket.params):
            bucket.used[i] = bucket.used[i] or own_grad(p) is not None
        if self._stream is not None:
            self._launch_aside(bucket, self._stream)
            return
        self._receive(IN_FLIGHT - 1)
        self._waiting.append((bucket, *self._start(bucket)))
        if not self._overlap:
            self._receive(0)

    def _launch_aside(self, bucket: Bucket, stream: torch.cuda.Stream) -> None:
        """On a stream of its own, where waiting and adding up hold up no other work."""
        stream.wait_stream(torch.cuda.current_stream(self._device))
        for p in bucket.params:
            if (grad := own_grad(p)) is not None:
                grad.record_stream(stream)  # dropped below, while it may still be read
        with torch.cuda.stream(stream):
            shard, wait = self._start(bucket)
            wait()
            bucket.give(shard, add=self._scatter)

    def _start(self, bucket: Bucket) -> tuple[Tensor, Wait]:
        buffer = bucket.fill(self._dtype or bucket.weights.dtype)
        if self._scatter:
            for p in bucket.params:
                set_own_grad(p, None)
        if self._ranks > 1:
            buffer.div_(self._ranks)  # before the sum, which could overflow in fp16
        return start_reduction(buffer, bucket.layout, bucket.group)

    @torch.no_grad()
    def _receive(self, leave: int) -> None:
        """Wait for buckets on their way until only ``leave`` of them are."""
        while len(self._waiting) > leave:
            bucket, shard, wait = self._waiting.popleft()
            wait()
            bucket.give(shard, add=self._scatter)
        if leave == 0 and self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    # Before gradients are used

    def settle(self) -> None:
        """Reduce again the buckets that a gradient came too late for, on any rank."""
        if self._flags is None:
            return
        flags = self._flags()
        self._flags = None
        late = flags[len(self._bucket_of) :]
        for bucket, is_late in zip(self.buckets, late, strict=True):
            if is_late:
                self._launch(bucket)
        self._receive(0)
        self._used = flags[: len(self._bucket_of)]

    def complete(self) -> None:
        """Let the pieces have the gradients of all passes since the last step."""
        if self.has_local:
            self.begin()
            self._got = dict(self._expected)  # a pass in which nothing new comes teaches nothing
            self.end()
        self.settle()
        if self._used is None:  # there was no pass
            return
        if any(bucket.pieces[0].value.device != self._device for bucket in self.buckets):
            self._wait_for_host()
        used = iter(self._used)
        for bucket in self.buckets:
            bucket.hand_out([next(used) for _ in bucket.params])

    def _wait_for_host(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def forget(self, *, to_zero: bool = False) -> None:
        """Drop all gradients, those on their way too.

        ``to_zero``: parameters that had one have zeros, which the next step takes.
        """
        self._receive(0)
        if self._flags is not None:
            self._flags()  # the message is under way on all ranks
        self._flags = self._used = None
        for bucket in self.buckets:
            bucket.forget(to_zero=to_zero)
        self.has_local = False


def _arrive(weak: weakref.ref[Reducer], param: Tensor) -> None:
    if (reducer := weak()) is not None:
        reducer._arrive(param)
