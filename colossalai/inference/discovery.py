"""What the attention of a model is asked for, found by running the model once on a few tokens.

The model runs under an attention and a mask function of ours, as where its sequence is to be cut
(``colossalai.nn.policies.sequences.probe``).  They see every module that attends, the form of its keys and
values, and whatever else it would have attention do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from colossalai.nn.attention.pages import attends_itself
from colossalai.nn.policies.sequences.probe import AttentionWatch, Refused, sees

WATCH = "colossalai_pages_watch"


@dataclass(frozen=True, eq=False)
class Asked:
    """What one module asks of attention, on this rank."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    window: int | None
    slopes: Tensor | None

    def bytes_per_token(self) -> int:
        """How much memory the keys and values of one token take."""
        return self.kv_heads * (self.key_size + self.value_size) * self.dtype.itemsize


class AttentionProbe(AttentionWatch):
    """Attends in the place of every module of ``model`` to one sequence, and notes what they ask for.

    What cannot be had is noted too, and the pass goes on: other stages of a pipeline wait for its end.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.found: dict[nn.Module, Asked] = {}
        self.problems: list[str] = []
        self._own = [module for module in model.modules() if attends_itself(module)]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The model computes its attention here."""
        before = [config._attn_implementation_internal for config in self.configs]
        if self.configs:
            from transformers import AttentionInterface, AttentionMaskInterface

            AttentionInterface.register(WATCH, self._called)
            AttentionMaskInterface.register(WATCH, self.mask)
        try:
            for module in self._own:
                module.__dict__["pages"] = self
            for config in self.configs:
                config._attn_implementation_internal = WATCH
            yield
        finally:
            for module in self._own:
                module.__dict__.pop("pages", None)
            for config, name in zip(self.configs, before, strict=True):
                config._attn_implementation_internal = name

    def mask(self, *, mask_function: Callable[..., Any], **form: Any) -> Tensor:
        """A tensor of no use but to be recognized where it arrives."""
        made = super().mask(mask_function=mask_function, **form)
        kind = self.masks[id(made)][1]
        if not isinstance(kind, Refused) and kind[1] is not None and not sees(mask_function, kind[1], 1):
            words = (
                "its mask lets tokens see their own part of a text alone (chunks), which pages do not know"
            )
            self.masks[id(made)] = made, Refused(words)
        return made

    def _called(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """As transformers calls an attention function."""
        window = None
        try:
            causal, window = self.asked(module, attention_mask, is_causal, sliding_window, options)
            if not causal:
                self.problems.append(
                    f"{self.name(module)} lets tokens see later ones, which have not been written yet"
                )
        except Refused as refusal:
            self.problems.append(str(refusal))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return self.attend(module, query, key, value, scale=scale, window=window), None

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """The outputs (1, tokens, heads, head_dim), for one sequence."""
        tokens, heads, kv_heads = query.shape[2], query.shape[1], key.shape[1]
        if problem := self._problem(module, query, key):
            self.problems.append(problem)
            return query.new_zeros(len(query), tokens, heads, value.shape[3])
        slopes = None if bias is None else self._slopes(module, bias)
        self.found[module] = Asked(heads, kv_heads, key.shape[3], value.shape[3], key.dtype, window, slopes)
        places = torch.arange(tokens, device=query.device)
        back = places[:, None] - places
        mask = (back >= 0) & (back < (window or tokens))
        if slopes is not None:
            mask = (slopes[:, None, None] * places).to(query.dtype).masked_fill(~mask, float("-inf"))[None]
        out = scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)

    def _problem(self, module: nn.Module, query: Tensor, key: Tensor) -> str:
        """What is wrong with a call, in words."""
        if id(module) not in self.names:
            return "its attention is computed outside of its modules"
        name = self.name(module)
        if len(query) != 1 or key.shape[2] != query.shape[2]:
            return f"{name} attends to another sequence than its own (cross-attention, or a prefix)"
        if query.shape[1] % key.shape[1]:
            return f"{name} has {query.shape[1]} heads for {key.shape[1]} of keys"
        return f"{name} attends more than once in a pass" if module in self.found else ""

    def _slopes(self, module: nn.Module, bias: Tensor) -> Tensor:
        """What ``bias`` (heads, tokens) grows by from token to token."""
        found = bias[:, 1].float()
        line = found[:, None] * torch.arange(bias.shape[1], device=bias.device)
        if not torch.allclose(line, bias.float(), rtol=0.02):
            self.problems.append(
                f"{self.name(module)} adds a bias of positions to its scores that is no multiple of them"
            )
        return found
