"""A plan for a model that has adapters of PEFT in it.

PEFT puts a layer around each module that it adapts.  A plan speaks of the model's own modules, so it is found
for a view of the model without these layers (``without_adapters``), and then told to the modules where they
lie (``AdapterView.matches``).  What happens to the two products of LoRA follows from what happens to the
layer that they stand beside, whatever the architecture:

- where the layer expands, A is whole and B is cut as the layer is;
- where it contracts, A is cut along its input, with a sum behind it, and B is whole;
- where its output is whole (the table, the head), both are whole.

Layers are known by their submodules, so that PEFT is not imported.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from colossalai.nn.policies.cutting.policy import Match
from colossalai.nn.policies.cutting.rules import (
    Cut,
    CutContext,
    Gathered,
    Head,
    Norm,
    Pieces,
    Repeated,
    Rule,
    Table,
)
from colossalai.nn.policies.wrap_forward import ForwardWrapper, MergesPiece, WholeOutputs, wrap_forward


def base_of(model: nn.Module) -> Any:
    """The model that a ``PeftModel`` was made of; any other model itself."""
    return model.get_base_model() if _is_peft_model(model) else model  # type: ignore[operator]


def _is_peft_model(model: nn.Module) -> bool:
    return hasattr(model, "peft_config") and callable(getattr(model, "get_base_model", None))


@dataclass(frozen=True)
class AdapterView:
    """A model without the layers of its adapters; ``places`` has the paths of its modules in the model.

    A module that PEFT trains as a copy (``modules_to_save``) has several.
    """

    bare: nn.Module
    model: nn.Module
    places: dict[str, list[str]]

    @property
    def has_adapters(self) -> bool:
        return self.bare is not self.model

    def matches(self, plan: Iterable[Match], context: CutContext) -> list[Match]:
        """The rules of a plan for ``bare``, by the modules of the model, and those of its adapters."""
        return [found for match in plan for found in self._matches(match, context)]

    def _matches(self, match: Match, context: CutContext) -> Iterator[Match]:
        name, _, rule = match
        if not self.has_adapters:
            yield match
            return
        for path in self.places[name]:
            yield path, self.model.get_submodule(path), rule
            outer, _, last = path.rpartition(".")
            if last == "base_layer":
                yield from _of_adapters(outer, self.model.get_submodule(outer), rule, context)


class FixedAdapters(ForwardWrapper):
    """A ``PeftModel`` that was cut: it keeps the adapters that it had then."""

    def add_adapter(self, *_: Any, **__: Any) -> None:
        """Refused: PEFT would make whole layers beside pieces, and for the modules of this rank alone."""
        raise RuntimeError(
            f"this {type(self).__name__} is cut over several ranks, and new adapters would not be; add and"
            " load adapters before parallelize or split_model."
            " colossalai.checkpoint_io.load_pretrained(model, folder) fills the active adapter of a model"
            " that is cut"
        )

    load_adapter = add_adapter


class AdaptedOutputs(FixedAdapters, WholeOutputs):
    """A ``PeftModel`` around a model that is cut."""


@dataclass(frozen=True)
class PieceOfDelta:
    """A layer of LoRA whose products are whole, around a module that is cut: it merges this rank's piece."""

    def cut(self, module: nn.Module, context: CutContext) -> nn.Module:
        wrap_forward(module, MergesPiece)
        module.merged_over = context.mesh  # type: ignore[assignment]
        return module


def without_adapters(model: nn.Module) -> AdapterView:
    """A view of ``model``, which shares its modules and parameters."""
    if not any(_inside(module) for module in model.modules()):
        return AdapterView(model, model, {})
    places: dict[str, list[str]] = {}
    _walk(model, "", "", places)
    return AdapterView(_bare(model, {}), model, places)


def _inside(module: nn.Module) -> list[str]:
    """The paths of what a layer of PEFT stands around, the one in use first; none for other modules."""
    children = module._modules
    if "base_layer" in children and hasattr(module, "active_adapters"):
        return ["base_layer"]
    if "original_module" in children and hasattr(module, "active_adapters"):
        copies = children.get("modules_to_save")
        names = [] if copies is None else [f"modules_to_save.{name}" for name in copies._modules]
        return [*names, "original_module"]
    return []


