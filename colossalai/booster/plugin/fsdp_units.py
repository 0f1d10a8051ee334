"""Which modules of a model are gathered and freed as one unit.

A unit's weights are whole on every rank only while the unit computes.  Small units save memory, large ones need fewer
messages; by default each entry of an ``nn.ModuleList``, the blocks of a transformer, is a unit, and what is left belongs
to the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Policy = Callable[..., bool]
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they are never called, so nothing would gather their weights


def find_units(model: nn.Module, policy: Policy | None, ignored: set[nn.Parameter]) -> list[nn.Module]:
    """The units below ``model``, inner ones first.

    A weight that is used inside and outside of a unit (tied) must belong to what holds both: such a module is no unit,
    and a policy that asks for it is refused.
    """
    wanted = _blocks(model) if policy is None else _by_policy(model, policy, ignored)
    users: dict[nn.Parameter, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):  # a module in two places is used in both
        for p in module._parameters.values():
            if p is not None:
                users[p] = users.get(p, 0) + 1
    units = []
    for unit in wanted:
        torn = _torn(unit, users)
        if torn and policy is not None:
            name = next(name for name, module in model.named_modules() if module is unit)
            raise ValueError(
                f"auto_wrap_policy cuts {name!r} by itself, but its parameter {torn!r} is tied to one outside of it;"
                " tied parameters must be in one unit, so let the policy leave this module to its parent"
            )
        if not torn:
            units.append(unit)
    return units


def _torn(unit: nn.Module, users: dict[nn.Parameter, int]) -> str | None:
    """The first parameter that is also used outside of ``unit``."""
    inside: dict[nn.Parameter, int] = {}
    names: dict[nn.Parameter, str] = {}
    for prefix, module in unit.named_modules(remove_duplicate=False):
        for name, p in module._parameters.items():
            if p is not None:
                inside[p] = inside.get(p, 0) + 1
                names.setdefault(p, f"{prefix}.{name}" if prefix else name)
    return next((names[p] for p, count in inside.items() if count != users[p]), None)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The entries of the outermost module lists, each once, if they have weights."""
    found: list[nn.Module] = []
    for child in model.children():
        if not isinstance(child, nn.ModuleList):
            found += _blocks(child)
            continue
        for entry in child:
            if isinstance(entry, _CONTAINERS):
                found += _blocks(nn.ModuleList([entry]) if isinstance(entry, nn.ModuleList) else entry)
            elif any(True for _ in entry.parameters()):
                found.append(entry)
    return list(dict.fromkeys(found))


def _by_policy(model: nn.Module, policy: Policy, ignored: set[nn.Parameter]) -> list[nn.Module]:
    """Ask a policy of ``torch.distributed.fsdp.wrap`` about every module, children first.

    It is called twice: with ``recurse=True`` whether to look at the children, then with ``recurse=False`` and the number
    of elements that no child took whether the module is a unit.
    """
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        size = sum(p.numel() for p in module.parameters() if p not in ignored)
        if module in found or not policy(module=module, recurse=True, nonwrapped_numel=size):
            return 0
        taken = sum(visit(child) for child in module.children())
        is_unit = policy(module=module, recurse=False, nonwrapped_numel=size - taken)
        if not is_unit or module is model or isinstance(module, _CONTAINERS):
            return taken
        found.append(module)
        return size

    visit(model)
    return found


def check_policy(policy: Any) -> None:
    if policy is not None and not callable(policy):
        raise TypeError(
            "auto_wrap_policy is called as policy(module=..., recurse=..., nonwrapped_numel=...), like those of"
            f" torch.distributed.fsdp.wrap; got {policy!r}, which cannot be called"
        )
