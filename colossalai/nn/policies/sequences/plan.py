"""A model of transformers whose sequence is cut over ranks.

The model without its head, its *body*, takes the whole batch and works on this rank's tokens; what it returns
is whole again.  All of its code but attention works on single tokens, so it runs as it is, with the positions
of this rank's tokens.  Its attention goes through transformers' ``AttentionInterface`` to
:mod:`colossalai.nn.attention`.

What attention must know of the whole sequence travels as the model's own mask: a tensor of four dims, (batch,
1, 1, length), with the numbers of the documents of tokens.  transformers passes such a mask on unchanged,
also to a recomputation.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.nn.attention import sequence_attention
from colossalai.nn.policies.sequences.inputs import CutSequence, without_values
from colossalai.nn.policies.sequences.probe import Probe, Refused, configs_of, probe
from colossalai.nn.policies.trials.verify import Verification, has_numbers
from colossalai.nn.policies.wrap_forward import (
    Forward,
    ForwardWrapper,
    argument_names,
    given_by_name,
    wrap_forward,
)
from colossalai.nn.random_streams import own_numbers
from colossalai.nn.sequence import SequenceParallel
from colossalai.utils.boosted import CUT_SEQUENCES, warn_unless_boosted

ATTENTION = "colossalai_sequence"


@cache
def _register() -> None:
    """Make our attention known to transformers, which chooses it by its name in a config."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attend)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention of a module whose sequence is cut, as transformers calls it."""
    over: SequenceParallel = module.attends_over
    found = sequence_attention(
        query,
        key,
        value,
        over.mesh,
        ring=over.ring,
        heads=over.heads,
        causal=module.attends_causally,
        scale=scaling,
        documents=None if attention_mask is None else attention_mask[:, 0, 0],
        dropout_p=dropout,
    )
    return found.transpose(1, 2).contiguous(), None


class CutBody(ForwardWrapper):
    """The body of a model: it takes whole sequences and works on this rank's tokens of them."""

    training: bool
    cut: CutSequence
    whole_attention: tuple[list[Any], str]
    """The configs that choose the attention, and what they chose before the sequence was cut."""

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert isinstance(self, nn.Module)
        _register()
        given = given_by_name(forward, args, kwargs)
        self._refuse_attentions(given.get("output_attentions"))
        if given.get("use_cache") or given.get("past_key_values") is not None:
            with self._uncut():
                return forward(**given)
        if "use_cache" in argument_names(forward):
            given["use_cache"] = False  # keys and values of a piece would be of no use
        if self.training and torch.is_grad_enabled() and not next(self.parameters()).is_meta:
            warn_unless_boosted(self, *CUT_SEQUENCES)
        given, sequence = self.cut.pieces(self, given), self.cut.sequence
        with own_numbers(sequence.axes, sequence.mesh) if self.training else nullcontext():
            out = forward(**{**given, "return_dict": True})
        if not self.cut.in_pieces:
            out["last_hidden_state"] = _whole(out["last_hidden_state"], self.cut)
        if out.get("hidden_states") is not None:
            out["hidden_states"] = tuple(_whole(states, self.cut) for states in out["hidden_states"])
        if out.get("router_logits") is not None:  # (batch * tokens, experts), of which heads make a loss
            batch = len(out["last_hidden_state"])
            rows = (logits.unflatten(0, (batch, -1)) for logits in out["router_logits"])
            out["router_logits"] = tuple(_whole(logits, self.cut).flatten(0, 1) for logits in rows)
        return out

    def _refuse_attentions(self, asked: bool | None) -> None:
        config = getattr(self, "config", None)
        if getattr(config, "output_attentions", False) if asked is None else asked:
            raise ValueError(
                f"{self.cut.who}(output_attentions=True): the sequence is cut over ranks, and no rank ever"
                " has attentions of the whole; leave it out, or launch without parallel.sequence"
            )

    @contextmanager
    def _uncut(self) -> Iterator[None]:
        """Every rank does all of the work, with a cache of keys and values: ``generate``."""
        if torch.is_grad_enabled():
            raise ValueError(
                f"{self.cut.who}: the sequence is cut over ranks, so there is no cache of keys and values"
                " while training; leave use_cache and past_key_values out, or use torch.no_grad(), as"
                " generate does: then every rank works on whole sequences"
            )
        configs, before = self.whole_attention
        try:
            _choose(configs, before)
            yield
        finally:
            _choose(configs, ATTENTION)


