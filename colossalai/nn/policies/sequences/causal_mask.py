"""Causal attention of transformers' models without a tensor that holds the mask.

Attention kernels know what causal means and need no mask. A compiled model of transformers makes one all the
same: it cannot see, while it is traced, that its positions simply count, and a mask keeps attention from its
fastest kernels. But where a script gives neither a mask nor positions nor a cache, there is no padding and no
packing, so the mask that transformers would make is the causal one.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from colossalai.nn.policies.wrap_forward import (
    Forward,
    ForwardWrapper,
    given_by_name,
    source_of,
    wrap_forward,
)

M = TypeVar("M", bound=nn.Module)
# what transformers derives masks from, beside the causal one
_SOURCES = ("attention_mask", "position_ids", "past_key_values", "cache_position", "token_type_ids")
_OTHER_MASKS = (
    "create_sliding",
    "create_chunked",
    "create_masks_for",
    "or_mask_function",
    "and_mask_function",
    "block_sequence_ids",
    "allow_is_causal_skip",
)


class _MaskNeed:
    """Whether the call under way needs no mask; an object, so that the compiler may write to it."""

    plain = False


_need = _MaskNeed()


def skip_causal_mask(model: M) -> M:
    """Let a causal language model of transformers attend without a mask where it is given none.

    The results are those of the mask that transformers would make. With ``attention_mask``,
    ``position_ids`` or a cache among its arguments, a call makes its mask as before.
    """
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    source = source_of(type(base).forward)
    config = getattr(model, "config", None)
    problem = None
    if getattr(config, "_attn_implementation", None) != "sdpa":
        problem = f"attends by {getattr(config, '_attn_implementation', None)!r}, not by 'sdpa'"
    elif "create_causal_mask(" not in source or any(word in source for word in _OTHER_MASKS):
        problem = "does not make a causal mask alone (create_causal_mask)"
    if problem is not None or config is None:
        raise ValueError(
            f"skip_causal_mask is for causal language models of transformers: {type(model).__name__}"
            f" {problem}; leave skip_causal_mask out"
        )
    _register()
    return model if isinstance(model, CausalWithoutMask) else wrap_forward(model, CausalWithoutMask)


class CausalWithoutMask(ForwardWrapper):
    """A model that says, for each call, whether a mask is needed."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        _register()  # a process that loads the model may not have done so

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = given_by_name(forward, args, kwargs)
        before, _need.plain = _need.plain, all(given.get(name) is None for name in _SOURCES)
        try:
            return forward(*args, **kwargs)
        finally:
            _need.plain = before


def _register() -> None:
    """Let transformers ask whether a call needs a mask; models that were not changed always do.

    The name "sdpa" stays, since models compare it, and another process may load them.
    """
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    make = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    if getattr(make, "may_skip", False):
        return

    def mask(*args: Any, **kwargs: Any) -> Any:
        # masks of both directions hide padding of an encoder, of which _SOURCES says nothing
        causal = "allow_is_bidirectional_skip" not in kwargs
        return None if _need.plain and causal else make(*args, **kwargs)

    mask.may_skip = True  # type: ignore[attr-defined]
    AttentionMaskInterface.register("sdpa", mask)
