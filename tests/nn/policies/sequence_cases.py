"""Models of transformers whose sequences are cut, with batches of every kind, and runs of them."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import Plugin, TorchDDPPlugin
from colossalai.testing.boosted import BoosterRun
from colossalai.testing.parity import Problem, Tolerance, check_plan
from tests.nn.policies import derived_zoo, zoo

BATCH = 4
EXACT = Tolerance(loss=1e-9, gradient=1e-9, weight=1e-9)


@dataclass(frozen=True)
class Case:
    """A family, what its sequences look like, and how its loss is computed."""

    name: str
    kind: str = "plain"  # or padded, packed, embeds
    length: int = 11
    whole_scores: bool = True

    def __str__(self) -> str:
        return f"{self.name}-{self.kind}-{self.length}{'' if self.whole_scores else '-pieces'}"

    def problem(self, steps: int = 3) -> Problem:
        serial = build(self.name)
        return Problem(
            build=lambda: copy.deepcopy(serial),
            batches=[batch(serial, self, step) for step in range(steps)],
            loss=lambda model, given: model(**given).loss,
        )


def build(name: str) -> nn.Module:
    """The family in float64, with a loss in float64."""
    if name not in zoo.BUILD:
        model = derived_zoo.build(name)
        for path, param in model.named_parameters():
            param.requires_grad_(param.requires_grad and not path.endswith("mask_token"))  # DDP waits for it
        return model
    model = zoo.build(name, **({"num_key_value_heads": 2} if name == "llama" else {}))
    if type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        model.loss_function = derived_zoo.double_loss  # type: ignore[assignment]
    return model.double()


def batch(model: Any, case: Case, step: int) -> dict[str, Any]:
    """Halves of the batch have equally many labels, so that the means of replicas have equal weights."""
    if model.main_input_name == "pixel_values":
        return derived_zoo.batch(model, step)
    generator = torch.Generator().manual_seed(step)
    words = (BATCH, case.length)
    ids = torch.randint(5, zoo.VOCABULARY, words, generator=generator)
    labels = torch.randint(5, zoo.VOCABULARY, words, generator=generator)
    given: dict[str, Any] = {"input_ids": ids, "labels": labels, "use_cache": False}
    if case.kind == "padded":
        mask = torch.ones_like(ids)
        missing = (case.length + 1) // 3
        mask[::2, :missing] = 0
        mask[1::2, case.length - missing :] = 0
        labels[mask == 0] = -100
        ids[mask == 0] = 1  # the padding of these models
        given["attention_mask"] = mask
    if case.kind == "packed":
        starts = [0, case.length // 3, case.length // 2]
        given["position_ids"] = torch.cat(
            [torch.arange(end - start) for start, end in zip(starts, [*starts[1:], case.length], strict=True)]
        ).expand(words)
    if "use_cache" not in inspect.signature(model.forward).parameters:
        del given["use_cache"]
    return given


class SequenceRun(BoosterRun):
    """The problem, cut as the launch says, under a plugin."""

    def __init__(self, problem: Problem, plugin: Plugin, *, whole_scores: bool = True, **how: Any) -> None:
        self.whole_scores, self.then, self.how = whole_scores, how.pop("then", None), how
        super().__init__(problem, Booster(device="cpu", plugin=plugin))

    def build(self) -> nn.Module:
        model = colossalai.nn.parallelize(super().build(), whole_scores=self.whole_scores, **self.how)
        return model if self.then is None else self.then(model)


def launch(**parallel: Any) -> None:
    torch.set_num_threads(1)
    colossalai.launch_from_torch({"parallel": parallel}, backend="gloo", verbose=False)


def check_cases(rank: int, world_size: int, port: int, cases: list[Case], **parallel: Any) -> None:
    """Every case equals the serial model: loss, every gradient, norm, and weights after steps of AdamW."""
    launch(**parallel)
    for case in cases:
        try:
            check_plan(
                case.problem(),
                lambda p, case=case: SequenceRun(p, TorchDDPPlugin(), whole_scores=case.whole_scores),  # type: ignore[misc]
                tolerance=EXACT,
            )
        except Exception as error:
            raise AssertionError(f"{case!s} on {parallel}: {type(error).__name__}: {error}") from error
