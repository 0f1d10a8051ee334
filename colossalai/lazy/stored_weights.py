"""``from_pretrained`` inside a ``LazyInitContext``: weights are read from their files when a plan asks for
them.

transformers decides as always which tensor of which file becomes which weight, how it is converted, and what
is drawn because no file has it.  Only what it reads from is another: a file whose tensors have no memory yet,
so that its conversions are recorded like the work of any constructor, and repeated for the weights that a
rank needs.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from colossalai.mesh.weights.deferred import Deferred, paused

_ONE_THREAD = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}  # a recording is of one thread


@contextmanager
def reading_later(recording: Deferred) -> Iterator[None]:
    """Inside, transformers reads weights into tensors of ``recording``."""
    if "transformers" not in sys.modules:  # who does not use it should not wait for it
        yield
        return
    from transformers import PreTrainedModel, modeling_utils

    opened: Any = modeling_utils.safe_open  # type: ignore[attr-defined]
    contexts = PreTrainedModel.get_init_context.__func__  # type: ignore[attr-defined]

    def init_context(cls: Any, *args: Any, **kwargs: Any) -> list[Any]:
        # these weights are replaced by what is read: nothing of them is drawn, with this context or without
        return [*contexts(cls, *args, **kwargs), paused()]

    with (
        patch.object(modeling_utils, "safe_open", partial(_File, recording, opened)),
        patch.object(PreTrainedModel, "get_init_context", classmethod(init_context)),
        patch.dict(os.environ, _ONE_THREAD),
    ):
        yield


class _File:
    """A safetensors file whose tensors are read later."""

    def __init__(self, recording: Deferred, opened: Callable[..., Any], path: Any, *args: Any, **kwargs: Any):
        self._recording, self._path = recording, path
        self._open = partial(opened, path, *args, **kwargs)
        self._content = self._open()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *details: Any) -> None:
        self._content.__exit__(*details)

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._recording, self._open, name, self._content.get_slice(name))

    def get_tensor(self, name: str) -> Tensor:
        return self.get_slice(name)[...]


class _Slice:
    """A tensor of a file; what is taken of it is read later, unless it is small."""

    def __init__(self, recording: Deferred, opened: Callable[[], Any], name: str, stored: Any) -> None:
        self._recording, self._open, self._name, self._stored = recording, opened, name, stored

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored, name)

    def __getitem__(self, index: Any) -> Tensor:
        shape = self._stored.get_shape()
        if not shape or math.prod(shape) < self._recording.large:
            return self._stored[index]
        with paused():
            kind = self._stored[:0].dtype
            form = torch.empty(shape, dtype=kind, device="meta")[index]
        return self._recording.make(form.shape, kind, partial(_read, self._open, self._name, index))


def _read(opened: Callable[[], Any], name: str, index: Any) -> Tensor:
    with opened() as content:
        value: Tensor = content.get_slice(name)[index]
        return torch.empty(value.shape, dtype=value.dtype).copy_(value)  # not the memory of the file
