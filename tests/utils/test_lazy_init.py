from __future__ import annotations

import pytest
import torch
from torch import nn

from colossalai.utils.model import lazy_init_context
from colossalai.utils.model.experimental import LazyInitContext, LazyTensor


class Net(nn.Module):
    """With ties, buffers, and a constructor that draws again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.layer = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.trunc_normal_(self.layer.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layer(self.embedding(ids))))


def test_a_model_gets_the_values_that_it_would_have_had(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    plain, after = Net(), torch.rand(3)
    torch.manual_seed(0)
    with lazy_init_context.LazyInitContext(large=1):
        model = Net()
    assert torch.equal(torch.rand(3), after)
    lazy = [*model.parameters(), model.norm.running_mean, model.norm.running_var]  # no numbers from Python
    assert all(isinstance(t, LazyTensor) for t in lazy)
    assert LazyInitContext.materialize(model, verbose=True) is model
    assert capsys.readouterr().out == "7 tensors, 344 elements are materialized\n"
    assert not any(isinstance(t, LazyTensor) for t in (*model.parameters(), *model.buffers()))
    assert model.head.weight is model.embedding.weight
    for (name, value), (other, expected) in zip(
        model.state_dict().items(), plain.state_dict().items(), strict=True
    ):
        assert name == other
        assert torch.equal(value, expected), name
    ids = torch.arange(4)
    for each in (model, plain):
        each(ids).square().sum().backward()
    assert model.layer.weight.grad is not None
    torch.testing.assert_close(model.layer.weight.grad, plain.layer.weight.grad, rtol=0, atol=0)


def test_parts_of_several_contexts_and_none() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    torch.manual_seed(0)
    with LazyInitContext(large=1):
        first = nn.Linear(4, 4)
    second = nn.Linear(4, 4)
    with LazyInitContext(large=1):
        third = nn.Linear(4, 4)
    model = LazyInitContext.materialize(nn.Sequential(first, second, third))
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert LazyInitContext.materialize(model) is model
    assert not isinstance(second.weight, LazyTensor)


def test_a_model_of_the_meta_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"2 parameters have no memory.* weight, bias; build them inside"):
        LazyInitContext.materialize(nn.Linear(2, 2, device="meta"))
