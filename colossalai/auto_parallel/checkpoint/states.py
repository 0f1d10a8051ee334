"""Builds the optimizer of a model again on the meta device, to count its states and what its step needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from colossalai.interface.foreign_parameters import strangers
from colossalai.interface.optimizer import OptimizerWrapper
from colossalai.utils.meta import step_as_on_gpu


class StatesError(ValueError):
    """An optimizer whose states or step cannot be counted."""


def look_at_optimizer(optimizer: Optimizer | None, model: nn.Module, criterion: Any) -> list[str]:
    """Refuse an optimizer that trains another model; gives a note about one that trains a part of ``model``,
    which is right.
    """
    # what a booster has made of an optimizer may hold pieces of parameters; that is refused when it is built
    if optimizer is None or isinstance(optimizer, OptimizerWrapper):
        return []
    found = strangers(optimizer, model, criterion)
    if (problem := found.problem()) is not None:
        raise ValueError(f"auto_checkpoint: {problem}")
    if not found.left_out:
        return []
    return [
        f"{len(found.left_out)} parameters with gradients, such as {found.left_out[0]!r}, are not in the"
        " optimizer: they have no states, and their gradients are expected to be gone when a step begins"
        " (model.zero_grad()); freeze them if they are not trained"
    ]


def builder_of(optimizer: Optimizer, model: nn.Module) -> Callable[[], Optimizer]:
    """A function that builds ``optimizer`` with its states for the parameters that ``model`` has when it is
    called; they lie in the groups in which those that it has now are, with the options of these.
    """
    names = {id(p): name for name, p in model.named_parameters()}

    def build() -> Optimizer:
        own = dict(model.named_parameters())

        def meant(p: Tensor) -> Tensor:
            # parameters of a criterion have states, too
            return own[names[id(p)]] if id(p) in names else nn.Parameter(p.detach().to("meta"))

        groups = [
            {**_on_meta(group), "params": [meant(p) for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        try:
            made = type(optimizer)(groups, **_options(optimizer))
            step_as_on_gpu(made)
            for p in [p for group in made.param_groups for p in group["params"]]:
                p.grad = _gradient(p, sparse=isinstance(made, SparseAdam)) if p.requires_grad else None
            made.step()
        except Exception as error:
            raise StatesError(
                f"auto_checkpoint cannot build another {type(optimizer).__name__} to count its states"
                f" ({error}); leave optimizer out, and give the bytes of its states as reserved"
            ) from error
        made.zero_grad(set_to_none=True)
        for theirs, group in zip(optimizer.param_groups, made.param_groups, strict=True):
            if theirs.get("fused") or theirs.get("capturable"):  # these count steps on the device
                for p in group["params"]:
                    made.state[p]["steps on the device"] = torch.empty((), device="meta")
        return made

    return build


def _gradient(p: Tensor, *, sparse: bool) -> Tensor:
    return torch.zeros_like(p, layout=torch.sparse_coo) if sparse else torch.empty_like(p)


def _options(optimizer: Optimizer) -> dict[str, Any]:
    """The arguments of the class; some have more defaults than these: torch's AdamW says of itself that its
    decay is decoupled.
    """
    taken = inspect.signature(type(optimizer)).parameters
    takes_any = any(option.kind is option.VAR_KEYWORD for option in taken.values())
    defaults = _on_meta(optimizer.defaults)
    return {name: value for name, value in defaults.items() if takes_any or name in taken}


def _on_meta(options: dict[str, Any]) -> dict[str, Any]:
    """Options with which a step can be played: a rate that is a tensor has a value there, and what one
    kernel does without memory of its own (``fused``) is done parameter by parameter.
    """
    found = {name: _number(value) for name, value in options.items() if name != "params"}
    if found.get("fused"):
        found |= {"fused": None, "foreach": False}
    if found.get("capturable"):
        found["capturable"] = False
    return found


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta else value


def step_of(optimizer: Optimizer) -> None:
    """Play the step of an optimizer that was built here, with the gradients that are there."""
    try:
        optimizer.step()
    except Exception as error:
        raise StatesError(
            f"auto_checkpoint: {type(optimizer).__name__} cannot make a step with these gradients ({error});"
            " choose another optimizer, or leave it out"
        ) from error
