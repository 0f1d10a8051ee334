"""The language-model loss."""

from __future__ import annotations

import pytest
import torch

from titans.loss.lm_loss import GPTLMLoss
from titans.loss.vocab_cross_entropy import vocab_parallel_cross_entropy
from titans.model.gpt import GPTLMLoss as FromModel


def test_each_position_predicts_the_next_token() -> None:
    logits = torch.randn(2, 4, 7)
    labels = torch.randint(0, 7, (2, 4))
    nats = [-logits[b, t].log_softmax(-1)[labels[b, t + 1]] for b in range(2) for t in range(3)]
    torch.testing.assert_close(GPTLMLoss()(logits, labels), torch.stack(nats).mean())


def test_ignored_labels_do_not_count() -> None:
    logits, labels = torch.randn(1, 5, 7), torch.randint(0, 7, (1, 5))
    expected = GPTLMLoss()(logits[:, :3], labels[:, :3])
    labels[:, 3:] = -100
    torch.testing.assert_close(GPTLMLoss()(logits, labels), expected)
    labels[:, 3:] = 6
    labels[:, :3] = 1
    torch.testing.assert_close(
        GPTLMLoss(ignore_index=6)(logits, labels), GPTLMLoss()(logits[:, :3], labels[:, :3])
    )


def test_all_names_are_one_class() -> None:
    assert FromModel is GPTLMLoss
    assert vocab_parallel_cross_entropy is GPTLMLoss


@pytest.mark.parametrize(("logits", "labels"), [((2, 4, 7), (2, 3)), ((2, 4, 7), (8,)), ((2, 1, 7), (2, 1))])
def test_wrong_shapes_are_refused(logits: tuple[int, ...], labels: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"labels of shape \(batch, sequence\) .* got \(2, \d, 7\) and \("):
        GPTLMLoss()(torch.zeros(logits), torch.zeros(labels, dtype=torch.int64))
