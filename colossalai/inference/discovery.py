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
from colossalai.nn.policies.sequences.probe import Refused, check_options, configs_of, mask_kind

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


class Watch:
    """Attends in the place of every module of ``model`` to one sequence, and notes what they ask for."""

    def __init__(self, model: nn.Module) -> None:
        self.found: dict[nn.Module, Asked] = {}
        self.configs = configs_of(model)
        self._names = {module: name for name, module in model.named_modules()}
        self._masks: dict[int, tuple[Tensor, tuple[bool, int | None] | Refused]] = {}
        self._own = [module for module in self._names if attends_itself(module)]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The model computes its attention here."""
        before = [config._attn_implementation_internal for config in self.configs]
        if self.configs:
            from transformers import AttentionInterface, AttentionMaskInterface

            AttentionInterface.register(WATCH, self._called)
            AttentionMaskInterface.register(WATCH, self._mask)
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

    def _mask(
        self, *, batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Any], **_: Any
    ) -> Tensor:
        """A tensor of no use but to be recognized where it arrives."""
        try:
            kind: Any = mask_kind(mask_function)
        except Refused as refusal:  # perhaps no layer uses it
            kind = refusal
        made = torch.empty(batch_size, 1, int(q_length), int(kv_length), dtype=torch.bool, device="meta")
        self._masks[id(made)] = made, kind
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
        name = self._name(module)
        check_options(name, options)
        causal, window = getattr(module, "is_causal", True) if is_causal is None else is_causal, None
        if attention_mask is not None:
            if id(attention_mask) not in self._masks:
                raise Refused(
                    f"{name} gets a mask that the model has changed, such as one with a bias of positions"
                )
            kind = self._masks[id(attention_mask)][1]
            if isinstance(kind, Refused):
                raise kind
            causal, window = kind
        if not causal:
            raise Refused(f"{name} lets tokens see later ones, which have not been written yet")
        windows = [w for w in (window, sliding_window) if w is not None]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        smallest = min(windows) if windows else None
        return self.attend(module, query, key, value, scale=scale, window=smallest), None

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
        name, tokens = self._name(module), query.shape[2]
        if len(query) != 1 or key.shape[2] != tokens:
            raise Refused(f"{name} attends to another sequence than its own (cross-attention, or a prefix)")
        if query.shape[1] % key.shape[1]:
            raise Refused(f"{name} has {query.shape[1]} heads for {key.shape[1]} of keys")
        if module in self.found:
            raise Refused(f"{name} attends more than once in a pass")
        slopes = None if bias is None else _slopes(name, bias)
        self.found[module] = Asked(
            query.shape[1], key.shape[1], key.shape[3], value.shape[3], key.dtype, window, slopes
        )
        places = torch.arange(tokens, device=query.device)
        back = places[:, None] - places
        mask = (back >= 0) & (back < (window or tokens))
        if slopes is not None:
            mask = (slopes[:, None, None] * places).to(query.dtype).masked_fill(~mask, float("-inf"))[None]
        out = scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)

    def _name(self, module: nn.Module) -> str:
        name = self._names.get(module)
        if name is None:
            raise Refused("its attention is computed outside of its modules")
        return name


def _slopes(name: str, bias: Tensor) -> Tensor:
    """What ``bias`` (heads, tokens) grows by from token to token."""
    found = bias[:, 1].float()
    line = found[:, None] * torch.arange(bias.shape[1], device=bias.device)
    if not torch.allclose(line, bias.float(), rtol=0.02):
        raise Refused(f"{name} adds a bias of positions to its scores that is no multiple of them")
    return found
