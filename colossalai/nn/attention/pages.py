"""Attention of packed tokens to keys and values in pages: how the attention of a model becomes that.

Modules of transformers call an attention function by its name in their config, and those of titans ask
``self.pages``; a class that does neither has a row in ``OWN_FORWARDS``.  A module has ``pages`` only while a
generator runs its model (:func:`attending`).  Tokens of many sequences lie one behind the other in a batch of
one; the code of the model but for its attention works on single tokens, and gets their positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.functional import dropout

from colossalai.kernel.paged_attention import paged_attention, write_pages

ATTENTION = "colossalai_pages"


@dataclass(eq=False)
class Places:
    """Where the packed tokens of a step belong, as ``colossalai.kernel.paged_attention`` takes it."""

    slots: Tensor
    page_table: Tensor
    query_starts: Tensor
    lengths: Tensor
    max_query: int


class Attends(Protocol):
    """What stands in for the attention of one module."""

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
        """The outputs (1, tokens, heads, head_dim) for ``query`` (1, heads, tokens, head_dim).

        ``bias`` (heads, tokens) is what a head adds to the scores of keys by their positions.
        """


class LayerPages:
    """The keys and values of one module, in pages.

    ``slopes`` says what its heads add to the score of a key for every position (ALiBi), and ``window`` how
    many tokens back it sees.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        *,
        slopes: Tensor | None = None,
        window: int | None = None,
        exact: bool = False,
    ) -> None:
        self.keys, self.values, self.exact = keys, values, exact
        self.slopes, self.window = slopes, window
        self.places: Places | None = None

    # A copy of a model, or a model in a file, has no pages.

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

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
        """Write the keys and values of the tokens, and let their queries attend to all of their sequences."""
        places = self.places
        assert places is not None, "a step says where its tokens belong before the model runs"
        write_pages(key[0].transpose(0, 1), value[0].transpose(0, 1), self.keys, self.values, places.slots)
        return paged_attention(
            query[0].transpose(0, 1),
            self.keys,
            self.values,
            places.page_table,
            places.query_starts,
            places.lengths,
            max_query=places.max_query,
            scale=scale,
            alibi=self.slopes,
            window=self.window,
            exact=self.exact,
        )[None]


@contextmanager
def attending(modules: Mapping[nn.Module, Attends], configs: Sequence[Any]) -> Iterator[None]:
    """Let ``modules`` attend to pages, and the models with ``configs`` choose our attention."""
    _register()
    before = [config._attn_implementation_internal for config in configs]
    try:
        for module, pages in modules.items():
            module.__dict__["pages"] = pages
        for config in configs:
            config._attn_implementation_internal = ATTENTION
        yield
    finally:
        for module in modules:
            module.__dict__.pop("pages", None)
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name


@functools.cache
def _register() -> None:
    """Make our attention known to transformers; a name without a mask function of its own gets no mask."""
    try:
        from transformers import AttentionInterface
    except ImportError:
        return
    AttentionInterface.register(ATTENTION, _attend)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention of a module as transformers calls it; what else it asks was looked at before."""
    pages: Attends = module.__dict__["pages"]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return pages.attend(module, query, key, value, scale=scale, window=sliding_window), None


# ---- modules with an attention of their own ----


def _bloom(module: Any, hidden: Tensor, residual: Tensor, alibi: Tensor, *_: Any, **__: Any) -> Any:
    """The forward of a ``BloomAttention``, around attention to pages."""
    query, key, value = module._reshape(module.query_key_value(hidden))
    found = module.pages.attend(module, query, key, value, scale=module.inv_norm_factor, bias=alibi[:, 0])
    out = module.dense(found.flatten(2))
    return residual + dropout(out, module.hidden_dropout, module.training), None


OWN_FORWARDS: dict[str, Callable[..., Any]] = {"BloomAttention": _bloom}
"""The forward of a module with an attention of its own, while it attends to pages, by the name of its
class.
"""


def attends_itself(module: nn.Module) -> bool:
    """Whether ``module`` asks its ``pages`` for attention, without the interface of transformers."""
    for native in reversed(type(module).__mro__):  # what parallelize makes of a class has its name
        if "pages" in native.__dict__:
            return True
        forward = OWN_FORWARDS.get(native.__name__)
        if forward is not None and native.__module__.startswith("transformers."):
            _switch(native, forward)
            return True
    return False


def _switch(native: Any, paged: Callable[..., Any]) -> None:
    """Let modules of the class ``native`` compute ``paged`` where they have pages.

    The class itself is changed, since what ``parallelize`` does around a forward must stay around this one.
    """
    whole = native.forward

    @functools.wraps(whole)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (whole if self.pages is None else paged)(self, *args, **kwargs)

    native.forward, native.pages = forward, None
