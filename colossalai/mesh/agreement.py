"""Compares batches and gradients of ranks that share one model, once, in the first training step.

Ranks along a tensor axis hold copies of some parameters.  Each updates its own copy, so the copies stay equal
only if their gradients are equal.  They are not where a plan applies such a parameter to a rank's own heads
without summing its gradient, where ranks draw different dropout masks for one activation, or where ranks were
given different batches; nothing else in training would notice.  Here the gradients of the first backward pass
are compared by a few numbers for each parameter, so that any such fault, also an unforeseen one, is refused
by name in the first step.
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colossalai.mesh._compat import at_end_of_task
from colossalai.mesh.backward import before_backward
from colossalai.mesh.gradient_norm import own_part, piece_axes, tensor_axes
from colossalai.mesh.mesh import Axes, Mesh, mesh_groups
from colossalai.mesh.parameter import own_grad

SHOWN = 4
# of the gradient of one parameter: its norm and two projections
Numbers = tuple[float, float, float]


def check_same_batch(batch: Any, axes: Sequence[str], mesh: Mesh, who: str) -> None:
    """Refuse a batch that is not the same on all ranks along ``axes``; every rank of the job calls this.

    ``batch`` is a nest of tensors, of which a dict names the parts.  All ranks raise the same error, also
    those whose own batch is right.
    """
    axes = [axis for axis in axes if mesh.size.get(axis, 1) > 1]
    own = {path: fingerprint(tensor) for path, tensor in _leaves("", batch)}
    if not axes or not _real(batch_tensors(batch)):
        return
    everyone: list[Any] = [None] * math.prod(mesh.size.values())
    dist.all_gather_object(everyone, own)
    for ranks in mesh_groups(mesh.size, axes):
        for rank in ranks[1:]:
            if (problem := _difference(everyone[ranks[0]], everyone[rank])) is not None:
                names = " x ".join(f"{axis}={mesh.size[axis]}" for axis in axes)
                raise ValueError(
                    f"{who}: ranks {ranks[0]} and {rank} share one model ({names}) and were given different"
                    f" batches: {problem}. Such ranks take the same batch, and only data-parallel ranks"
                    " different ones; give the sampler the data-parallel rank and size"
                    " (booster.plugin.prepare_dataloader and colossalai.utils.get_dataloader do), and the"
                    " same seed on all ranks"
                )


def can_compare(*tensors: Tensor) -> bool:
    """Whether these have values, and other ranks can be asked about theirs: not in a dry run, nor while a
    graph is compiled.
    """
    return _real(tensors) and not torch.compiler.is_compiling()


def everyone(fact: Any, axes: Sequence[str], mesh: Mesh) -> list[tuple[dict[str, int], Any]]:
    """What each rank along ``axes`` says, with its coordinates on them; all of these ranks call this."""
    told = [({axis: mesh.coord[axis] for axis in axes}, fact)]
    for axis in axes:
        parts: list[Any] = [None] * mesh.size[axis]
        if len(parts) > 1:
            dist.all_gather_object(parts, told, group=mesh.group(axis))
            told = [one for part in parts for one in part]
    return told


def batch_tensors(batch: Any) -> list[Tensor]:
    return [tensor for _, tensor in _leaves("", batch)]


def _leaves(path: str, nest: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(nest, Tensor):
        yield path, nest
    elif isinstance(nest, Mapping):
        for key, value in nest.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), value)
    elif isinstance(nest, (list, tuple)):
        for i, value in enumerate(nest):
            yield from _leaves(f"{path}[{i}]", value)


def _real(tensors: Iterable[Tensor]) -> bool:
    """Whether there is something to compare, on ranks that can answer: not on the meta device of a dry
    run.
    """
    return not any(t.is_meta for t in tensors) and dist.is_initialized() and dist.get_backend() != "fake"


@torch.no_grad()
def fingerprint(tensor: Tensor) -> tuple[str, tuple[int, ...], int]:
    """The dtype, the shape and a checksum of the values of ``tensor``."""
    if tensor.is_meta or tensor.is_sparse or tensor.is_nested:
        return str(tensor.dtype), (), 0
    values = tensor.detach().cpu().contiguous()
    content = values.view(-1).view(torch.uint8) if values.numel() else values.new_empty(0, dtype=torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), zlib.crc32(content.numpy())  # type: ignore[arg-type]


def _difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    if one.keys() != other.keys():
        odd = sorted(one.keys() ^ other.keys())
        return f"{_name(odd[0])} is given to one of them only"
    for path in one:
        if one[path][:2] != other[path][:2]:
            (a, b), (c, d) = one[path][:2], other[path][:2]
            return f"{_name(path)} is {a} of shape {b} on one and {c} of shape {d} on the other"
        if one[path] != other[path]:
            return f"{_name(path)}, of shape {one[path][1]}, has other values"
    return None


def _name(path: str) -> str:
    return repr(path) if path else "the input"


class SameGradients:
    """Compares the gradients of copies of parameters over the tensor axes once, at the end of the first
    backward pass.

    ``watch`` is called with the model and its outputs after each forward pass in training, until ``done``.
    The hooks stay for one backward pass: they see each gradient before plugins reduce it or take it away.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.axes: Axes = tuple(axis for axis in tensor_axes(mesh) if mesh.size[axis] > 1)
        self.done = not self.axes
        self._names: list[str] = []
        self._copies: list[Axes] = []
        self._numbers: dict[int, Numbers] = {}
        self._tolerance: dict[int, float] = {}
        self._handles: list[Any] = []
        self._queued = False

    def __deepcopy__(self, memo: dict[int, Any]) -> SameGradients:
        twin = SameGradients(self.mesh)  # hooks belong to the parameters of one model
        twin.done = self.done
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return SameGradients, (self.mesh,)

    def watch(self, model: nn.Module, outputs: Any) -> None:
        """Compare at the end of the backward pass of ``outputs``."""
        roots = [tensor for tensor in batch_tensors(outputs) if tensor.requires_grad]
        if self.done or not roots or not _real(roots):
            return
        if not self._handles:
            self._see_gradients(model)
        before_backward(roots, self._begin)

    def _see_gradients(self, model: nn.Module) -> None:
        for name, param in model.named_parameters():
            cut = piece_axes(param, self.mesh)
            copies = tuple(axis for axis in self.axes if axis not in cut)
            if not param.requires_grad or not copies or hasattr(param, "placements"):
                continue
            index = len(self._names)
            self._names.append(name)
            self._copies.append(copies)
            self._handles.append(param.register_hook(_GradientHook(self, index)))

    def see(self, index: int, grad: Tensor) -> None:
        if self.done or grad.is_sparse or grad.is_meta:
            return
        before = self._numbers.get(index, (0.0, 0.0, 0.0))
        norm, one, two = (p + q for p, q in zip(project(grad.detach()), before, strict=True))
        self._numbers[index] = norm, one, two
        # what is left of the digits when ranks sum in another order
        self._tolerance[index] = math.sqrt(torch.finfo(grad.dtype).eps)

    def _begin(self, _: Any) -> None:
        if not self.done and not self._queued:
            self._queued = True
            at_end_of_task(self._compare)

    def _compare(self) -> None:
        """Every tensor rank comes here at the end of the same backward pass, whatever it has seen."""
        self._queued = False
        self._settle(
            *_differing(self.mesh, self.axes, self._names, self._copies, self._numbers, self._tolerance)
        )

    def _settle(self, bad: dict[int, str], finite: bool) -> None:
        seen_any = bool(self._numbers)
        self._numbers.clear()
        if bad or (seen_any and finite):
            self.done = True
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
        if bad:
            raise RuntimeError(
                f"in the first backward pass, {len(bad)} of {len(self._names)} parameters that all"
                " tensor-parallel ranks hold alike got different gradients on these ranks, so the copies"
                f" would drift apart: {_listed(bad)}. Either the ranks apply them to their own heads or"
                " features (name the module in the policy, as Pieces('inner'), so that its gradients are"
                " summed), or draw different dropout masks for one activation, or were given different"
                " batches, labels or initial weights"
            )


