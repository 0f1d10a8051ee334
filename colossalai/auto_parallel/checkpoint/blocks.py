"""Finds the blocks of any model whose activations may be computed again, and changes their modes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from colossalai.auto_parallel.checkpoint.mode_solver import MODES
from colossalai.interface.model import below_compile
from colossalai.nn.checkpoint_blocks import checkpoint_blocks, group_blocks, refuse_checkpointed

_LISTS = (nn.ModuleList, nn.Sequential)


def find_blocks(model: nn.Module, names: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The blocks of ``model`` by name: those called ``names``, or the entries of its outermost lists and
    sequences, or else its largest parts.

    A block has parameters, and lies in no other block.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"auto_checkpoint needs a module, got {type(model).__name__}")
    for name, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ValueError(
                f"auto_checkpoint: {_called(model, name)} is a ScriptModule, whose code and tensors cannot be"
                " exchanged; give the model as it was before torch.jit"
            )
    if _is_compiled(model):
        raise _compiled("the model", below_compile(model))
    found = _named(model, names) if names is not None else _entries(model) or _parts(model)
    refuse_checkpointed(model, found)
    chosen = set(found)
    inside = {part for block in found for part in block.modules()}
    for name, part in model.named_modules():
        if _is_compiled(part) and (part in inside or not chosen.isdisjoint(part.modules())):
            raise _compiled(_called(model, name), below_compile(part))
    return {name: module for name, module in model.named_modules() if module in chosen}


def _is_compiled(module: nn.Module) -> bool:
    return below_compile(module) is not module or getattr(module, "_compiled_call_impl", None) is not None


def _called(model: nn.Module, name: str) -> str:
    return f"the part {name!r} of {type(model).__name__}" if name else type(model).__name__


def _compiled(what: str, module: nn.Module) -> ValueError:
    return ValueError(
        f"auto_checkpoint: {what} is compiled already ({type(module).__name__}), and a plan would be made of"
        " its operations one by one; call auto_checkpoint first, with compiled=True on a GPU or regions=False"
        " elsewhere, and compile the result"
    )


def _named(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The modules called ``names``; refuses what cannot be blocks."""
    if isinstance(names, str) or not names:
        raise ValueError(f"auto_checkpoint: blocks is a list of names of modules, got {names!r}")
    parts = dict(model.named_modules())
    for name in names:
        if not name or name not in parts:
            raise ValueError(f"auto_checkpoint: {type(model).__name__} has no part {name!r}")
        if not _is_called(parts[name]):
            inner = [f"{name}.{child}" for child, _ in parts[name].named_children()]
            raise ValueError(
                f"auto_checkpoint: the {type(parts[name]).__name__} {name!r} is never called itself; take"
                f" what is in it as blocks: {', '.join(inner[:3])} ..."
            )
        outer = next((other for other in names if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise ValueError(
                f"auto_checkpoint: the block {name!r} lies in the block {outer!r}; leave out one"
            )
    return [parts[name] for name in names]


def _entries(module: nn.Module) -> list[nn.Module]:
    """The entries of the outermost lists of modules; a list of lists has theirs."""
    found: list[nn.Module] = []
    children = [module] if isinstance(module, _LISTS) else module.children()
    for child in children:
        if not isinstance(child, _LISTS):
            found += _entries(child)
        elif not _is_list_of_blocks(child):
            continue
        else:
            for entry in child:
                inner = isinstance(entry, (*_LISTS, nn.ModuleDict)) and _entries(entry)
                found += inner or ([entry] if _has_weights(entry) and _is_called(entry) else [])
    return list(dict.fromkeys(found))


def _is_list_of_blocks(child: nn.Module) -> bool:
    """Whether ``child`` has entries that consist of several layers; a sequence of single layers, such as a
    head, is no chain of blocks.
    """
    return any(any(True for _ in entry.children()) for entry in child.children())


def _parts(module: nn.Module) -> list[nn.Module]:
    """Children with weights that consist of others, as far outside as there are two of them; else layers."""
    children = [child for child in module.children() if _has_weights(child)]
    if len(children) == 1 and any(True for _ in children[0].children()):
        return _parts(children[0])
    return [part for child in children for part in ([child] if _is_called(child) else _parts(child))]


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def set_modes(model: nn.Module, modes: Mapping[str, str], regions: Sequence[Sequence[str]] = ()) -> None:
    """Give the blocks of ``model`` these modes, by name, and compute the blocks of each region together."""
    for mode in MODES:
        names = [name for name, its in modes.items() if its == mode]
        if names:
            checkpoint_blocks(model, mode, names)  # type: ignore[arg-type]
    group_blocks(model, regions, list(modes))


@contextmanager
def block_modes(
    model: nn.Module, modes: Mapping[str, str], regions: Sequence[Sequence[str]] = ()
) -> Iterator[None]:
    """Blocks in other modes for a while."""
    chosen = ("recompute", "regions")
    blocks = [model.get_submodule(name) for name in modes]
    before = [(type(block), {key: vars(block).get(key) for key in chosen}) for block in blocks]
    try:
        set_modes(model, modes, regions)
        yield
    finally:
        for block, (kind, values) in zip(blocks, before, strict=True):
            block.__class__ = kind
            for key, value in values.items():
                vars(block).pop(key, None)
                if value is not None:
                    vars(block)[key] = value
