"""Whether a model computes what it computed before: its weights, modules, hooks and adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_FEW = 16  # numbers of a weight that are compared
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class ModelWatch:
    """What ``model`` computed with when it was looked at last.

    Optimizers count their writes in the versions of weights; what is written to ``param.data`` is found by
    comparing a few numbers of each weight.  Adapters (of PEFT) are switched without any write.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.moves = 0
        """How often tensors lay elsewhere, or other code was to run: what was recorded before is then of no
        use.
        """
        self._form: Any = None
        self._buffers_at: list[int] = []
        self._versions: list[int] = []
        self._sampled: Tensor | None = None
        self._walk()
        self.look(idle=True)

    def look(self, *, idle: bool) -> bool:
        """Whether the model may compute something else than at the last look.

        With ``idle``, when there is time, modules, hooks and numbers of weights are compared too; then a
        model in training counts as changed.
        """
        if idle:
            self._walk()
        params, buffers = (
            [t for held in kind for t in held.values() if t is not None]
            for kind in (self._params, self._buffers)
        )
        form = [t.data_ptr() for t in params], self._code, [_switched(m) for m in self._adapted]
        buffers_at = [t.data_ptr() for t in buffers]  # a forward may make them anew, so they say nothing more
        versions = [0 if t.is_inference() else t._version for t in params]
        if (form, buffers_at) != (self._form, self._buffers_at):
            self.moves += 1
        changed = (form, versions) != (self._form, self._versions)
        self._form, self._buffers_at, self._versions = form, buffers_at, versions
        if idle:
            few = [_few(t) for t in params]
            sample = torch.cat(few) if few else torch.zeros(0)
            same = self._sampled is not None and torch.equal(sample, self._sampled)
            changed = changed or self._model.training or not same
            self._sampled = sample
        return changed

    def _walk(self) -> None:
        """Find the modules of now."""
        self.modules = modules = list(self._model.modules())
        self._params = [m._parameters for m in modules if m._parameters]
        self._buffers = [m._buffers for m in modules if m._buffers]
        self._adapted = [m for m in modules if hasattr(m, "_disable_adapters")]
        self._code = [
            (id(m), *m._forward_pre_hooks, *m._forward_hooks, id(m.__dict__.get("forward"))) for m in modules
        ]


def _few(tensor: Tensor) -> Tensor:
    """A few numbers of ``tensor``."""
    flat = tensor.detach().reshape(-1)
    few = flat[:: -(-len(flat) // _FEW) or 1]
    return few if few.dtype in _FLOATS else few.float()


def _switched(module: Any) -> tuple[Any, ...]:
    """Which adapters of ``module`` are in use, and how much."""
    scaling = getattr(module, "scaling", None)
    scales = tuple(scaling.items()) if isinstance(scaling, dict) else scaling
    return module._disable_adapters, str(module._active_adapter), scales
