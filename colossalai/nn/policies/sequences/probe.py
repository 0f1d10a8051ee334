"""What a model of transformers asks of its attention, found by running its code on the meta device.

The model runs under an attention and a mask function of ours, which transformers calls as it would call its
own. They see every module that attends, which tokens its mask lets it see, and whatever else it would have
attention do. So no list of architectures says which of them can be cut along the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from colossalai.nn.policies.trials.meta_inputs import candidate_inputs, looking_at, meta_twin

PROBE = "colossalai_probe"
_FAR = 1 << 22  # a window that is wider than this cuts off nothing
_HARMLESS = ("position_ids", "cache_position", "output_attentions", "use_cache")
# What attention functions of transformers know beside masks, and ours does not.
_WORDS = {
    "softcap": "caps its scores (softcap)",
    "s_aux": "has attention sinks (s_aux)",
    "sinks": "has attention sinks",
    "position_bias": "adds a bias of positions to its scores (position_bias)",
    "head_mask": "masks heads (head_mask)",
}


class Refused(ValueError):
    """The sequence of a model cannot be cut; the message says why."""


@dataclass(frozen=True)
class Attention:
    """What one module asks of attention."""

    causal: bool
    heads: int
    window: int | None = None
    """How many tokens back it sees; None for all."""


@dataclass
class Probe:
    """The attention of a model, by the names of its modules."""

    modules: dict[str, Attention] = field(default_factory=dict)
    packs: bool = False
    """Whether positions that start again are documents of their own to the model's masks."""
    counts: bool = False
    """Whether something is counted along the sequence: positions, by the ids or the mask."""
    inputs: frozenset[str] = frozenset()
    """The arguments it was run with."""

    @property
    def all_causal(self) -> bool:
        return all(attention.causal for attention in self.modules.values())

    @property
    def window(self) -> int | None:
        """The longest sequence of which every token sees all that the mask of no window lets it see."""
        return min((a.window for a in self.modules.values() if a.window is not None), default=None)


def probe(body: nn.Module) -> Probe:
    """Look at the attention of ``body``, a model without its head; refuses one that cannot be cut."""
    who, problem = type(body).__name__, "no arguments are known that its forward takes"
    with looking_at(body):
        twin = meta_twin(body).eval()
        for inputs in candidate_inputs(twin):
            if "output_attentions" in inputs:
                continue
            run = _Run(twin)
            try:
                with run.watching(), torch.no_grad(), _Counts(run.found):
                    twin(**inputs)
            except Refused as refusal:
                raise Refused(f"{who}: its sequence cannot be cut, as {refusal}") from None
            except Exception as error:  # other arguments may do
                problem = f"{type(error).__name__}: {error}"
                continue
            if not run.found.modules:
                raise Refused(
                    f"{who}: its sequence cannot be cut, as none of its attention goes through transformers'"
                    " AttentionInterface; use parallel.tensor, a pipeline or checkpointing instead"
                )
            run.found.inputs = frozenset(n for n, value in inputs.items() if isinstance(value, Tensor))
            return run.found
    raise Refused(
        f"{who}: its sequence cannot be cut, as its code could not be run on the meta device to see what it"
        f" asks of attention ({problem.splitlines()[0]})"
    )


