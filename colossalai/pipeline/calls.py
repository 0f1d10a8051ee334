"""Calls one layer of a pipeline stage with the output of the layer before, and the keywords that it names.

A batch that is a dict reaches every stage as keywords.  A layer takes those that its ``forward`` names.  A
function between layers is one of two kinds, which its first parameter tells apart:

- named like a keyword of the batch, it computes a new value for this keyword: ``def mask(attention_mask):
  ...``;
- otherwise it computes a new input of the next layer: ``lambda x: torch.flatten(x, 1)``.

Further parameters are keywords of the batch in both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

Function = Callable[..., Any]
Functions = Mapping[int, Sequence[Function]]


def build_kwargs_for_module(
    module: Function, input_tensor: Any, kw_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """The keywords of ``kw_dict`` that ``module`` names, beyond the parameters that ``input_tensor``
    fills.
    """
    names = _parameters(module.forward if isinstance(module, nn.Module) else module)
    return {name: kw_dict[name] for name in names[len(as_args(input_tensor)) :] if name in kw_dict}


def build_kwargs_for_function(function: Function, kw_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of ``kw_dict`` that ``function`` names."""
    return {name: kw_dict[name] for name in _parameters(function) if name in kw_dict}


def exec_func_with_kwargs(
    func: Function, kw_dict: Mapping[str, Any], input_tensor: Any, kwargs: dict[str, Any]
) -> Any:
    """Call ``func`` with the keywords ``kw_dict``: it changes a keyword in ``kwargs``, or what is
    returned.
    """
    names = _parameters(func)
    if names and names[0] in kw_dict:
        kwargs[names[0]] = func(**kw_dict)
        return input_tensor
    return func(*as_args(input_tensor), **kw_dict)


def exec_funcs_with_kwargs(
    func_dict: Functions, func_key: int, input_tensor: Any, kwargs: dict[str, Any]
) -> Any:
    """Call the functions under ``func_key`` one after the other."""
    for func in func_dict.get(func_key, ()):
        kw_dict = build_kwargs_for_function(func, kwargs)
        input_tensor = exec_func_with_kwargs(func, kw_dict, input_tensor, kwargs)
    return input_tensor


def call_module(module: Function, args: Any = None, kwargs: Mapping[str, Any] | None = None) -> Any:
    """``module(*args, **kwargs)``, where ``args`` is a tensor, a tuple of arguments, or None."""
    return module(*as_args(args), **(kwargs or {}))


def as_args(input_tensor: Any) -> tuple[Any, ...]:
    if input_tensor is None:
        return ()
    return tuple(input_tensor) if isinstance(input_tensor, tuple | list) else (input_tensor,)


def _parameters(function: Function) -> list[str]:
    """The names under which ``function`` takes arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some of torch's functions do not tell
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, parameter in signature.parameters.items() if parameter.kind in named]
