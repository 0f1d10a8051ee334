"""Latent attention, as DeepSeek has it, in 1D.

Keys and values of all heads are made of one small vector for each token, which every rank computes; so is the
part of the keys that is rotated, of which all heads have the same.  What makes heads of the vectors is cut by
heads, as in other attention.  The rotated part goes to each rank's heads as it is, so its gradient is summed
over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from colossalai.mesh import Layout, Mesh, redistribute, replicated
from colossalai.nn.policies.cutting.rules import Cut, CutContext, Heads, Rule
from colossalai.nn.policies.wrap_forward import Forward, ForwardWrapper, wrap_forward

ENTRY = "kv_a_proj_with_mqa"
"""The layer to the latent vector of a token and to the rotated part of its keys."""


@dataclass(frozen=True)
class LatentKeys:
    """The linear layer to the latent vector of keys and values, ``latent`` features, and to a part of the
    keys that all heads share: it is whole on every rank.
    """

    latent: int

    def cut(self, module: nn.Module, context: CutContext) -> nn.Module:
        layer: Any = wrap_forward(module, KeysForAllHeads)
        layer.latent = self.latent
        layer.used_over = frozenset(context.tp.inner.dims[-1]), context.mesh
        return module


class KeysForAllHeads(ForwardWrapper):
    """A layer whose outputs behind the first ``latent`` go to the heads of every rank as they are."""

    latent: int
    used_over: tuple[frozenset[str], Mesh]

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        y, (axes, mesh) = forward(*args, **kwargs), self.used_over
        latent, keys = y[..., : self.latent], y[..., self.latent :]
        whole = replicated(keys.ndim)
        # its gradient is a sum of all ranks'
        return torch.cat([latent, redistribute(keys, whole, Layout(whole.dims, spread=axes), mesh)], -1)


def latent_attention_rules(model: nn.Module) -> Iterator[tuple[str, Rule]]:
    """The rules of every module of ``model`` with latent attention, by the ends of their paths."""
    for name, module in model.named_modules():
        latent = getattr(module, "kv_lora_rank", None)
        layers = {n for n, below in module.named_children() if isinstance(below, nn.Linear)}
        if not isinstance(latent, int) or not {ENTRY, "kv_b_proj", "o_proj"} <= layers:
            continue
        path = name.rpartition(".")[2]
        yield path, Heads()
        yield f"{path}.{ENTRY}", LatentKeys(latent)
        for layer in ("q_proj", "q_b_proj", "kv_b_proj"):
            yield f"{path}.{layer}", Cut("expand")
        yield f"{path}.o_proj", Cut("contract")