class CutTokens(ForwardWrapper):
    """What makes tokens of images: this rank goes on with its own."""

    cut: CutSequence

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.cut.sequence.cut(forward(*args, **kwargs))


class WholeTokens(ForwardWrapper):
    """A module between the blocks of a body and its end that mixes tokens: a pooler."""

    cut: CutSequence

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return forward(*(_whole(x, self.cut) for x in args), **kwargs)


class LossFromPieces(ForwardWrapper):
    """A causal language model: where it is given labels, its head and its loss work on this rank's tokens."""

    cut_tokens: CutSequence

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = given_by_name(forward, args, kwargs)
        labels = next((given[n] for n in ("labels", "shift_labels") if given.get(n) is not None), None)
        keep = given.get("logits_to_keep")
        if labels is not None:
            self._check_labels(labels, given)
        if labels is not None and (isinstance(keep, Tensor) or keep):
            raise ValueError(
                f"{self.cut_tokens.who}(logits_to_keep={keep!r}): with whole_scores=False a rank computes the"
                " scores of its own tokens for the loss; leave logits_to_keep out"
            )
        self.cut_tokens.in_pieces = labels is not None
        try:
            return forward(**given)
        finally:
            self.cut_tokens.in_pieces = False

    def _check_labels(self, labels: Tensor, given: dict[str, Any]) -> None:
        """Refuse labels of another length, which may be padded to as many as the tokens are."""
        tokens = next((given[n] for n in ("input_ids", "inputs_embeds") if given.get(n) is not None), None)
        if tokens is not None and labels.shape != tokens.shape[:2]:
            raise ValueError(
                f"{self.cut_tokens.who}: labels of shape {tuple(labels.shape)} do not fit the tokens, which"
                f" are {tuple(tokens.shape[:2])}; give every token of the whole sequences a label, or -100"
            )


def _whole(pieces: Any, cut: CutSequence) -> Any:
    return cut.sequence.gather(pieces, cut.length)


def _choose(configs: list[Any], attention: str) -> None:
    for config in configs:
        config._attn_implementation_internal = attention


# ---- a model becomes one whose sequence is cut ----

SEQUENCE_ADVICE = (
    "train it without parallel.sequence: its code mixes tokens outside of attention, or counts positions in a"
    " way of its own"
)


@dataclass(frozen=True)
class SequencePlan:
    """How the sequences of one model are cut, and what its attention is asked for."""

    sequence: SequenceParallel
    found: Probe

    def apply(self, model: nn.Module) -> CutSequence:
        """Let the body of ``model`` work on this rank's tokens, in place."""
        body: Any = body_of(model)
        cut = CutSequence(self.sequence, type(model).__name__, self.found)
        if self.found.inputs == {"pixel_values"}:
            entry = _entry(body)
            cut.patches = without_values(entry)
            wrap_forward(entry, CutTokens).cut = cut  # type: ignore[assignment]
        for name, attention in self.found.modules.items():
            module: Any = body.get_submodule(name)
            module.attends_over, module.attends_causally = self.sequence, attention.causal
        if isinstance(pooler := getattr(body, "pooler", None), nn.Module):
            wrap_forward(pooler, WholeTokens).cut = cut  # type: ignore[assignment]
        configs = _own_configs(model)
        wrap_forward(body, CutBody)
        body.cut, body.whole_attention = cut, (configs, body.config._attn_implementation)
        _register()
        _choose(configs, ATTENTION)
        return cut

    def verifications(self, model: Any) -> list[Verification]:
        """What the whole ``model`` computes, where every rank has tokens and some are added, also masked.

        For a model without memory a copy with other weights is run, and cut and compared at once.
        """
        bounds = 2 * self.sequence.size + 1, self.found.window, _longest(model)
        length = min(bound for bound in bounds if isinstance(bound, int))
        copied = not has_numbers(model)
        found = [Verification(model, length, weightless=copied, padded=padded) for padded in (False, True)]
        if found[0].model is model:
            return found
        for verification in found:
            self.apply(verification.model)
            verification.compare(verification.model, SEQUENCE_ADVICE)
        return []


def _own_configs(model: nn.Module) -> list[Any]:
    """Give ``model`` configs of its own, which other models may have been built of; returns them."""
    own = {id(config): copy.copy(config) for config in configs_of(model)}
    for module in model.modules():
        if (config := own.get(id(getattr(module, "config", None)))) is not None:
            module.config = config
    return list(own.values())


