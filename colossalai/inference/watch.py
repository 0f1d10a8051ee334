"""Whether a model computes what it computed before: its weights, modules, hooks and adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_FEW = 16  # numbers of a weight that are compared
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Watch:
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
        self._versions: list[int] = []
        self._sampled: Tensor | None = None
        self._probes: list[Tensor] = []
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
        places = [t.data_ptr() for t in (*params, *buffers)]
        form = places, self._code, [_switched(module) for module in self._adapted]
        versions = [0 if t.is_inference() else t._version for t in params]
        moved = form != self._form
        changed = moved or versions != self._versions
        self._form, self._versions = form, versions
        if moved:
            self.moves += 1
            self._probes = [_few(t) for t in params if t.is_contiguous() and t.numel()]
        if idle:
            sample = self._sample(params)
            same = self._sampled is not None and torch.equal(sample, self._sampled)
            changed = changed or self._model.training or not same
            self._sampled = sample
        return changed

    def _walk(self) -> None:
        """Find the modules of now."""
        self.modules = modules = list(self._model.modules())
        self._params = [m._parameters for m in modules if m._parameters]
        self._buffers = [m._buffers for m in modules if m._buffers]
        self._adapted = [m for m in modules if hasattr(type(m), "_disable_adapters")]
        self._code = [
            (id(m), *m._forward_pre_hooks, *m._forward_hooks, id(m.__dict__.get("forward"))) for m in modules
        ]

    def _sample(self, params: list[Tensor]) -> Tensor:
        rest = [_few(t) for t in params if not t.is_contiguous()]
        few = [t if t.dtype in _FLOATS else t.float() for t in (*self._probes, *rest)]
        return torch.cat(few) if few else torch.zeros(0)


def _few(tensor: Tensor) -> Tensor:
    """A few numbers of ``tensor``, in its memory if they lie one behind the other."""
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-len(flat) // _FEW) or 1]


def _switched(module: Any) -> tuple[Any, ...]:
    """Which adapters of ``module`` are in use, and how much."""
    scaling = getattr(module, "scaling", None)
    scales = tuple(scaling.items()) if isinstance(scaling, dict) else scaling
    return module._disable_adapters, str(module._active_adapter), scales
