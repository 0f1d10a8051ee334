"""``GradientWatch``: gradients that came past torch's DDP are averaged as well.

DDP averages the gradients of one backward pass for each call of the model that it wraps.  What comes
otherwise stays as this rank has computed it, and the replicas drift apart: gradients of a method other than
``forward``, of the user's own module (``model.unwrap()(x)``), of a second backward pass through one forward
pass, of parameters that were frozen when DDP looked at them or that are not in the model.  A hook on each
parameter sees every gradient, and which of them DDP will average is known; the others are averaged at the end
of the backward pass.

Nothing is lost if DDP has averaged a part of a gradient before: the mean of (mean + own part) over the ranks
is the mean plus the mean of the own parts.

Parameters that a row axis cuts (experts) are none of DDP's, which would mix the pieces.  Theirs are sums over
the tokens of all ranks that hold pieces, so each gradient is divided by the number of these before it is
added to others; then they are averaged as all others are, over the ranks with the same piece.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from colossalai.booster.plugin.dp import host_group
from colossalai.interface.hooks import arrived_gradient, used_up
from colossalai.interface.nest import tensors
from colossalai.logging import get_dist_logger
from colossalai.mesh.backward import before_backward
from colossalai.mesh.parameter import own_grad, set_own_grad
from colossalai.utils.bucket import bucket_allreduce
from colossalai.utils.parallel import (
    broadcast_from_first,
    by_averaging_group,
    is_cut_over_rows,
    pieces_over_rows,
    start_alike,
)


class Expected(Enum):
    """DDP's next action on gradients."""

    AVERAGED = "it averages one gradient of each of its parameters: a forward pass has told it to"
    LOCAL = "nothing, and that is meant: the forward pass was under no_sync"
    NOTHING = "nothing: it has averaged what it expected"


