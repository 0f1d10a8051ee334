"""Collectives among the ranks of a ``ParallelMode``.

With ``async_op=True`` each returns ``(tensor, work)``; the tensor may be read after ``work.wait()``.  In a
group of one rank a function returns its input, and there is no work to wait for.

Each first compares the calls of the ranks, with their shapes and dtypes, by a gather of 512 bytes over the
CPU group: these functions are for scripts, and nothing in a training step of ours uses them.  With
``async_op=True`` the comparison is read by ``work.wait()``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.communication.same_call import SameCall
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.mesh._compat import all_gather_single, reduce_scatter_single
from colossalai.mesh.collectives import Kind, note_transfer


class Work:
    """A collective under way; ``wait`` ends it."""

    def __init__(
        self, call: SameCall, work: dist.Work | None, finish: Callable[[], None], *alive: Tensor
    ) -> None:
        self._check = call.check
        self._work = work
        self._finish = finish
        self._alive = alive  # what is being sent must live until it has arrived

    def wait(self) -> None:
        self._check()
        if self._work is not None:
            self._work.wait()
        self._finish()
        self._check, self._work, self._finish, self._alive = _nothing, None, _nothing, ()

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()


Result = Tensor | tuple[Tensor, Work | None]
SUM = dist.ReduceOp.SUM


def all_gather(tensor: Tensor, dim: int, parallel_mode: ParallelMode, async_op: bool = False) -> Result:
    """Join the tensors of all ranks along ``dim``; they have one shape."""
    size = gpc.get_world_size(parallel_mode)
    problem = _bad_dim("all_gather", tensor, dim)
    if size == 1 and problem is None:
        return _result(tensor, None, async_op)
    call = _begin("all_gather", tensor, parallel_mode, async_op, problem, dim=_counted(dim, tensor))
    own = tensor.detach().movedim(dim, 0).contiguous()
    joined = own.new_empty((size * own.shape[0], *own.shape[1:]))
    work = all_gather_single(joined, own, group=gpc.get_group(parallel_mode), async_op=True)
    _note("all_gather", parallel_mode, joined)
    out = without_gradient("all_gather", tensor, joined.movedim(0, dim))
    return _result(out, Work(call, work, _nothing, own), async_op)


def reduce_scatter(
    tensor: Tensor,
    dim: int,
    parallel_mode: ParallelMode,
    op: dist.ReduceOp.RedOpType = SUM,
    async_op: bool = False,
) -> Result:
    """Reduce the tensors of all ranks, and keep this rank's part of the result along ``dim``."""
    size = gpc.get_world_size(parallel_mode)
    problem = _bad_dim("reduce_scatter", tensor, dim)
    if size == 1 and problem is None:
        return _result(tensor, None, async_op)
    if problem is None and tensor.shape[dim] % size:
        problem = ValueError(
            f"reduce_scatter: dim {dim} of size {tensor.shape[dim]} cannot be cut into {size} equal parts,"
            f" one for each rank of {parallel_mode}; choose a multiple of {size}"
        )
    arguments = {"dim": _counted(dim, tensor), "op": _named(op)}
    call = _begin("reduce_scatter", tensor, parallel_mode, async_op, problem, **arguments)
    whole = tensor.detach().movedim(dim, 0).contiguous()
    part = whole.new_empty((whole.shape[0] // size, *whole.shape[1:]))
    group = gpc.get_group(parallel_mode)
    work = reduce_scatter_single(part, whole, op=op, group=group, async_op=True)
    _note("reduce_scatter", parallel_mode, whole)
    out = without_gradient("reduce_scatter", tensor, part.movedim(0, dim))
    return _result(out, Work(call, work, _nothing, whole), async_op)


def all_reduce(
    tensor: Tensor,
    parallel_mode: ParallelMode,
    op: dist.ReduceOp.RedOpType = SUM,
    async_op: bool = False,
) -> Result:
    """Reduce the tensors of all ranks, in ``tensor`` itself, which is also returned."""
    if gpc.get_world_size(parallel_mode) == 1:
        return _result(tensor, None, async_op)
    problem = _no_change("all_reduce", tensor)
    call = _begin("all_reduce", tensor, parallel_mode, async_op, problem, op=_named(op))
    tensor = without_gradient("all_reduce", tensor, tensor)
    sent = tensor.detach().contiguous()
    work = dist.all_reduce(sent, op=op, group=gpc.get_group(parallel_mode), async_op=True)
    _note("all_reduce", parallel_mode, sent)
    return _result(tensor, Work(call, work, _put_back(sent, tensor), sent), async_op)


def broadcast(tensor: Tensor, src: int, parallel_mode: ParallelMode, async_op: bool = False) -> Result:
    """Give ``tensor`` the values that it has on the rank ``src``, counted in the whole job; it is also
    returned.
    """
    problem = _no_member("broadcast", "src", src, parallel_mode)
    if gpc.get_world_size(parallel_mode) == 1 and problem is None:
        return _result(tensor, None, async_op)
    here = gpc.get_global_rank() == src
    problem = problem or (None if here else _no_change("broadcast", tensor))
    call = _begin("broadcast", tensor, parallel_mode, async_op, problem, src=src)
    if not here:
        tensor = without_gradient("broadcast", tensor, tensor)
    sent = tensor.detach().contiguous()
    work = dist.broadcast(sent, src=src, group=gpc.get_group(parallel_mode), async_op=True)
    _note("broadcast", parallel_mode, sent)
    finish = _nothing if here else _put_back(sent, tensor)
    return _result(tensor, Work(call, work, finish, sent), async_op)


def reduce(
    tensor: Tensor,
    dst: int,
    parallel_mode: ParallelMode,
    op: dist.ReduceOp.RedOpType = SUM,
    async_op: bool = False,
) -> Result:
    """Reduce the tensors of all ranks, in the ``tensor`` of the rank ``dst``, counted in the whole job.

    The other ranks keep what they have.
    """
    problem = _no_member("reduce", "dst", dst, parallel_mode)
    if gpc.get_world_size(parallel_mode) == 1 and problem is None:
        return _result(tensor, None, async_op)
    here = gpc.get_global_rank() == dst
    problem = problem or (_no_change("reduce", tensor) if here else None)
    call = _begin("reduce", tensor, parallel_mode, async_op, problem, dst=dst, op=_named(op))
    if here:
        tensor = without_gradient("reduce", tensor, tensor)
        sent = tensor.detach().contiguous()
        finish = _put_back(sent, tensor)
    else:  # backends leave parts of the sum in what other ranks send
        sent = tensor.detach().clone(memory_format=torch.contiguous_format)
        finish = _nothing
    work = dist.reduce(sent, dst=dst, op=op, group=gpc.get_group(parallel_mode), async_op=True)
    _note("reduce", parallel_mode, sent)
    return _result(tensor, Work(call, work, finish, sent), async_op)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None,
    src: int = 0,
    group: dist.ProcessGroup | ParallelMode | None = None,
) -> None:
    """Put this rank's object of the list that the rank ``src`` has into the first place of
    ``scatter_object_output_list``.

    ``group`` may be a ``ParallelMode``.  The objects are pickled.
    """
    if isinstance(group, ParallelMode):
        if (problem := _no_member("scatter_object_list", "src", src, group)) is not None:
            raise problem
        group = gpc.get_cpu_group(group)
    dist.scatter_object_list(scatter_object_output_list, scatter_object_input_list, src=src, group=group)


class _NoGradient(torch.autograd.Function):
    """What a collective returns for a tensor of a graph: it may be looked at, but not differentiated.

    Without it, the gradient of a loss that uses the result would lack a part without a word.
    """

    @staticmethod
    def forward(ctx: Any, name: str, tensor: Tensor, out: Tensor) -> Tensor:
        ctx.name = name
        if out is tensor:
            ctx.mark_dirty(tensor)
            return tensor
        return out.data  # not a view: it may still be written to, by the collective under way

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            f"colossalai.communication.{ctx.name} carries no gradients; reduce or gather a detached copy for"
            " a report, and use the layers of colossalai.nn, or colossalai.mesh.move, in a model"
        )


