"""Weights that a plan keeps in pieces (FSDP) or chunks (Gemini), whole for the time of a call.

A twin of the model has its code, buffers and everything else of it, without the hooks by which a plan brings
weights layer by layer: replicas write for other numbers of steps, and could not wait for each other in each.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from colossalai.interface import user_module
from colossalai.zero.gemini.ddp import ZeroDDP

_OURS = ("colossalai.", "torch.")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class GatheredModel:
    """A ``model`` whose weights lie in pieces on the ranks that have other data."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._params: dict[int, nn.Parameter] = {}
        self.module = self._twin(user_module(model))
        self.is_whole = False

    @classmethod
    def of(cls, model: nn.Module) -> GatheredModel | None:
        """A twin of a model in pieces; None for one whose weights are whole."""
        in_pieces = any(isinstance(param, DTensor) for param in user_module(model).parameters())
        return cls(model) if in_pieces or isinstance(model, ZeroDDP) else None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the twin has the weights of now; all ranks of the job call this together."""
        if self.is_whole:
            yield
            return
        try:
            for name, value in self._values():
                self._params[id(self._named[name])].data = value
            self.is_whole = True
            yield
        finally:
            self.is_whole = False
            for param in self._params.values():
                param.data = param.data.new_empty(0)

    @property
    def _named(self) -> dict[str, nn.Parameter]:
        return dict(user_module(self._model).named_parameters(remove_duplicate=False))

    @torch.no_grad()
    def _values(self) -> Iterator[tuple[str, Tensor]]:
        model: Any = self._model
        if isinstance(model, ZeroDDP):
            model.settle()
            device = model.chunk_manager.device
            held = set()
            for name, value in model.whole_values():
                assert value is not None, "every rank gets them"
                held.add(name)
                yield name, value.to(device)
            rest = {name: p for name, p in self._named.items() if not model.chunk_manager.holds(p)}
            yield from ((name, param.detach()) for name, param in rest.items() if name not in held)
            return
        if hasattr(model, "reshard"):
            model.reshard()
        for name, param in user_module(model).named_parameters():
            yield name, param.full_tensor() if isinstance(param, DTensor) else param.detach()

    def _twin(self, module: nn.Module) -> nn.Module:
        kind = type(module)
        while issubclass(kind, FSDPModule):
            kind = kind.__bases__[1]
        twin: nn.Module = kind.__new__(kind)
        twin.__dict__.update(module.__dict__)
        for name in _HOOKS:
            kept = [(key, hook) for key, hook in getattr(module, name).items() if not _is_ours(hook)]
            twin.__dict__[name] = OrderedDict(kept)
        twin.__dict__["_parameters"] = {
            name: None if param is None else self._param(param) for name, param in module._parameters.items()
        }
        twin.__dict__["_buffers"] = copy.copy(module._buffers)
        twin.__dict__["_modules"] = {
            name: None if child is None else self._twins(child) for name, child in module._modules.items()
        }
        return twin

    def _twins(self, child: nn.Module) -> nn.Module:
        """The twin of a module, the same for one that stands in several places."""
        known: dict[int, nn.Module] = self.__dict__.setdefault("_known", {})
        if id(child) not in known:
            known[id(child)] = self._twin(child)
        return known[id(child)]

    def _param(self, param: nn.Parameter) -> nn.Parameter:
        """A place for the values of ``param``."""
        if id(param) not in self._params:
            chunks: Any = getattr(self._model, "chunk_manager", None)
            device = param.device if chunks is None else chunks.device
            made = nn.Parameter(torch.empty(0, dtype=param.dtype, device=device), requires_grad=False)
            made.__dict__.update(getattr(param, "__dict__", {}))
            self._params[id(param)] = made
        return self._params[id(param)]


def _is_ours(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # of a partial
    return str(getattr(function, "__module__", "")).startswith(_OURS)
