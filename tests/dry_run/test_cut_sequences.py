"""Activations of sequences that are cut: those of N times the length on N ranks are those of one rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.long_sequences import longest
from colossalai.dry_run import Parts, dry_run
from colossalai.nn import CrossEntropyLoss
from titans.loss.lm_loss import GPTLMLoss
from titans.model.bert import BERT
from titans.model.gpt import GPT

SIZES: dict[str, Any] = {"vocab_size": 1000, "hidden_size": 64, "num_heads": 4, "depth": 2}


def build(family: str, length: int, masked: bool, checkpoint: bool) -> Parts:
    sizes = {**SIZES, "max_position_embeddings": length, "checkpoint": checkpoint, "attention_dropout": 0.0}
    model = BERT(**sizes) if family == "bert" else GPT(**sizes)
    ids = torch.zeros(2, length, dtype=torch.int64)
    data = {"input_ids": ids, "attention_mask": ids} if masked else {"input_ids": ids}
    criterion = CrossEntropyLoss() if family == "bert" else GPTLMLoss()
    return Parts(model, torch.optim.SGD(model.parameters(), lr=0.1), criterion, (data, ids))


@pytest.mark.parametrize("attention", ["ring", "ulysses", "both"])
@pytest.mark.parametrize("family", ["bert", "gpt"])
def test_activations_are_those_of_a_part(family: str, attention: str) -> None:
    for masked, checkpoint in ((False, False), (True, True)):
        kept = {"masked": masked, "checkpoint": checkpoint}
        (alone,) = dry_run({}, 1, partial(build, family, 256, **kept))
        plan = {"parallel": {"sequence": {"size": 4, "attention": attention}}}
        reports = dry_run(plan, 4, partial(build, family, 4 * 256, **kept))
        assert len(reports) == 4
        for report in reports:
            assert alone.memory.activations > 1e6
            assert report.memory.activations <= 1.1 * alone.memory.activations


def test_the_longest_sequence_grows_with_the_ranks() -> None:
    model = {"depth": 1, "checkpoint": False, "vocab_size": 1000, "hidden_size": 64, "num_heads": 4}
    found = [longest(2**27, ranks, "ring", **model) for ranks in (1, 4)]
    assert 3.5 < found[1] / found[0] <= 4.1