def _longest(model: Any) -> Any:
    return getattr(getattr(model, "config", None), "max_position_embeddings", None)


def body_of(model: Any) -> nn.Module:
    """The model without its head."""
    body: nn.Module = getattr(model, getattr(model, "base_model_prefix", "") or "", model)
    # OPT holds a decoder alone, which its head calls itself
    while len(parts := [m for m in body.children() if any(True for _ in m.parameters())]) == 1:
        if "input_ids" not in argument_names(parts[0].forward):
            break
        body = parts[0]
    return body


def plan_sequence(model: nn.Module, sequence: SequenceParallel, head_parts: int) -> SequencePlan:
    """Look at the attention of ``model``, whose heads are shared by ``head_parts`` ranks; refuses a model
    whose sequence cannot be cut.
    """
    body, who = body_of(model), type(model).__name__
    config = getattr(body, "config", None)
    if config is None or not hasattr(config, "_attn_implementation"):
        raise Refused(
            f"{who}: parallelize cuts the sequences of models of transformers; build others of"
            " colossalai.nn's layers, which follow parallel.sequence"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise Refused(f"{who}: its sequence cannot be cut, as it has an encoder and a decoder")
    _check_drops(who, body, config)
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if kind in ("dynamic", "longrope"):
        raise Refused(
            f"{who}: its sequence cannot be cut, as its rotations ({kind!r}) depend on the last position that"
            " a rank sees; set config.rope_parameters to another rope_type"
        )
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        raise Refused(
            f"{who}: its sequence cannot be cut, as some of its layers have linear attention, which goes from"
            " token to token (config.layer_types); launch without parallel.sequence"
        )
    found = probe(body)
    _check_inputs(who, body, found)
    _check_shares(who, found, sequence, head_parts)
    return SequencePlan(sequence, found)


def _check_drops(who: str, body: nn.Module, config: Any) -> None:
    """Ranks draw the random numbers of their own tokens, and cannot agree on more than those."""
    if rate := getattr(config, "layerdrop", 0.0):
        raise Refused(
            f"{who}: its sequence cannot be cut, as layerdrop={rate} drops whole layers by numbers that"
            " differ between ranks, which would wait for each other; set config.layerdrop=0.0"
        )
    for name, module in body.named_modules():
        if type(module).__name__.endswith("DropPath") and (rate := getattr(module, "drop_prob", None)):
            raise Refused(
                f"{who}: its sequence cannot be cut, as {name} drops whole samples ({rate}) by numbers that"
                " differ between ranks, which hold pieces of them; set config.drop_path_rate=0.0"
            )


def _check_inputs(who: str, body: nn.Module, found: Probe) -> None:
    if found.inputs == {"pixel_values"}:
        try:
            _entry(body)
        except (NotImplementedError, StopIteration):
            raise Refused(
                f"{who}: its sequence cannot be cut, as {type(body).__name__} does not tell by"
                " get_input_embeddings() which of its modules makes tokens of images"
            ) from None
        return
    if found.inputs != {"input_ids"}:
        raise Refused(
            f"{who}: its sequence cannot be cut, as it takes {' and '.join(sorted(found.inputs))}; the"
            " sequences of models of text alone and of images alone can"
        )
    if "position_ids" not in argument_names(body.forward):
        raise Refused(
            f"{who}: its sequence cannot be cut, as {type(body).__name__} takes no position_ids, by which a"
            " rank says where its tokens stand"
        )


def _check_shares(who: str, found: Probe, sequence: SequenceParallel, head_parts: int) -> None:
    ranks = 1 if sequence.heads is None else sequence.mesh.size[sequence.heads]
    for name, attention in found.modules.items():
        if attention.heads % (head_parts * ranks):
            beside = f", each of {head_parts} tensor-parallel ones" if head_parts > 1 else ""
            raise Refused(
                f"{who}, module {name!r}: Ulysses attention cannot share {attention.heads} heads among"
                f" {ranks} ranks{beside}; launch with parallel=dict(sequence=dict(size={sequence.size},"
                " attention='ring')), which needs no heads"
            )


def _entry(body: Any) -> nn.Module:
    """The child of ``body`` that makes tokens of images."""
    inner = body.get_input_embeddings()
    return next(child for child in body.children() if any(m is inner for m in child.modules()))
