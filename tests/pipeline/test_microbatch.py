"""What of a batch is cut into micro-batches, and what goes to all of them."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from colossalai.interface.nest import batch_size
from colossalai.pipeline.p2p import PipelineError
from colossalai.pipeline.pipeline import count_samples, split_microbatches
from colossalai.testing import parameterize, spawn
from tests.pipeline.plans import HIDDEN, config, launch, problem
from tests.pipeline.test_engine import SCHEDULES, _engine

X, Y = torch.arange(32.0).view(8, 4), torch.arange(8)


def test_tensors_of_one_row_are_for_all_samples() -> None:
    """Also where the first tensor of a dict is one: its length was once taken for the batch size."""
    data = {"positions": torch.arange(4)[None], "scale": torch.tensor(2.0), "x": X}
    parts = split_microbatches(data, Y, 4)
    assert len(parts) == 4
    for i, (part, label) in enumerate(parts):
        assert part["positions"].shape == (1, 4)
        assert part["scale"] is data["scale"]
        assert torch.equal(part["x"], X[2 * i : 2 * i + 2])
        assert label.tolist() == [2 * i, 2 * i + 1]
    assert batch_size(data) == 8
    assert count_samples({"x": torch.ones(1, 4)}) == 1


def test_the_label_tells_how_many_samples_there_are() -> None:
    """Whatever other tensors there are, and however many."""
    data = {"a": torch.ones(5), "b": torch.ones(5), "c": torch.ones(5), "x": X}
    first, _ = split_microbatches(data, Y, 2)
    assert [len(first[0][name]) for name in "abcx"] == [5, 5, 5, 4]
    assert count_samples({"weights": torch.ones(5), "x": X, "mask": X > 3}) == 8  # or most tensors


def test_a_number_of_samples_that_is_not_clear() -> None:
    message = (
        r"number of samples is not clear.*data\['weights'\] 5, data\['x'\] 8, label 7\. A tensor for all"
    )
    with pytest.raises(ValueError, match=message):
        split_microbatches({"weights": torch.ones(5), "x": X}, torch.ones(7), 1)
    with pytest.raises(ValueError, match=r"data\[0\] 5, data\[1\] 8\. A tensor for all samples must have"):
        count_samples((torch.ones(5), X))


def test_lists_and_arrays_with_an_item_for_each_sample() -> None:
    names = [f"sample {i}" for i in range(8)]
    boxes = [{"box": torch.ones(i, 4)} for i in range(8)]
    data = {"x": X, "name": names, "boxes": boxes, "other": ["a", "b"], "size": (3,) * 8}
    second, label = split_microbatches(data, np.arange(8), 2)[1]
    assert second["name"] == names[4:]
    assert [len(item["box"]) for item in second["boxes"]] == [4, 5, 6, 7]
    assert second["other"] == ["a", "b"]
    assert second["size"] == (3,) * 8  # a tuple is no list of samples
    assert label.tolist() == [4, 5, 6, 7]
    pair = [torch.zeros(2), torch.zeros(2)]  # two arguments, not two samples
    assert [len(t) for t in split_microbatches(pair, None, 2)[0][0]] == [1, 1]


def test_a_mapping_that_torch_does_not_know() -> None:
    parts = split_microbatches(UserDict(x=X), Y, 2)
    assert torch.equal(parts[1][0]["x"], X[4:])


class Listed(nn.Module):
    """A loss for labels in several forms."""

    def forward(self, output: Tensor, target: Any = None, weight: float = 1.0) -> Tensor:
        if target is None:
            return output.square().mean()
        return weight * nn.functional.cross_entropy(output, torch.as_tensor(target))


@parameterize("schedule", list(SCHEDULES))
def check_labels(rank: int, world_size: int, port: int, schedule: str) -> list[float | None]:
    settings = config(schedule, 2, 4, SCHEDULES[schedule])
    if not torch.distributed.is_initialized():
        launch(settings)
    x, y = problem().batches[0]
    row = torch.zeros(1, HIDDEN)
    engine = _engine(settings, criterion=Listed())
    losses = []
    for label in ({"target": y, "weight": 0.5}, {"target": y.numpy()}, {"target": y.tolist()}, None):
        engine.zero_grad()
        loss = engine.execute_schedule(iter([(x + row, label)]))[2]
        losses.append(None if loss is None else loss.item())
    found = [loss for loss in losses if loss is not None]
    if found:
        assert found[1] == found[2] == pytest.approx(2 * found[0], rel=1e-6)
    return losses


def test_labels_that_are_no_tensors() -> None:
    spawn(check_labels, 2)


def check_refused_label(rank: int, world_size: int, port: int, kind: str) -> None:
    settings = config("1f1b", 2, 4)
    launch(settings)
    engine = _engine(settings)
    x, y = problem().batches[0]
    label, told = {
        "list": (y.tolist(), "with the label, a list of 4 int: too many positional arguments"),
        "none": (None, "with the label, NoneType: missing a required argument: 'target'"),
        "dict": ({"y": y}, "with the label, a dict of 'y': .*'target'"),
    }[kind]
    with pytest.raises((TypeError, PipelineError), match=r"the criterion CrossEntropyLoss\(input: .*" + told):
        engine.execute_schedule(iter([(x, label)]))


@pytest.mark.parametrize("kind", ["list", "none", "dict"])
def test_a_label_that_the_criterion_cannot_take(kind: str) -> None:
    spawn(check_refused_label, 2, kind=kind)
