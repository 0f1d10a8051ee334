"""The model of this rank, as it runs in a step: it attends to pages and gives scores for chosen tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.inference.discovery import Asked, AttentionProbe
from colossalai.inference.inputs import StepInputs
from colossalai.inference.stages import Team
from colossalai.inference.watch import ModelWatch
from colossalai.mesh import redistribute
from colossalai.nn.attention.pages import LayerPages, Places, attending
from colossalai.nn.logits import Logits
from colossalai.nn.policies.sequences.probe import Refused
from colossalai.nn.policies.wrap_forward import argument_names


class Runner:
    """Runs steps of ``model``, a whole model or a stage of one.

    Nothing of the model is changed between steps: its attention, its mode and what its head is given are put
    back after each.
    """

    def __init__(self, model: nn.Module, team: Team, watch: ModelWatch) -> None:
        self.model, self.team, self._watch = model, team, watch
        self.layers: dict[nn.Module, LayerPages] = {}
        self._configs: list[Any] = []
        self._names = set(argument_names(_native_forward(model)))
        self._rows: Tensor | None = None
        self.vocabulary = 0
        """How many scores a token has, as soon as the model has run."""

    @property
    def _head(self) -> nn.Module | None:
        """The head of now: a model may get another one between calls."""
        return head_of(self.model) if self.team.is_last_stage else None

    # ---- what it attends to ----

    def discover(self, tokens: Tensor) -> dict[nn.Module, Asked]:
        """Run the model on ``tokens`` (1, tokens), and see what its modules ask of attention."""
        watch = AttentionProbe(self.model)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        with watch.watching():
            self._pass(tokens, positions, ("watch", tokens.shape[1]), None)
        if watch.problems:
            raise Refused(watch.problems[0])
        self._configs = watch.configs
        return watch.found

    def allocate(self, asked: dict[nn.Module, Asked], pages: int, page_size: int, *, exact: bool) -> None:
        """Make the pages of all modules."""
        for module, form in asked.items():
            shape = pages, page_size, form.kv_heads
            device = next(self.model.parameters()).device
            keys, values = (
                torch.zeros(*shape, size, dtype=form.dtype, device=device)
                for size in (form.key_size, form.value_size)
            )
            self.layers[module] = LayerPages(
                keys, values, slopes=form.slopes, window=form.window, exact=exact
            )

    # ---- steps ----

    def step(self, inputs: StepInputs) -> Tensor | None:
        """The scores (rows, vocabulary) of the rows that ``inputs`` names, on the last stage."""
        places = inputs.places()
        for layer in self.layers.values():
            layer.places = places
        with attending(self.layers, self._configs):
            return self._pass(
                inputs.tokens[None], inputs.positions[None], ("step", inputs.count), inputs.rows
            )

    def decode(self, tokens: Tensor, positions: Tensor, places: Places) -> Tensor:
        """The scores of one token of each sequence, all of them; for a model that is whole here."""
        for layer in self.layers.values():
            layer.places = places
        with attending(self.layers, self._configs):
            scores = self._pass(tokens[None], positions[None], ("step", len(tokens)), None)
        assert scores is not None, "a whole model has its last stage"
        return scores

    def alone(self, tokens: Tensor) -> Tensor | None:
        """The scores (tokens, vocabulary) of one sequence by the model's own attention, at the positions that
        it counts itself, on the last stage.
        """
        return self._pass(tokens, None, ("alone", tokens.shape[1]), None)

    @torch.no_grad()
    def _pass(
        self, tokens: Tensor, positions: Tensor | None, form: tuple[str, int], rows: Tensor | None
    ) -> Tensor | None:
        given: dict[str, Any] = {"input_ids": tokens, "position_ids": positions}
        given |= {"use_cache": False, "return_dict": True, "attention_mask": None}
        given = {name: value for name, value in given.items() if name in self._names}
        team = self.team
        hidden: Any = () if team.stage == 0 else team.receive(form[1])
        self._rows = rows
        with self._ready():
            out = self.model(*(hidden if isinstance(hidden, tuple) else (hidden,)), **given)
        if not team.is_last_stage:
            team.send(out, form[1])
            return None
        scores = out if isinstance(out, Tensor) else out["logits"]
        scores = self._whole(scores)[0]
        if rows is not None and len(scores) != len(rows):
            raise RuntimeError(
                f"{type(self.model).__name__} gave {len(scores)} rows of scores where {len(rows)} were asked"
                " for: its head (get_output_embeddings()) is not the module that made them"
            )
        self.vocabulary = scores.shape[-1]
        return scores

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """The model in evaluation, with a head that is given the wanted rows alone."""
        training = [module for module in self._watch.modules if module.training]
        head = self._head
        hook = None if head is None else head.register_forward_pre_hook(self._select)
        try:
            for module in training:
                module.training = False
            yield
        finally:
            if hook is not None:
                hook.remove()
            for module in training:
                module.training = True

    def _select(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return None if self._rows is None else (args[0][:, self._rows], *args[1:])

    def _whole(self, scores: Tensor) -> Tensor:
        """The scores of all words, of which this rank may have some."""
        place = _place(self._head)
        if place is None or place.classes == scores.shape[-1]:
            return scores
        mesh = self.team.mesh
        assert mesh is not None
        shape = (*scores.shape[:-1], place.classes)
        return redistribute(scores, place.layout, place.layout.whole(), mesh, shape)


def head_of(model: Any) -> nn.Module | None:
    """The module of ``model`` that makes scores of words."""
    embeddings: Callable[[], Any] | None = getattr(model, "get_output_embeddings", None)
    found = embeddings() if embeddings is not None else getattr(model, "head", None)
    return found if isinstance(found, nn.Module) else None


def vocabulary_of(model: Any) -> int | None:
    """How many words ``model`` knows, if it says so."""
    config = getattr(model, "config", None)
    text = getattr(config, "text_config", config)
    found = getattr(text, "vocab_size", None) or getattr(model, "vocab_size", None)
    return found if isinstance(found, int) else None


def _place(head: nn.Module | None) -> Logits | None:
    """Where the scores of a head lie, if it says so."""
    for module in () if head is None else (head, getattr(head, "dense", None)):
        if callable(place := getattr(module, "place", None)):
            found = place()
            return found if isinstance(found, Logits) else None
    return None


def _native_forward(model: Any) -> Callable[..., Any]:
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    forward: Callable[..., Any] = bare.forward
    return forward


def largest_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """How far scores are from what they should be, as a share of their size."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)
