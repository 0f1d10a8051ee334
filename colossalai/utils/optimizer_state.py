"""Checks that a saved optimizer state belongs to the optimizer that loads it.

torch only counts the parameters of each group.  States of another model then change the training without a
word, or let a fused kernel write past the end of a tensor, and options that the optimizer does not know are
dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

# States with one number for every element of the parameter, in the optimizers of torch and in ours.  Under
# other names there may be anything, such as the rows and columns of Adafactor.
ELEMENTWISE = frozenset(
    (
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
        "ax",
        "prev",
        "step_size",
        "master",
    )
)
# Options by which kinds of optimizers differ: Adam has betas, SGD a momentum, RMSprop a momentum and an
# alpha.
KIND = ("betas", "momentum", "alpha", "rho", "lambd", "etas", "lr_decay", "beta2_decay")
# The attribute of a parameter that is a slice of another: the shape of that, which the states of a serial run
# have.
SERIAL_SHAPE = "serial_shape"
NAMED = 6  # so many misfits are listed, the others counted


def check_state(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Refuse, before anything is changed, a state dict of another kind of optimizer, or of other
    parameters.
    """
    if "param_groups" not in state_dict:
        raise ValueError(
            "this is not the state of an optimizer: it holds"
            f" {_some([n for n in state_dict if n != 'state']) or 'nothing'}, and no param_groups"
        )
    groups: Sequence[Mapping[str, Any]] = state_dict["param_groups"]
    sizes = [[len(group["params"]) for group in which] for which in (groups, optimizer.param_groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the saved state is of other parameters: its groups hold {sizes[0]} of them, those of"
            f" {_name(optimizer)} {sizes[1]}"
        )
    for own, saved in zip(optimizer.param_groups, groups, strict=True):
        has, needs = ([name for name in KIND if name in group] for group in (saved, own))
        if has != needs:
            raise ValueError(
                f"the saved state is of another kind of optimizer: its options are {_some(list(saved))}; but"
                f" {_name(optimizer)} has {', '.join(needs) or 'none of these'}"
            )
    faults = list(_misfits(optimizer, groups, state_dict.get("state", {})))
    if faults:
        raise ValueError(f"the saved state is of other parameters: {_some(faults, '; ')}")


def _misfits(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Any]
) -> Iterator[str]:
    for own, saved in zip(optimizer.param_groups, groups, strict=True):
        for number, parameter in zip(saved["params"], own["params"], strict=True):
            present = optimizer.state.get(parameter, {})
            for name, value in states.get(number, {}).items():
                whole = getattr(parameter, SERIAL_SHAPE, parameter.shape)
                if not isinstance(value, Tensor) or value.shape in (parameter.shape, whole):
                    continue
                if name in ELEMENTWISE or _is_like(present.get(name), parameter):
                    yield (
                        f"{name} of parameter {number} has shape {tuple(value.shape)}, the parameter"
                        f" {tuple(whole)}"
                    )


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def _name(optimizer: Optimizer) -> str:
    while hasattr(optimizer, "optim"):  # below wrappers
        optimizer = optimizer.optim
    return type(optimizer).__name__


def _some(words: Sequence[Any], separator: str = ", ") -> str:
    listed = separator.join(map(str, words[:NAMED]))
    return f"{listed} and {len(words) - NAMED} more" if len(words) > NAMED else listed