class GradientWatch:
    """The gradients of the replicas' parameters, on their way into ``.grad``.

    It holds no reference to the model, whose parameters hold references to it.

    Args:
        model: whose parameters and buffers are meant.
        params: those of its parameters whose gradients are seen.
        group: the replicas.
        ddp: averages the gradients of those that are not frozen now.
        broadcast_buffers: together with averaged gradients, buffers are those of the first replica.
        refuse: is called at the end of a backward pass that leaves DDP waiting, with the names of the
            parameters that it waits for, to raise; by default the optimizer refuses the step.
        quiet: that gradients are averaged after the backward pass is nothing to speak of.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Tensor],
        group: dist.ProcessGroup,
        *,
        ddp: DistributedDataParallel | None = None,
        broadcast_buffers: bool = False,
        refuse: Callable[[list[str]], None] | None = None,
        quiet: bool = False,
    ) -> None:
        self._group, self._refuse = group, refuse
        self._model, self._ddp = weakref.ref(model), weakref.ref(ddp) if ddp is not None else None
        self._broadcast_buffers = broadcast_buffers
        self._expected = Expected.NOTHING
        self._params: list[weakref.ref[Tensor]] = []
        self._number: dict[int, int] = {}
        self._by_ddp: set[int] = set()  # by numbers, as the sets below
        self._late: set[int] = set()
        self._came: set[int] = set()  # in a backward pass since the last step
        self._local: set[int] = set()
        self._covered: set[int] = set()
        self._task = self._begun_by = -1
        self._last = -1, 0  # the backward pass in which a gradient came last, and of which parameter
        self._told = quiet
        self.no_sync_depth = 0
        self.divides = True  # gradients of experts, as they come
        for p in params:
            self._add(p)
            if ddp is not None and p.requires_grad and not is_cut_over_rows(p):
                self._by_ddp.add(self._number[id(p)])
        if ddp is not None:
            ddp.register_forward_hook(_AfterForward(weakref.ref(self)))

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()  # hooks are not copied with parameters, so a copy of the model is without

    @property
    def local(self) -> bool:
        """Whether gradients came under ``no_sync`` that were not averaged since."""
        return bool(self._local)

    def watches(self, ddp: nn.Module) -> bool:
        """Whether ``ddp`` is the one that averages most of the gradients."""
        return self._ddp is not None and self._ddp() is ddp

    def knows(self, p: Tensor) -> bool:
        """Whether the gradients of ``p`` are seen."""
        number = self._number.get(id(p))
        return number is not None and self._params[number]() is p

    def add(self, params: Iterable[Tensor]) -> None:
        """See the gradients of further parameters too, which get the values of the first replica; every rank
        calls this.
        """
        for p in params:
            if not self.knows(p):
                self._add(p)
                start_alike([p], self._group)

    def all_averaged(self) -> None:
        """Note that other code has averaged all gradients."""
        self._late.clear()
        self._local.clear()
        self._came.update(range(len(self._params)))

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """Inside, gradients come as they are: a pipeline divides them when it averages."""
        before, self.divides = self.divides, False
        try:
            yield
        finally:
            self.divides = before

    def average_written(self, params: Iterable[Tensor]) -> None:
        """Average gradients that the user has written into ``.grad`` without a backward pass; every rank
        calls this.
        """
        self._late |= self.written(params)
        if self._late and not self._is_no_sync():
            self._average()

    def written(self, params: Iterable[Tensor]) -> set[int]:
        """The numbers of those of ``params`` whose gradients came without a backward pass."""
        found = {self._number[id(p)] for p in params if p.grad is not None and self.knows(p)}
        return found - self._came

    def stepped(self) -> None:
        """The optimizer has used the gradients; those of the next step come anew, maybe by hand."""
        self._came.clear()

    def _add(self, p: Tensor) -> None:
        number = len(self._params)
        self._params.append(weakref.ref(p))
        self._number[id(p)] = number
        _register(p, partial(_came, weakref.ref(self), number))
        if (pieces := pieces_over_rows(p)) > 1:
            _divide_gradients(p, partial(_divided, weakref.ref(self), pieces))

    # What the hooks tell

    def after_forward(self, output: Any, *, sync: bool, static_graph: bool) -> None:
        """DDP has called the model, with gradients to come."""
        if sync:
            self._expected, self._covered, self._begun_by = Expected.AVERAGED, set(), -1
            # its backward pass may contain others, of reentrant checkpoints
            roots = [tensor for tensor in tensors(output) if tensor.grad_fn is not None]
            if static_graph:
                before_backward(roots, partial(_begins, weakref.ref(self)))
            if self._refuse is not None:
                before_backward(roots, partial(_has_all_at_end, weakref.ref(self)))
        elif self._expected is not Expected.AVERAGED:  # which no_sync does not revoke
            self._expected = Expected.LOCAL

    def begins(self) -> None:
        """The backward pass of an output of DDP begins."""
        self._begun_by = torch._C._current_graph_task_id()
        self._see_to_the_end()

    def came(self, number: int) -> None:
        """A gradient is in ``.grad``."""
        task, (before, last) = torch._C._current_graph_task_id(), self._last
        if task == before and (p := self._params[last]()) is not None and p.grad is None:
            raise used_up(p)
        self._last = task, number
        self._came.add(number)
        if self._expected is Expected.AVERAGED and number in self._by_ddp:
            self._covered.add(number)
            if len(self._covered) in (1, len(self._by_ddp)):
                self._see_to_the_end()
            return
        if self._expected is Expected.LOCAL or self._is_no_sync():
            self._local.add(number)
        else:
            self._late.add(number)
        self._see_to_the_end()

    def _is_no_sync(self) -> bool:
        ddp = self._ddp() if self._ddp is not None else None
        return self.no_sync_depth > 0 or (ddp is not None and not ddp.require_backward_grad_sync)

    def _see_to_the_end(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(partial(_ends, weakref.ref(self), task))

    def ends(self, task: int) -> None:
        """A backward pass has ended, and DDP is done with it."""
        self._task, others = -1, False
        if self._expected is Expected.AVERAGED:
            if not self._ddp_is_done(task):
                return
            self._local -= self._by_ddp
            self._came |= self._by_ddp  # also of those that only other ranks have used
            others = self._others_train()
        elif self._expected is Expected.LOCAL or self._is_no_sync():
            self._expected = Expected.NOTHING
            return
        self._expected = Expected.NOTHING
        if self._late or self._local or others:
            self._average()

    def _others_train(self) -> bool:
        """Whether there is anything to train that DDP does not know: then another rank may have a gradient of
        it.
        """
        beside = (p() for i, p in enumerate(self._params) if i not in self._by_ddp)
        return any(p is not None and p.requires_grad for p in beside)

    def _ddp_is_done(self, task: int) -> bool:
        ddp = self._ddp() if self._ddp is not None else None
        if ddp is None or not self._covered or self._begun_by not in (-1, task):
            return False
        return not _waits_for_all(ddp) or len(self._covered) == len(self._by_ddp)

    def missing(self) -> list[str]:
        """The parameters without which DDP does not end what a backward pass has begun."""
        ddp, model = self._ddp() if self._ddp is not None else None, self._model()
        waits = self._expected is Expected.AVERAGED and self._covered and ddp is not None
        if not waits or not _waits_for_all(ddp) or model is None:
            return []
        names = {id(p): name for name, p in model.named_parameters()}
        left = (self._params[i]() for i in sorted(self._by_ddp - self._covered))
        return [names.get(id(p), "one that is not in the model any more") for p in left]

    def refuse_missing(self) -> None:
        """The backward pass of an output of DDP has ended, with all passes inside of it."""
        if self._refuse is not None and (missing := self.missing()):
            self._refuse(missing)

    def _average(self) -> None:
        late = torch.zeros(len(self._params), dtype=torch.uint8)
        late[sorted(self._late | self._local)] = 1
        # a rank that is alone in this waits here, and does not meet DDP's messages
        dist.all_reduce(late, dist.ReduceOp.MAX, group=host_group(self._group, "late gradients"))
        self._late.clear()
        self._local.clear()
        numbers = late.nonzero().flatten().tolist()
        self._came.update(numbers)
        params = [p for i in numbers if (p := self._params[i]()) is not None]
        if others := [p for p in params if not is_cut_over_rows(p)]:
            self._tell(others)
        for group, own in by_averaging_group(params, self._group):
            if group is not self._group:
                _fill(own)
            bucket_allreduce(own, group)
        if others:
            self.share_buffers()

    def share_buffers(self) -> None:
        """Take the buffers of the first replica, if that is wanted."""
        model = self._model()
        if self._broadcast_buffers and model is not None:
            # not detach(): the graph may be needed once more, and holds these buffers
            broadcast_from_first((buffer.data for buffer in model.buffers()), self._group)

    def _tell(self, params: list[Tensor]) -> None:
        if self._told:
            return
        self._told, model = True, self._model()
        names = {id(p): name for name, p in model.named_parameters()} if model is not None else {}
        first = names.get(id(params[0]), f"of shape {tuple(params[0].shape)}, not in the model")
        get_dist_logger().warning(
            f"gradients of {len(params)} parameters (the first: {first}) came past DDP, so they are averaged"
            " after the backward pass and not during it, which takes longer. DDP sees one backward pass for"
            " each call of the boosted model, model(...), and the parameters that were not frozen at boost;"
            " not other methods, and not the module inside",
            ranks=[0],
        )


# Hooks live as long as parameters do, and must not keep a watch, nor a process group, alive.


def _register(p: Tensor, hook: Callable[[Tensor], None]) -> None:
    if p.is_floating_point() or p.is_complex():  # else it can never get a gradient
        with _unfrozen(p):
            p.register_post_accumulate_grad_hook(hook)


@contextmanager
def _unfrozen(p: Tensor) -> Iterator[None]:
    """Inside, ``p`` takes hooks: they stay when it is frozen again, and work once it is not."""
    frozen = not p.requires_grad
    if frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        if frozen:
            p.requires_grad_(False)


# What divides the gradients of a parameter: the last watch alone, if a model is boosted again.
_divisions: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _divide_gradients(p: Tensor, hook: Callable[[Tensor | None], Tensor | None]) -> None:
    if p in _divisions:
        _divisions[p].remove()
    with _unfrozen(p):
        _divisions[p] = p.register_hook(hook)


def _divided(watch: weakref.ref[GradientWatch], pieces: int, grad: Tensor | None) -> Tensor | None:
    alive = watch()
    return grad / pieces if grad is not None and alive is not None and alive.divides else grad


def _fill(params: Iterable[Tensor]) -> None:
    """Give ``params``, of which other ranks have used other pieces, zeros where they have no gradient."""
    for p in params:
        if p.requires_grad and own_grad(p) is None:
            set_own_grad(p, torch.zeros_like(p))


def _came(watch: weakref.ref[GradientWatch], number: int, p: Tensor) -> None:
    if (alive := watch()) is not None and arrived_gradient(p) is not None:
        alive.came(number)


def _begins(watch: weakref.ref[GradientWatch], grad: Tensor) -> None:
    if (alive := watch()) is not None:
        alive.begins()


def _has_all_at_end(watch: weakref.ref[GradientWatch], grad: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(partial(_check_missing, watch))


def _check_missing(watch: weakref.ref[GradientWatch]) -> None:
    if (alive := watch()) is not None:
        alive.refuse_missing()


def _ends(watch: weakref.ref[GradientWatch], task: int) -> None:
    if (alive := watch()) is not None:
        alive.ends(task)


class _AfterForward:
    """A hook that is copied and pickled with the model, and then knows of no watch."""

    def __init__(self, watch: weakref.ref[GradientWatch] | None = None) -> None:
        self._watch = watch

    def __call__(self, ddp: Any, args: Any, output: Any) -> None:
        alive = self._watch() if self._watch is not None else None
        if alive is not None and alive.watches(ddp) and torch.is_grad_enabled():
            alive.after_forward(output, sync=ddp.require_backward_grad_sync, static_graph=ddp.static_graph)

    def __reduce__(self) -> tuple[Any, ...]:
        return _AfterForward, ()


def _waits_for_all(ddp: Any) -> bool:
    return not (ddp.find_unused_parameters or ddp.static_graph)


def _nothing() -> None:
    return None
