"""The arguments of a model whose sequence is cut over ranks, from those of the whole batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from colossalai.nn.policies.sequences.probe import Probe
from colossalai.nn.policies.trials.meta_inputs import looking_at, meta_twin
from colossalai.nn.same_tokens import check_same_tokens
from colossalai.nn.sequence import SequenceParallel

# The arguments of a text model that say something of every token.
BY_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids")
# Arguments of the loss that models hand to their body as well, which leaves them alone.
OF_THE_LOSS = ("shift_labels",)


@dataclass
class CutSequence:
    """How the sequences of one model are cut, and what its parts tell each other in a forward pass."""

    sequence: SequenceParallel
    who: str
    found: Probe
    patches: nn.Module | None = None
    """Of a model of images, what makes tokens of them, without values: to ask how many there are."""
    length: int = 0
    """The length of the sequences of this forward pass."""
    in_pieces: bool = False
    """Whether the hidden states of this forward pass stay cut behind the body, for a loss from pieces."""
    lengths: dict[Any, int] = field(default_factory=dict)

    def pieces(self, body: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments of ``body`` for this rank's tokens, from those of the whole batch."""
        tokens = next((given[n] for n in ("input_ids", "inputs_embeds") if given.get(n) is not None), None)
        if tokens is None:
            return self._with_images(body, given)
        if tokens.ndim != (3 if tokens.is_floating_point() else 2):
            raise ValueError(
                f"{self.who}: a sequence is cut of input_ids (batch, length) or inputs_embeds (batch, length,"
                f" features), got shape {tuple(tokens.shape)}"
            )
        batch, self.length = tokens.shape[:2]
        self._check_length()
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        self._check_mask(mask, batch)
        if mask is not None:
            check_same_tokens("a mask", mask, self.sequence.mesh)
        documents = self._documents(mask, positions, tokens)
        if positions is None:
            positions = self._positions(body, mask, tokens)
        given = {**given, "position_ids": positions.expand(batch, -1), "attention_mask": None}
        given = {name: self._piece(name, value, batch) for name, value in given.items()}
        return {**given, "attention_mask": documents}

    def _piece(self, name: str, value: Any, batch: int) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0 or name in OF_THE_LOSS:
            return value
        if name not in BY_TOKEN or tuple(value.shape[:2]) != (batch, self.length):
            raise ValueError(
                f"{self.who}: the argument {name!r} of shape {tuple(value.shape)} cannot be cut along the"
                f" sequence. Leave it out; {', '.join(BY_TOKEN)} and attention_mask can be cut, where they"
                f" are ({batch}, {self.length})"
            )
        return self.sequence.cut(value)

    def _check_length(self) -> None:
        window = self.found.window
        if window is not None and self.length > window:
            raise ValueError(
                f"{self.who}: its sliding window is {window} tokens, shorter than the sequence of"
                f" {self.length}, and attention over a cut sequence has no windows; switch it off in the"
                " config (sliding_window=None), or launch without parallel.sequence"
            )

    def _check_mask(self, mask: Any, batch: int) -> None:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        if mask is not None and shape != (batch, self.length):
            raise ValueError(
                f"{self.who}: attention_mask must say which tokens are padding, ({batch}, {self.length}),"
                f" where the sequence is cut over ranks, got {shape}; documents of packed samples are told"
                " by position_ids that start again at 0"
            )

    def _documents(self, mask: Tensor | None, positions: Tensor | None, tokens: Tensor) -> Tensor | None:
        """What attention must know of the whole sequence, as the model's mask of four dims; None for
        nothing.
        """
        batch, documents = len(tokens), None
        if mask is not None and (mask.is_meta or not bool(mask.all())):
            documents = torch.where(mask.to(tokens.device).bool(), 1, -1)
        if mask is None and positions is not None and self.found.packs and not positions.is_meta:
            documents = _packed(positions.expand(batch, -1))
        missing = self.sequence.padded(self.length) - self.length
        if documents is None and missing and not self.found.all_causal:
            documents = torch.ones(batch, self.length, dtype=torch.long, device=tokens.device)
        return None if documents is None else pad(documents, (0, missing), value=-1)[:, None, None]

    def _positions(self, body: nn.Module, mask: Tensor | None, tokens: Tensor) -> Tensor:
        """The positions that ``body`` gives the tokens of a whole batch by itself.

        Most count from 0; RoBERTa and its kin count the ids that are no padding, OPT and its kin the mask.
        """
        name = "create_position_ids_from_input_ids"
        by_ids: Any = next((m for m in body.modules() if hasattr(m, name)), None)
        if by_ids is not None and tokens.is_floating_point():
            return by_ids.create_position_ids_from_inputs_embeds(tokens, by_ids.padding_idx)
        if by_ids is not None:
            return by_ids.create_position_ids_from_input_ids(tokens, by_ids.padding_idx)
        if self.found.counts and mask is not None:
            return (mask.cumsum(1) * mask - 1).long()
        return torch.arange(tokens.size(1), device=tokens.device)[None]

    def _with_images(self, body: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a model of images, which is given them whole and cuts their patches."""
        images = given.get("pixel_values")
        if self.patches is None or not isinstance(images, Tensor):
            raise ValueError(f"{self.who} was given neither input_ids nor inputs_embeds")
        if given.get("attention_mask") is not None:
            raise ValueError(f"{self.who}: patches of images cannot be masked where the sequence is cut")
        self.length = self._patches_of(given)
        missing = self.sequence.padded(self.length) - self.length
        if not missing:
            return given
        if "attention_mask" not in _takes(body):
            raise ValueError(
                f"{self.who}: an image of {self.length} tokens is padded by {missing}, so that"
                f" {self.sequence.size} ranks have equal parts, but {type(body).__name__} takes no"
                " attention_mask, which says so; use images or ranks of another number"
            )
        documents = torch.ones(len(images), self.length, dtype=torch.long, device=images.device)
        return {**given, "attention_mask": pad(documents, (0, missing), value=-1)[:, None, None]}

    def _patches_of(self, given: Mapping[str, Any]) -> int:
        """How many tokens the images become."""
        assert self.patches is not None
        names = inspect.signature(self.patches.forward).parameters
        images = given["pixel_values"]
        options = {n: v for n, v in given.items() if n in names and isinstance(v, bool | int)}
        key = (tuple(images.shape[1:]), *options.items())
        if key not in self.lengths:
            with looking_at(self.patches), torch.no_grad():
                made = self.patches(torch.empty_like(images[:1], device="meta"), **options)
            if not isinstance(made, Tensor) or made.ndim != 3:
                raise ValueError(
                    f"{self.who}: its sequence cannot be cut, as {type(self.patches).__name__} returns more"
                    " than the tokens of an image"
                )
            self.lengths[key] = made.size(1)
        return self.lengths[key]


def _packed(positions: Tensor) -> Tensor | None:
    """The documents, from 1 on, of tokens whose positions start again; None if there is only one."""
    from transformers.masking_utils import find_packed_sequence_indices

    found = find_packed_sequence_indices(positions)
    return None if found is None else found + 1


def _takes(module: nn.Module) -> Mapping[str, Any]:
    return inspect.signature(module.forward).parameters


def without_values(entry: nn.Module) -> nn.Module:
    """A copy of a module whose tensors have a shape only."""
    with looking_at(entry):
        return meta_twin(entry).eval()
