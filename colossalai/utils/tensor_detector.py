"""``TensorDetector``: which tensors came and which went since the last look, to find out where memory is
held.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from colossalai.mesh.parameter import own_grad

MB = 1024 * 1024


class _TensorRecord(NamedTuple):
    """A record of a tensor; not the tensor itself, which would stay alive."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool
    bytes: int
    storage: tuple[int, int]  # where it lies and how large it is: views share it

    def __str__(self) -> str:
        grad = "  grad" if self.requires_grad else ""
        shape = "x".join(map(str, self.shape)) or "scalar"
        kind = f"{shape:<20} {self.dtype!s:<16} {self.device:<8}"
        return f"{self.name:<32} {kind} {self.bytes / MB:10.3f} MB{grad}"


class TensorDetector:
    """Call ``detect()`` at the places of interest: each call reports the changes since the one before.

    ``show_info`` prints the report; ``log`` is a file to which it is appended as well; ``include_cpu`` adds
    tensors on the CPU (always so without CUDA); tensors of ``module`` appear under their names.
    """

    def __init__(
        self,
        show_info: bool = True,
        log: str | Path | None = None,
        include_cpu: bool = False,
        module: nn.Module | None = None,
    ) -> None:
        if not show_info and log is None:
            raise ValueError("TensorDetector would be silent: use show_info=True or name a log file")
        self._show_info = show_info
        self._log = log
        self._include_cpu = include_cpu or not torch.cuda.is_available()
        self._module = module
        self._known: dict[int, _TensorRecord] = {}

    def detect(self) -> None:
        """Report the tensors that are new and those that are gone."""
        now = self._look()
        lines = [f"+ {seen}" for key, seen in now.items() if self._known.get(key) != seen]
        lines += [f"- {seen}" for key, seen in self._known.items() if now.get(key) != seen]
        total = sum(size for _, size in {seen.storage for seen in now.values()})
        lines.append(f"= {len(now)} tensors hold {total / MB:.3f} MB")
        self._known = now
        report = "\n".join(lines)
        if self._show_info:
            print(report, flush=True)
        if self._log is not None:
            with open(self._log, "a", encoding="utf-8") as file:
                file.write(report + "\n")

    def close(self) -> None:
        """Forget what was seen."""
        self._known = {}

    def _look(self) -> dict[int, _TensorRecord]:
        gc.collect()
        names = self._names()
        found: dict[int, _TensorRecord] = {}
        # type(), because isinstance() asks strange objects for their __class__
        for thing in [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]:
            for tensor, suffix in ((thing, ""), (own_grad(thing) if thing.is_leaf else None, ".grad")):
                if tensor is not None and self._counts(tensor):
                    name = names.get(id(thing), type(thing).__name__) + suffix
                    found.setdefault(id(tensor), _describe(tensor, name))
        return found

    def _counts(self, tensor: torch.Tensor) -> bool:
        # what a wrapper holds is found by itself
        if tensor.device.type == "meta" or is_traceable_wrapper_subclass(tensor) or not _has_memory(tensor):
            return False
        return self._include_cpu or tensor.device.type != "cpu"

    def _names(self) -> dict[int, str]:
        if self._module is None:
            return {}
        tensors = [*self._module.named_parameters(), *self._module.named_buffers()]
        return {id(tensor): name for name, tensor in tensors}


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether there is storage behind ``tensor``; torch.compile leaves fake and functional tensors, which
    have none.
    """
    if isinstance(tensor, FakeTensor):
        return False
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


def _describe(tensor: torch.Tensor, name: str) -> _TensorRecord:
    storage = tensor.untyped_storage()
    return _TensorRecord(
        name=name,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        device=str(tensor.device),
        requires_grad=tensor.requires_grad,
        bytes=tensor.numel() * tensor.element_size(),
        storage=(storage.data_ptr(), storage.nbytes()),
    )