class AttentionWatch:
    """Sees which module asks for attention, under which mask, and with what else."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.masks: dict[int, tuple[Tensor, tuple[bool, int | None] | Refused]] = {}
        self.configs = configs_of(model)

    def mask(
        self, *, batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Any], **_: Any
    ) -> Tensor:
        """A tensor of no use but to be recognized where it arrives; transformers calls this for a mask."""
        try:
            kind: Any = mask_kind(mask_function)
        except Refused as refusal:  # Qwen2-MoE makes one of a window of no tokens, which no layer uses
            kind = refusal
        made = torch.empty(batch_size, 1, int(q_length), int(kv_length), dtype=torch.bool, device="meta")
        self.masks[id(made)] = made, kind
        return made

    def name(self, module: nn.Module) -> str:
        """The name of a module that attends."""
        if id(module) not in self.names:
            raise Refused("its attention is computed outside of its modules")
        return self.names[id(module)]

    def asked(
        self,
        module: nn.Module,
        attention_mask: Tensor | None,
        is_causal: bool | None,
        sliding_window: int | None,
        options: dict[str, Any],
    ) -> tuple[bool, int | None]:
        """Whether ``module`` attends causally, and how far back it sees; refuses what else it asks for."""
        name = self.name(module)
        check_options(name, options)
        if attention_mask is None:
            causal, window = getattr(module, "is_causal", True) if is_causal is None else is_causal, None
        elif id(attention_mask) in self.masks:
            kind = self.masks[id(attention_mask)][1]
            if isinstance(kind, Refused):
                raise kind
            causal, window = kind
        else:
            raise Refused(
                f"{name} gets a mask that the model has changed, such as one with a bias of positions"
            )
        windows = [w for w in (window, sliding_window) if w is not None]
        return bool(causal), min(windows) if windows else None


class _Run(AttentionWatch):
    """One forward pass on the meta device, seen from the functions that transformers calls."""

    def __init__(self, twin: nn.Module) -> None:
        super().__init__(twin)
        self.found = Probe()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """transformers calls this run for masks and attention."""
        from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

        AttentionInterface.register(PROBE, self.attend)
        AttentionMaskInterface.register(PROBE, self.mask)
        find_packed = masking_utils.find_packed_sequence_indices
        for config in self.configs:
            config._attn_implementation_internal = PROBE
            config.pad_token_id = None  # else some warn of padding, for which they read the ids
            if hasattr(config, "_experts_implementation_internal"):
                config._experts_implementation_internal = "batched_mm"  # others read values, or want bf16

        def notes(position_ids: Tensor) -> None:
            self.found.packs = True  # and there is nothing to read on the meta device

        masking_utils.find_packed_sequence_indices = notes
        try:
            yield
        finally:
            masking_utils.find_packed_sequence_indices = find_packed

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *_: Any,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        name = self.name(module)
        if query.size(2) != key.size(2):
            raise Refused(f"{name} attends to another sequence than its own (cross-attention, or a prefix)")
        causal, window = self.asked(module, attention_mask, is_causal, sliding_window, options)
        asked = Attention(causal, query.size(1), window)
        if self.found.modules.setdefault(name, asked) != asked:
            raise Refused(f"{name} attends in two ways")
        return query.new_empty(len(query), query.size(2), query.size(1), value.size(3)), None


class _Counts(TorchDispatchMode):
    """Notes in ``found`` that something is counted."""

    def __init__(self, found: Probe) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.counts |= func.overloadpacket is torch.ops.aten.cumsum
        return func(*args, **(kwargs or {}))


def check_options(name: str, options: dict[str, Any]) -> None:
    for option, value in options.items():
        if option in _WORDS and value is not None:
            raise Refused(f"{name} {_WORDS[option]}")
        if isinstance(value, Tensor) and option not in _HARMLESS:
            raise Refused(f"{name} gives its attention a tensor of its own, {option}")


def sees(mask_function: Callable[..., Any], query: int, key: int) -> bool:
    """Whether a mask lets the token at ``query`` see that at ``key``."""
    with torch.device("cpu"):
        zero = torch.tensor(0)
        return bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key)))


def mask_kind(mask_function: Callable[..., Any]) -> tuple[bool, int | None]:
    """Whether a mask is causal, and how many tokens back the first ones can be seen."""
    with torch.device("cpu"):
        try:
            near = [[sees(mask_function, i, j) for j in range(3)] for i in range(3)]
            window = _first(lambda back: not sees(mask_function, back, 0)) if near[1][0] else 1
        except Exception as error:
            raise Refused(f"its mask could not be read ({type(error).__name__}: {error})") from None
    # a window of less than 3 tokens is none of the two patterns where it cuts off
    inside = [(i, j) for i in range(3) for j in range(3) if window is None or abs(i - j) < window]
    for causal in (True, False):
        if all(near[i][j] is (j <= i or not causal) for i, j in inside):
            return causal, window
    raise Refused("its mask is neither causal nor one by which all tokens see each other")


def _first(holds: Callable[[int], bool]) -> int | None:
    """The smallest number of at least 1 from which ``holds`` is true."""
    end = 1
    while not holds(end):
        if end > _FAR:
            return None
        end *= 2
    start = end // 2
    while end - start > 1:
        middle = (start + end) // 2
        start, end = (start, middle) if holds(middle) else (middle, end)
    return end


def configs_of(model: nn.Module) -> list[Any]:
    """The configs of the modules of ``model`` that choose an attention function."""
    found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    return [config for config in found.values() if hasattr(config, "_attn_implementation_internal")]
