"""Cutting a batch over the ranks that share one model, and summing what they make of it.

In 2D, 2.5D and 3D the ranks of one model share the rows of a batch.  A data loader gives all of them the same
batch, and ``partition_batch`` keeps this rank's part; in 1D there is nothing to cut.  First layers with a
mode in their names take the whole batch and keep their rows themselves (``TakesWholeBatch``).
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_map

from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.mesh import Axes, Layout, Mesh, redistribute
from colossalai.mesh.agreement import can_compare, everyone, fingerprint
from colossalai.nn.layer.base import ParallelLayer
from colossalai.nn.modes import TensorParallel, Where, current

T = TypeVar("T")


def partition_batch(
    input_: T, *, at: Where = "hidden", tp: TensorParallel | None = None, mesh: Mesh | None = None
) -> T:
    """This rank's rows of ``input_``, a tensor or a nest of lists, tuples and dicts of tensors.

    ``at="inner"`` gives the rows that this rank has between an expanding and a contracting Linear, where
    attention runs; in 3D these are others.
    """
    launched = current()
    tp, mesh = tp or launched.tp, mesh or launched.mesh
    if mesh is None or tp.size == 1:
        return input_
    axes, where = tp.rest(at).dims[0], mesh

    def cut(value: Any) -> Any:
        return split_rows(value, axes, where, 0) if isinstance(value, Tensor) else value

    return tree_map(cut, input_)


def split_rows(x: Tensor, axes: Axes, mesh: Mesh, dim: int) -> Tensor:
    """This rank's part along ``dim`` of a tensor that all ranks of ``axes`` hold."""
    parts = mesh.group_size(*axes)
    if x.size(dim) % parts:
        names = " x ".join(f"{a}={mesh.size[a]}" for a in axes)
        below = x.size(dim) // parts * parts
        raise ValueError(
            f"a batch of {x.size(dim)} rows is shared by {names} = {parts} ranks; the nearest valid sizes are"
            f" {f'{below} and {below + parts}' if below else parts}"
        )
    dim %= x.ndim
    cut = Layout(tuple(axes if d == dim else () for d in range(x.ndim)))
    return redistribute(x, cut.whole(), cut, mesh)


def sum_rows(x: Tensor, axes: Axes, mesh: Mesh, reduce_mean: bool) -> Tensor:
    """The sum, or the mean, over ``axes`` of what each rank made of its rows."""
    summed = Layout(((),) * x.ndim, partial=frozenset(axes))
    total = redistribute(x, summed, Layout(((),) * x.ndim), mesh)
    return total / mesh.group_size(*axes) if reduce_mean else total


class TakesWholeBatch(ParallelLayer):
    """Mixed into a first layer that is given the whole batch on every rank, and keeps this rank's rows.

    Ids of one dim, or of one row, number the positions of a sequence and serve all rows.  The ranks compare
    the batches of calls 1, 2, 4, 8 and so on.
    """

    _calls = 0

    def forward(self, batch: Tensor) -> Tensor:
        found: Tensor = super().forward(self._own_rows(batch))
        return found

    def _own_rows(self, batch: Tensor) -> Tensor:
        positions = not batch.is_floating_point() and (batch.ndim == 1 or len(batch) == 1)
        axes = self.tp.hidden.dims[0]
        if self.plain or not axes or positions:
            return batch
        if can_compare(batch):
            calls = self._calls + 1  # alike on all ranks, as a new shape may not be
            if not calls & (calls - 1):
                self._check_whole(batch)
            self._calls = calls  # a batch that was refused does not count
        return split_rows(batch, axes, self.mesh, 0)

    def _check_whole(self, batch: Tensor) -> None:
        told = everyone(fingerprint(batch), tuple(self.tp.axes), self.mesh)
        if any(found != told[0][1] for _, found in told):
            who, ranks = type(self).__name__, " x ".join(f"{a}={n}" for a, n in self.tp.axes.items())
            raise ValueError(
                f"{who} takes the whole batch and keeps this rank's rows of it, but the ranks that share the"
                f" model ({ranks}) were given different ones, here of shape {tuple(batch.shape)}; give all of"
                " them the same batch and do not cut it before, or use the class without a mode in its name,"
                " which takes this rank's rows (partition_batch)"
            )