def without_gradient(name: str, tensor: Tensor, out: Tensor) -> Tensor:
    in_graph = tensor.requires_grad and torch.is_grad_enabled()
    return _NoGradient.apply(name, tensor, out) if in_graph else out


def _begin(
    name: str,
    tensor: Tensor,
    mode: ParallelMode,
    async_op: bool,
    problem: Exception | None,
    **arguments: object,
) -> SameCall:
    """Tell the other ranks of this call; all of them raise where one has a ``problem`` or calls differ."""
    call = SameCall(name, tensor, mode, **arguments)
    call.tell(problem)
    if not async_op:
        call.check()
    return call


def _no_change(name: str, tensor: Tensor) -> Exception | None:
    """Why ``tensor`` may not be changed in place."""
    if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
        return RuntimeError(
            f"colossalai.communication.{name} would change a tensor in place that requires gradients, such as"
            " a parameter; call it under torch.no_grad(), or with tensor.data"
        )
    return None


def _bad_dim(name: str, tensor: Tensor, dim: int) -> Exception | None:
    if -tensor.ndim <= dim < tensor.ndim:
        return None
    have = f"has dims 0 to {tensor.ndim - 1}" if tensor.ndim else "has none; give tensor.reshape(1)"
    return ValueError(f"{name}: dim={dim} is no dim of a tensor of shape {tuple(tensor.shape)}, which {have}")


def _counted(dim: int, tensor: Tensor) -> int:
    """``dim`` counted from the front."""
    return dim + tensor.ndim if dim < 0 else dim


def _named(op: object) -> str:
    return getattr(op, "name", type(op).__name__)


def _put_back(sent: Tensor, tensor: Tensor) -> Callable[[], None]:
    """Copy a result that lies elsewhere, since ``tensor`` is not contiguous, back into ``tensor``."""
    if sent.data_ptr() == tensor.data_ptr():
        return _nothing
    target = tensor.detach()

    def put_back() -> None:
        target.copy_(sent)

    return put_back


def _nothing() -> None:
    pass


def _result(tensor: Tensor, work: Work | None, async_op: bool) -> Result:
    if async_op:
        return tensor, work
    if work is not None:
        work.wait()
    return tensor


def _no_member(name: str, argument: str, rank: int, parallel_mode: ParallelMode) -> Exception | None:
    ranks = gpc.get_ranks_in_group(parallel_mode)
    if rank in ranks:
        return None
    return ValueError(
        f"{name}: {argument}={rank} is not among the ranks {', '.join(map(str, ranks))} of"
        f" {parallel_mode} on rank {gpc.get_global_rank()}; ranks are counted in the whole job, as"
        " gpc.get_ranks_in_group gives them"
    )


def _note(kind: Kind, parallel_mode: ParallelMode, tensor: Tensor) -> None:
    size = gpc.get_world_size(parallel_mode)
    note_transfer(kind, parallel_mode.value, size, tensor.numel() * tensor.element_size())