def _walk(module: nn.Module, path: str, name: str, places: dict[str, list[str]]) -> None:
    if inside := _inside(module):
        for inner in inside:
            _walk(module.get_submodule(inner), f"{path}.{inner}".lstrip("."), name, places)
        return
    places.setdefault(name, []).append(path)
    for child, below in module.named_children():
        _walk(below, f"{path}.{child}".lstrip("."), f"{name}.{child}".lstrip("."), places)


def _bare(module: nn.Module, done: dict[int, nn.Module]) -> nn.Module:
    while inside := _inside(module):
        module = module.get_submodule(inside[0])
    if id(module) not in done:
        twin = done[id(module)] = copy.copy(module)
        twin._modules = {n: m if m is None else _bare(m, done) for n, m in module._modules.items()}
    return done[id(module)]


def _of_adapters(path: str, layer: nn.Module, rule: Rule, context: CutContext) -> Iterator[Match]:
    """The rules for what PEFT has put beside a module that has ``rule``."""
    if _stays_whole(rule, context):
        return
    _check_layer(path, layer)
    if isinstance(rule, (Head, Table)):
        yield path, layer, PieceOfDelta()
        return
    if not isinstance(rule, (Cut, Repeated)):
        raise ValueError(
            f"module {path!r} has an adapter, and the plan cuts it by {type(rule).__name__}(), which knows no"
            " adapters; leave it out of target_modules"
        )
    contracts = isinstance(rule, Cut) and rule.role == "contract"
    product = "lora_A" if contracts else "lora_B"
    for name, below in layer.get_submodule(product).named_children():
        yield f"{path}.{product}.{name}", below, rule


def _stays_whole(rule: Rule, context: CutContext) -> bool:
    """Whether a module that has ``rule`` is the same on every rank where the stream is whole."""
    if isinstance(rule, Pieces):
        return not context.tp.rest(rule.at).sharded
    if isinstance(rule, Head):
        return not rule.vocabulary
    return isinstance(rule, (Gathered, Norm)) or (isinstance(rule, Cut) and rule.role == "stay")


def _check_layer(path: str, layer: Any) -> None:
    """Refuse adapters that are not the two products of LoRA."""
    kind = type(layer)
    advice = "use plain LoRA, leave it out of target_modules, or train without tensor parallelism"
    if not ({"lora_A", "lora_B"} <= set(layer._modules)) or hasattr(layer, "lora_E"):
        raise ValueError(
            f"parallelize knows the adapters of LoRA, and module {path!r} has a"
            f" {kind.__module__}.{kind.__name__} around it; {advice}"
        )
    if variants := getattr(layer, "lora_variant", None):
        found = type(next(iter(variants.values()))).__name__
        raise ValueError(
            f"parallelize knows plain LoRA, and module {path!r} has adapters of {found} (an option such as"
            f" use_dora of LoraConfig); {advice}"
        )


def check_adapters(model: nn.Module, view: AdapterView, context: CutContext) -> None:
    """Refuse adapters under plans that do not know them."""
    who = type(base_of(model)).__name__
    if _is_peft_model(model) and hasattr(model, "prompt_encoder"):
        raise ValueError(
            f"parallelize knows the adapters of LoRA, and {who} has learned prompts of PEFT; train them"
            " without tensor parallelism: plugins (DDP, FSDP, ZeRO, Gemini) take them"
        )
    for path, module in base_of(model).named_modules():
        if "original_module" in module._modules and "modules_to_save" not in module._modules:
            raise ValueError(
                f"parallelize knows the adapters of LoRA, and module {path!r} of {who} is in a"
                f" {type(module).__name__} (trainable_token_indices of LoraConfig); train the whole table"
                " (modules_to_save), or without tensor parallelism"
            )
    if view.has_adapters and context.stream_is_cut:
        raise ValueError(
            f"{who} has adapters of PEFT, which mode '1d' and pipelines know, but not mode"
            f" {context.tp.mode!r}; use mode '1d', or merge the adapters first (merge_and_unload)"
        )
