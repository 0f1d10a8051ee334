"""Accuracy and cross entropy of whole scores."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colossalai.nn.loss import CrossEntropyLoss
from colossalai.nn.metric import Accuracy, calc_acc
from colossalai.testing import assert_equal


def test_accuracy_counts_correct_predictions() -> None:
    logits = torch.tensor([[[0.0, 1.0], [2.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]]], requires_grad=True)
    targets = torch.tensor([[1, 1], [1, 0]])
    assert calc_acc(logits, targets) == 2
    correct = Accuracy()(logits[0], targets[0])
    assert correct == 1
    assert not correct.requires_grad
    with pytest.raises(ValueError, match=r"got scores \(2, 2, 2\) for targets \(2,\)"):
        calc_acc(logits, targets[0])


def test_cross_entropy() -> None:
    logits, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 2])
    assert_equal(CrossEntropyLoss()(logits, targets), nn.CrossEntropyLoss()(logits, targets))
    each = CrossEntropyLoss(reduction=False, label_smoothing=0.1)(logits, targets)
    assert_equal(each, nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)(logits, targets))