def _differing(
    mesh: Mesh,
    axes: Axes,
    names: Sequence[str],
    copies: Sequence[Axes],
    numbers: Mapping[int, Numbers],
    tolerance: Mapping[int, float],
) -> tuple[dict[int, str], bool]:
    """Which gradients are not alike on the ranks that have copies, by index, and whether all are finite; the
    same on all tensor ranks.

    ``copies`` are, for each name, the axes along which the gradient should be alike.
    """
    own = [numbers.get(i) for i in range(len(names))]
    bad: dict[int, str] = {}
    finite = True
    for axis in axes:
        everyone: list[Any] = [None] * mesh.size[axis]
        dist.all_gather_object(everyone, own, group=mesh.group(axis))
        scale = max((n[0] for each in everyone for n in each if n and math.isfinite(n[0])), default=0.0)
        for index, name in enumerate(names):
            seen = [each[index] for each in everyone]
            finite &= all(n is None or all(map(math.isfinite, n)) for n in seen)
            if axis in copies[index] and differ(seen, tolerance.get(index, 1e-3), scale):
                norms = " and ".join("none" if n is None else f"{n[0]:.3g}" for n in seen[:SHOWN])
                bad[index] = f"{name} (norms {norms} along {axis!r})"
    for axis in axes:  # so that all tensor ranks raise, and say the same
        told: list[Any] = [None] * mesh.size[axis]
        dist.all_gather_object(told, (bad, finite), group=mesh.group(axis))
        bad = {i: text for each, _ in reversed(told) for i, text in each.items()}
        finite = all(each for _, each in told)
    return bad, finite


