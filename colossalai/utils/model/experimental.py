"""``LazyInitContext``: a model that is described first and gets memory later, with the values that it would
have had.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from colossalai.mesh.deferred import Deferred

RECORDING = "_colossalai_recording"  # of a parameter or buffer without memory: what will fill it


class LazyInitContext:
    """Models built inside take no memory for their tensors until ``materialize`` is called.

        with LazyInitContext():
            model = Net()
        LazyInitContext.materialize(model)

    Values, ties and the state of the random generators are those of the same code without the context.

    Args:
        large: smaller tensors, by the number of elements, are made at once.
    """

    def __init__(self, large: int = 1) -> None:
        self._recording = Deferred(large)
        self._hooks: list[Any] = []

    def __enter__(self) -> LazyInitContext:
        self._hooks = [
            register_module_parameter_registration_hook(self._note),
            register_module_buffer_registration_hook(self._note),
        ]
        self._recording.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._recording.__exit__(*details)
        for hook in self._hooks:
            hook.remove()

    def _note(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if tensor is not None and self._recording.holds(tensor):
            setattr(tensor, RECORDING, self._recording)

    @staticmethod
    def materialize(module: nn.Module, verbose: bool = False) -> nn.Module:
        """Give the tensors of ``module`` memory and values, in place; one that was built otherwise stays as
        it is.

        Parameters become other objects: build the optimizer afterwards.  ``verbose`` prints how many.
        """
        lazy = [t for t in (*module.parameters(), *module.buffers()) if isinstance(t, LazyTensor)]
        for recording in dict.fromkeys(getattr(t, RECORDING) for t in lazy):
            recording.materialize(module)
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.__dict__.pop(RECORDING, None)
        missing = [name for name, p in module.named_parameters() if p.device.type == "meta"]
        if missing:
            raise RuntimeError(
                f"{len(missing)} parameters have no memory, and no LazyInitContext knows their values:"
                f" {', '.join(missing[:6])}; build them inside the context, not on the meta device"
            )
        if verbose:
            print(f"{len(lazy)} tensors, {sum(t.numel() for t in lazy)} elements are materialized")
        return module


class _IsLazy(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Tensor) and hasattr(instance, RECORDING)


class LazyTensor(metaclass=_IsLazy):
    """The parameters and buffers of a model that has no memory yet: ``isinstance(p, LazyTensor)``.

    They are tensors of torch on the meta device, and not of this class.
    """


__all__ = ["LazyInitContext", "LazyTensor"]
