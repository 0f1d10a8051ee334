"""A policy: a table from module paths to rules, and how it is matched with a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from colossalai.nn.policies.cutting.rules import Rule
from colossalai.nn.policies.stages.depth import Depth

Match = tuple[str, nn.Module, Rule]
"""A module of a model that has a rule, with its path."""


@dataclass(frozen=True)
class Policy:
    """The rules that cut the models of one architecture.

    ``model_types`` are the names that configs of these models carry.  ``rules`` maps the end of a module's
    path (``*`` is any one part, the empty path the base model) to what is done with it; the first that fits
    counts.  ``heads`` are the attributes of the config with numbers of heads, all of which the ranks must be
    able to share.
    """

    model_types: tuple[str, ...]
    rules: Mapping[str, Rule]
    heads: tuple[str, ...] = ("num_attention_heads",)
    only_1d: bool = False
    """Whether it says nothing about the residual stream, which the other modes cut as well."""
    depth: Depth | None = None
    """Where it is cut into the stages of a pipeline; None if it cannot be."""

    def matches(self, model: nn.Module) -> Iterator[Match]:
        """Every module of ``model`` that has a rule, with its path."""
        base = getattr(model, "base_model", model)
        paths = [(path, rule) for path, rule in self.rules.items() if path]
        for name, module in model.named_modules():
            if module is base and "" in self.rules:
                yield name, module, self.rules[""]
                continue
            for path, rule in paths:
                if fits(name, path):
                    yield name, module, rule
                    break


def fits(name: str, path: str) -> bool:
    """Whether the module ``name`` is one that the ``path`` of a rule means."""
    parts = path.split(".")
    tail = name.split(".")[-len(parts) :]
    return len(tail) == len(parts) and all(p in ("*", t) for t, p in zip(tail, parts, strict=True))