def _batch_axes(mode: str, who: str) -> tuple[Axes, Mesh]:
    tp, mesh = current()
    if mesh is None or tp.mode != mode:
        raise RuntimeError(f"{who} needs a job launched in tensor mode {mode!r}; the mode is {tp.mode!r}")
    return tp.hidden.dims[0], mesh


def split_batch_2d(input_: Tensor, dim: int = 0) -> Tensor:
    """This rank's rows in 2D."""
    return split_rows(input_, *_batch_axes("2d", "split_batch_2d"), dim)


def split_batch_2p5d(input_: Tensor, dim: int = 0) -> Tensor:
    """This rank's rows in 2.5D."""
    return split_rows(input_, *_batch_axes("2.5d", "split_batch_2p5d"), dim)


def split_batch_3d(
    input_: Tensor,
    dim: int = 0,
    input_parallel_mode: ParallelMode = ParallelMode.PARALLEL_3D_INPUT,
    weight_parallel_mode: ParallelMode = ParallelMode.PARALLEL_3D_WEIGHT,
) -> Tensor:
    """This rank's rows in 3D: cut by the ranks of ``weight_parallel_mode``, and each part by
    ``input_parallel_mode``.
    """
    _, mesh = _batch_axes("3d", "split_batch_3d")
    return split_rows(input_, _axes_3d(weight_parallel_mode, input_parallel_mode), mesh, dim)


def split_tensor_3d(tensor: Tensor, dim: int, parallel_mode: ParallelMode) -> Tensor:
    """This rank's part along ``dim`` of a tensor that all ranks of ``parallel_mode`` hold."""
    _, mesh = _batch_axes("3d", "split_tensor_3d")
    return split_rows(tensor, _axes_3d(parallel_mode), mesh, dim)


def reduce_by_batch_2d(input_: Tensor, reduce_mean: bool = False) -> Tensor:
    """The sum over the ranks that share the batch in 2D."""
    return sum_rows(input_, *_batch_axes("2d", "reduce_by_batch_2d"), reduce_mean)


def reduce_by_batch_2p5d(input_: Tensor, reduce_mean: bool = False) -> Tensor:
    """The sum over the ranks that share the batch in 2.5D."""
    return sum_rows(input_, *_batch_axes("2.5d", "reduce_by_batch_2p5d"), reduce_mean)


def reduce_by_batch_3d(
    tensor: Tensor,
    input_parallel_mode: ParallelMode = ParallelMode.PARALLEL_3D_INPUT,
    weight_parallel_mode: ParallelMode = ParallelMode.PARALLEL_3D_WEIGHT,
    reduce_mean: bool = False,
) -> Tensor:
    """The sum over the ranks that share the batch in 3D."""
    _, mesh = _batch_axes("3d", "reduce_by_batch_3d")
    return sum_rows(tensor, _axes_3d(weight_parallel_mode, input_parallel_mode), mesh, reduce_mean)


def _axes_3d(*modes: ParallelMode) -> Axes:
    table = {
        ParallelMode.PARALLEL_3D_WEIGHT: "i",
        ParallelMode.PARALLEL_3D_INPUT: "j",
        ParallelMode.PARALLEL_3D_OUTPUT: "l",
    }
    for mode in modes:
        gpc.get_group(mode)  # says which launch would have made a mode that is not there
        if mode not in table:
            raise ValueError(f"{mode} is not one of the three axes of 3D, {', '.join(map(str, table))}")
    return tuple(table[mode] for mode in modes)
