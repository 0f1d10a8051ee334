"""Assertions about tensors and state dicts that say what differs and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def assert_equal(a: Tensor, b: Tensor) -> None:
    """Same shape, dtype and values, on any devices; NaN equals NaN."""
    _check_tensors(a, b, "the tensors differ")


def assert_not_equal(a: Tensor, b: Tensor) -> None:
    """The tensors differ in their shape or in a value."""
    if a.shape == b.shape and torch.equal(a, b.to(a.device)):
        raise AssertionError(
            f"expected two tensors of shape {tuple(a.shape)} that differ, but they are equal"
        )


def assert_close(a: Tensor, b: Tensor, rtol: float | None = None, atol: float | None = None) -> None:
    """Equal up to rounding; without ``rtol`` and ``atol``, up to what torch expects of the dtype."""
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol, check_device=False)


def assert_close_loose(a: Tensor, b: Tensor, rtol: float = 1e-3, atol: float = 1e-3) -> None:
    """For results that different kernels or low precision reached on different ways."""
    assert_close(a, b, rtol, atol)


def assert_equal_in_group(tensor: Tensor, process_group: dist.ProcessGroup | None = None) -> None:
    """Every rank of the group holds the same tensor; all of them raise when one does not.

    All ranks of the group must call this.
    """
    ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    kinds: list[Any] = [None] * len(ranks)
    # Shapes first: a collective over tensors of different sizes would hang or return garbage.
    dist.all_gather_object(kinds, (tuple(tensor.shape), tensor.dtype), group=process_group)
    for rank, kind in zip(ranks, kinds, strict=True):
        if kind != kinds[0]:
            raise AssertionError(
                f"rank {rank} holds a tensor of shape {kind[0]} and {kind[1]}, "
                f"but rank {ranks[0]} one of shape {kinds[0][0]} and {kinds[0][1]}"
            )
    tensor = tensor.detach().contiguous()
    pieces = [torch.empty_like(tensor) for _ in ranks]
    dist.all_gather(pieces, tensor, group=process_group)
    for rank, piece in zip(ranks, pieces, strict=True):
        _check_tensors(piece, pieces[0], f"rank {rank} differs from rank {ranks[0]}")


def check_state_dict_equal(d1: Mapping[Any, Any], d2: Mapping[Any, Any], ignore_device: bool = True) -> None:
    """Two state dicts, of a model or of an optimizer, hold equal values under equal keys, in any order."""
    _check_equal(d1, d2, "state_dict", ignore_device)


def _check_equal(a: Any, b: Any, path: str, ignore_device: bool) -> None:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        _check_tensors(a, b, path, ignore_device)
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        if a.keys() != b.keys():
            left, right = sorted(map(repr, a.keys() - b.keys())), sorted(map(repr, b.keys() - a.keys()))
            raise AssertionError(
                f"{path}: only the first has the keys {', '.join(left) or 'none'}, "
                f"only the second {', '.join(right) or 'none'}"
            )
        for key in a:
            _check_equal(a[key], b[key], f"{path}[{key!r}]", ignore_device)
    elif _is_list(a) and _is_list(b):
        if len(a) != len(b):
            raise AssertionError(f"{path}: the first has {len(a)} items, the second {len(b)}")
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            _check_equal(x, y, f"{path}[{i}]", ignore_device)
    elif type(a) is not type(b) or a != b:
        raise AssertionError(f"{path}: {a!r} is not {b!r}")


def _check_tensors(a: Tensor, b: Tensor, what: str, ignore_device: bool = True) -> None:
    torch.testing.assert_close(
        a,
        b,
        rtol=0,
        atol=0,
        equal_nan=True,
        check_device=not ignore_device,
        msg=lambda text: f"{what}: {text}",
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
