"""``ModelWrapper``: a module around the user's module that a training script cannot tell from it.

A feature that changes how a model is *called* (autocast, gradient synchronization) puts the model inside such
a wrapper.  Names of parameters and buffers, ``state_dict`` and unknown attributes are those of the user's
module, so logging, checkpoints and ``model.config`` do not change when a plugin does.  What a script sets
after ``boost`` is set there as well: an attribute of the wrapper alone is one that no forward pass reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from colossalai.interface.holding import Holding, RestingPlace
from colossalai.mesh import placement


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
    """A module around ``module``; a subclass changes ``forward``, and ``unwrap`` if it puts more layers
    between.
    """

    module: nn.Module
    keeps_parameters: ClassVar[bool] = False  # those of now, so that none can take the place of another
    # Methods of the user's module that must see the whole model, by name; ``colossalai.checkpoint_io`` has
    # them.
    methods: ClassVar[dict[str, Callable[..., Any]]] = {}
    _handed_over = False

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

    def hand_over(self) -> None:
        """The script gets this model: from now on, an attribute that is set is one of the user's module."""
        self._handed_over = True

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._handed_over:
            super().__setattr__(name, value)
        elif name == "forward":
            raise AttributeError(
                "model.forward = ... after boost would take the place of all that the plan does around the"
                " forward pass; change the forward of your module before boost"
            )
        elif name in self.__dict__ or name in self._modules or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            user = self.unwrap()
            self._check_replacement(name, getattr(user, name, None), value)
            setattr(user, name, value)

    def _check_replacement(self, name: str, before: Any, after: Any) -> None:
        parts = [part for part in (before, after) if isinstance(part, nn.Module | nn.Parameter)]
        if parts and before is not after and self.keeps_parameters:
            raise RuntimeError(
                f"model.{name} = ... after boost: {type(self).__name__} keeps the parameters that the model"
                " had at boost, and would neither average nor update those of another"
                f" {type(parts[-1]).__name__}; change the model before boost"
            )

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        cut = next((name for name, p in self.named_parameters() if placement(p).sharded), None)
        if cut is not None:
            raise RuntimeError(
                f"model.apply(...) on a model that tensor parallelism has cut: {cut!r} is a piece, in a layer"
                " of another class than yours (isinstance does not find it), and values drawn for pieces are"
                " not those of the whole; apply it before parallelize"
            )
        return super().apply(fn)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # what half(), to(), cuda() and the like call
        if self._handed_over and self.keeps_parameters:
            for dtype, device in {(p.dtype, p.device) for p in self.parameters()}:
                made = fn(torch.empty(0, dtype=dtype, device=device))
                if (made.dtype, made.device) != (dtype, device):
                    raise RuntimeError(
                        f"the model is to be changed from {dtype} on {device} to {made.dtype} on"
                        f" {made.device} after boost, but {type(self).__name__} keeps the parameters as they"
                        " were; cast and move the model before boost"
                    )
            return self
        return super()._apply(fn, recurse)

    def holdings(self) -> list[Holding]:
        """For each parameter whose elements a plan keeps elsewhere: where they are.

        A checkpoint reads and writes them there.
        """
        return self.module.holdings() if isinstance(self.module, ModelWrapper) else []

    def resting_places(self) -> dict[int, RestingPlace]:
        """By the id of a parameter, what only the plan knows of its place; without communication."""
        return self.module.resting_places() if isinstance(self.module, ModelWrapper) else {}

    def weights_loaded(self, elsewhere: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """A checkpoint has written other values to where ``holdings`` said they are.

        ``elsewhere`` are parameters whose holding was not in memory, and values for the elements of it.
        """
        if isinstance(self.module, ModelWrapper):
            self.module.weights_loaded(elsewhere)

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
        # With a destination we are called as the child of a larger module.  Its load_state_dict will walk
        # through our children by their own names, so its state_dict must do the same.
        if args or kwargs.get("destination") is not None:
            return super().state_dict(*args, **kwargs)
        return self.unwrap().state_dict(**kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("assign") or any(args[1:2]):
            raise ValueError(
                "load_state_dict(assign=True) would put other parameters into the"
                f" {type(self.unwrap()).__name__}, and its optimizer would go on with those from before;"
                " leave assign out, or call it before boost and before the optimizer is built"
            )
        return self.unwrap().load_state_dict(state_dict, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # before __init__ (copy, pickle) there is no module to ask
            if "module" not in self.__dict__.get("_modules", {}):
                raise
        found = getattr(self.unwrap(), name)
        return partial(self.methods[name], self) if name in self.methods else found