def differ(seen: Sequence[Numbers | None], tolerance: float, scale: float = 0.0) -> bool:
    """Whether the :func:`project` of what should be alike differs by more than rounding."""
    if any(n is None for n in seen):
        return any(n is not None and n[0] > 0 for n in seen)
    present = [n for n in seen if n is not None]
    if not all(math.isfinite(value) for n in present for value in n):
        return False  # an overflow in half precision: seen again in the next pass
    # a gradient that is all rounding, such as that of a bias before a softmax, has no digits to compare
    allowed = tolerance * max(*(n[0] for n in present), 1e-6 * scale)
    first = present[0]
    return any(abs(n[k] - first[k]) > allowed for n in present[1:] for k in (0, 1, 2))


def _listed(bad: Mapping[int, str]) -> str:
    texts = [bad[i] for i in sorted(bad)]
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return f"{', '.join(texts[:SHOWN])}{more}"


class SameSteps:
    """Compares the gradients of copies of parameters over the tensor axes before steps of an optimizer: 1, 2,
    4, 8 and so on.

    Between the backward pass and the step a script may have changed them, by a norm that it has computed of
    its own pieces. It is a hook of ``optimizer.step``, on every tensor rank.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], mesh: Mesh) -> None:
        self._mesh = mesh
        self._axes: Axes = tuple(axis for axis in tensor_axes(mesh) if mesh.size[axis] > 1)
        self._params: list[weakref.ref[Tensor]] = []
        self._names: list[str] = []
        self._copies: list[Axes] = []
        self._steps = 0
        for name, param in named:
            copies = tuple(axis for axis in self._axes if axis not in piece_axes(param, mesh))
            if copies:
                self._params.append(weakref.ref(param))
                self._names.append(name)
                self._copies.append(copies)

    def __reduce__(self) -> tuple[Any, ...]:
        return SameSteps, ((), self._mesh)  # with a copy of the optimizer, whose parameters are others

    def __call__(self, *_: Any) -> None:
        self._steps += 1
        if not self._names or self._steps & (self._steps - 1):
            return
        numbers: dict[int, Numbers] = {}
        tolerance: dict[int, float] = {}
        for index, ref in enumerate(self._params):
            grad = None if (param := ref()) is None else own_grad(param)
            if grad is not None and not grad.is_sparse and not grad.is_meta:
                numbers[index] = project(own_part(grad.detach()))
                tolerance[index] = math.sqrt(torch.finfo(grad.dtype).eps)
        bad = _differing(self._mesh, self._axes, self._names, self._copies, numbers, tolerance)[0]
        if bad:
            raise RuntimeError(
                f"before a step, {len(bad)} of {len(self._names)} parameters that all tensor-parallel ranks"
                " hold alike have different gradients on these ranks, so the copies would drift apart:"
                f" {_listed(bad)}. They were changed after the backward pass by something that each rank"
                " computes of its own pieces, such as a norm of p.grad; use optimizer.clip_grad_by_norm, or"
                " torch.nn.utils.clip_grad_norm_(model.parameters(), ...). Or, under TorchFSDPPlugin, the"
                " ranks apply them to their own heads or features; name the module in the policy, as"
                " Pieces('inner'), so that its gradients are summed"
            )


class FirstStep:
    """Runs around the forward passes of a shared model until its first training step is over.

    ``batch_axes`` are those along which ranks must be given the same batch; none if the caller of the model
    compares it.
    """

    def __init__(self, mesh: Mesh, batch_axes: Sequence[str], *, compare_gradients: bool = True) -> None:
        self.mesh, self.batch_axes = mesh, tuple(batch_axes)
        self.gradients = SameGradients(mesh)
        self.gradients.done |= not compare_gradients
        self._batch_seen = not self.batch_axes

    def before(self, model: nn.Module, batch: Any) -> None:
        """Compare the ``batch`` of the first forward pass in training."""
        if self._batch_seen or not _trains(model):
            return
        self._batch_seen = True
        check_same_batch(batch, self.batch_axes, self.mesh, type(model).__name__)

    def after(self, model: nn.Module, outputs: Any) -> None:
        """Compare the gradients that the backward pass of ``outputs`` will give."""
        if not self.gradients.done and _trains(model):
            self.gradients.watch(model, outputs)

    @property
    def done(self) -> bool:
        return self._batch_seen and self.gradients.done


def _trains(model: nn.Module) -> bool:
    first = next(model.parameters(), None)
    played = first is not None and first.is_meta  # without values, and without the other ranks
    return model.training and torch.is_grad_enabled() and not torch.compiler.is_compiling() and not played


class _GradientHook:
    """The hook of one parameter; an object, since a model that is pickled or copied carries it along."""

    def __init__(self, watch: SameGradients, index: int) -> None:
        self.watch, self.index = watch, index

    def __call__(self, grad: Tensor | None) -> None:
        if grad is not None:  # autograd came by without one
            self.watch.see(self.index, grad)


def project(grad: Tensor) -> tuple[float, float, float]:
    """The norm of ``grad``, and its products with two fixed tensors of rank one.

    Two gradients with the same three numbers are the same, but for a chance of nearly nothing.
    """
    values = torch.view_as_real(grad) if grad.is_complex() else grad
    values = values.to(torch.float64 if values.dtype is torch.float64 else torch.float32)
    found = [values, values]
    for dim in range(values.ndim - 1, -1, -1):
        n = values.size(dim)
        generator = torch.Generator().manual_seed(n + dim)
        for i in range(2):
            weights = torch.randn(n, generator=generator).to(values) / math.sqrt(max(n, 1))
            found[i] = found[i] @ weights
    # the products are of the size of the norm if scaled by the root of the number of elements
    root = math.sqrt(max(values.numel(), 1))
    one, two = (float(value) * root for value in found)
    return float(torch.linalg.vector_norm(values)), one, two
