"""``ModelWrapper``: a module around the user's module that a training script cannot tell from it.

A feature that changes how a model is *called* (autocast, gradient synchronization) puts the model inside such a
wrapper.  Names of parameters and buffers, ``state_dict`` and unknown attributes are those of the user's module, so
logging, checkpoints and ``model.config`` do not change when a plugin does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from colossalai.interface.holding import Holding


def below_compile(model: nn.Module) -> nn.Module:
    """The module that ``torch.compile(module)`` was given, or ``model`` itself."""
    while "_orig_mod" in model._modules:  # its class is expensive to import
        model = model._modules["_orig_mod"]  # type: ignore[assignment]
    return model


def user_module(model: nn.Module) -> nn.Module:
    """The user's module, below every wrapper of ours and of ``torch.compile``."""
    model = below_compile(model)
    return model.unwrap() if isinstance(model, ModelWrapper) else model


class ModelWrapper(nn.Module):
    """A module around ``module``; a subclass changes ``forward``, and ``unwrap`` if it puts more layers between."""

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"{type(self).__name__} wraps a torch.nn.Module, got {type(module).__name__}: {module!r}"
            )
        super().__init__()
        self.module = module

    def unwrap(self) -> nn.Module:
        """The user's module, below every wrapper."""
        return user_module(self.module)

    def holdings(self) -> list[Holding]:
        """For each parameter whose elements a plan keeps elsewhere: where they are.  A checkpoint reads and writes them there."""
        return self.module.holdings() if isinstance(self.module, ModelWrapper) else []

    def weights_loaded(self) -> None:
        """A checkpoint has written other values to where ``holdings`` said they are."""
        if isinstance(self.module, ModelWrapper):
            self.module.weights_loaded()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    # Asked without recursion, torch's own tools want what this very module holds, which is nothing.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        if not recurse:
            return super().named_parameters(prefix, recurse, remove_duplicate)
        return self.unwrap().named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        if not recurse:
            return super().named_buffers(prefix, recurse, remove_duplicate)
        return self.unwrap().named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        # With a destination we are called as the child of a larger module.  Its load_state_dict will walk through
        # our children by their own names, so its state_dict must do the same.
        if args or kwargs.get("destination") is not None:
            return super().state_dict(*args, **kwargs)
        return self.unwrap().state_dict(**kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return self.unwrap().load_state_dict(state_dict, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # before __init__ (copy, pickle) there is no module to ask
            if "module" not in self.__dict__.get("_modules", {}):
                raise
        return getattr(self.unwrap(), name)
