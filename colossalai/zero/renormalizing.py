"""Modules whose forward pass writes to their own weights."""

from __future__ import annotations

from torch import nn


def renormalizing(module: nn.Module, harm: str) -> str | None:
    """What to say about the first embedding with ``max_norm``, and what becomes of its writing.

    None if there is none.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            return (
                f"{name!r} has max_norm={part.max_norm}, so its forward pass writes to its weight, {harm};"
                " build it without, and normalize what it returns"
            )
    return None


def renormalizing_on(ranks: int, module: nn.Module) -> str | None:
    """The same for ranks that each keep all weights: every one would shorten
    the rows that its own data ask for.
    """
    return renormalizing(module, f"differently on each of {ranks} ranks") if ranks > 1 else None
