"""What a step gives, as one tensor of whole numbers: tokens, and log-probabilities as their bits.

All ranks know from the plan of the step what stands where.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colossalai.inference.requests import TokenLogprobs
from colossalai.inference.sampling import log_probabilities
from colossalai.inference.scheduler import Part


class Results:
    """The form of the results of ``parts``.

    First the tokens that were chosen; then, for each row whose log-probabilities are wanted, that of its
    token, the numbers of the most likely tokens, and theirs.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._chosen = [part for part in parts if part.chooses]
        self._places: dict[int, tuple[int, int]] = {}  # of a part: where its own row begins, and its prompt's
        at = len(self._chosen)
        for part in parts:
            own = at
            at += _width(part.request.sampling.logprobs) if part.chooses else 0
            self._places[part.request.serial] = own, at
            at += part.scores * _width(part.request.sampling.prompt_logprobs)
        self.length = at

    def pack(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """All results, on the device of the ``scores`` (rows, vocabulary)."""
        pieces, row, scored = [tokens], 0, len(self._chosen)
        for part in self.parts:
            asked = part.request.sampling
            if part.chooses:
                if asked.logprobs is not None:
                    pieces.append(_packed(scores[row : row + 1], tokens[row : row + 1], asked.logprobs))
                row += 1
            if part.scores:
                first = part.request.scored + 1
                following = torch.tensor(
                    part.request.tokens[first : first + part.scores], device=scores.device
                )
                rows = scores[scored : scored + part.scores]
                pieces.append(_packed(rows, following, asked.prompt_logprobs or 0))
                scored += part.scores
        return torch.cat(pieces)

    def tokens(self, found: Tensor) -> list[int]:
        """The token of each part that chooses."""
        chosen: list[int] = found[: len(self._chosen)].tolist()
        return chosen

    def logprobs(
        self, part: Part, found: Tensor
    ) -> tuple[list[TokenLogprobs] | None, list[TokenLogprobs] | None]:
        """Those of the token of ``part``, and those of its prompt; None where none were asked for."""
        own, prompt = self._places[part.request.serial]
        request, asked = part.request, part.request.sampling
        chosen = ofprompt = None
        if part.chooses and asked.logprobs is not None and len(request.tokens) > request.prompt:
            chosen = _read(found[own:], request.tokens[-1:], asked.logprobs)
        if asked.prompt_logprobs is not None and part.scores:
            first = request.scored - part.scores + 1  # the step was counted already
            ofprompt = _read(
                found[prompt:], request.tokens[first : first + part.scores], asked.prompt_logprobs
            )
        return chosen, ofprompt


def _width(most: int | None) -> int:
    return 0 if most is None else 1 + 2 * most


def _packed(scores: Tensor, tokens: Tensor, most: int) -> Tensor:
    own, top, values = log_probabilities(scores, tokens, most)
    rows = [own[:, None].view(torch.int64), top, values.view(torch.int64)]
    return torch.cat(rows, 1).flatten()


def _read(numbers: Tensor, tokens: Sequence[int], most: int) -> list[TokenLogprobs]:
    rows = numbers[: len(tokens) * _width(most)].view(len(tokens), -1)
    own = rows[:, 0].contiguous().view(torch.float64).tolist()
    top = rows[:, 1 : 1 + most].tolist()
    values = rows[:, 1 + most :].contiguous().view(torch.float64).tolist()
    return [
        TokenLogprobs(token, own[i], tuple(zip(top[i], values[i], strict=True)))
        for i, token in enumerate(tokens)
    ]
