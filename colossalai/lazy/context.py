"""``LazyInitContext``: a model is built without memory, and every plan gives each rank its own pieces."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from colossalai.lazy.stored_weights import reading_later
from colossalai.mesh.weights.deferred import LARGE, Deferred, materialize
from colossalai.mesh.weights.unfilled import Unfilled


class LazyInitContext:
    """Inside, models are built without memory; ``boost`` (or ``initialize``) gives them theirs.

    The weights are those that the same lines give without it, bit for bit, from the same seed; so are
    buffers, what a script does to the model before it is boosted, and weights that ``from_pretrained`` reads
    from files.  Each rank computes what its plan needs of the model, one weight after the other: never is
    there memory for more than its own pieces and the tensors that one weight is made from.

    Args:
        default_device: where the tensors will lie, by default torch's default device.
        large: smaller tensors (in elements) get their memory at once.
    """

    def __init__(self, default_device: torch.device | str | None = None, *, large: int = LARGE) -> None:
        if isinstance(large, bool) or not isinstance(large, int) or large < 0:
            raise ValueError(f"LazyInitContext(large=...) is a number of elements, got {large!r}")
        self._device = None if default_device is None else torch.device(default_device)
        if self._device is not None and self._device.type == "meta":
            raise ValueError(
                "LazyInitContext(default_device='meta'): name the device where the weights will lie, or leave"
                " it out; until then they have no memory in any case"
            )
        self._recording = Deferred(large)
        self._open: ExitStack | None = None

    def __enter__(self) -> LazyInitContext:
        if self._open is not None:
            raise RuntimeError("this LazyInitContext is open already; use a new one for a block inside it")
        with ExitStack() as stack:
            stack.enter_context(self._recording)
            stack.enter_context(reading_later(self._recording))
            if self._device is not None:
                stack.enter_context(self._device)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *details: Any) -> None:
        assert self._open is not None
        stack, self._open = self._open, None
        stack.__exit__(*details)

    @staticmethod
    def materialize(module: nn.Module, verbose: bool = False) -> nn.Module:
        """Give all of ``module`` memory and values in this process, in place, for use without ``boost``.

        ``verbose`` prints how many tensors got theirs.
        """
        lazy = [t for t in (*module.parameters(), *module.buffers()) if isinstance(t, Unfilled)]
        materialize(module)
        missing = [name for name, p in module.named_parameters() if p.is_meta]
        if missing:
            raise RuntimeError(
                f"{len(missing)} parameters have no memory, and no LazyInitContext knows their values:"
                f" {', '.join(missing[:6])}; build them inside the context, not on the meta device"
            )
        if verbose:
            print(f"{len(lazy)} tensors, {sum(t.numel() for t in lazy)} elements are materialized")
        return module
