"""With one rank the layers are torch's own functions: equal values, one graph for torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import colossalai.nn as col_nn
from colossalai.nn.layer import utils


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.rms = col_nn.Embedding(50, 16), col_nn.LayerNorm(16), col_nn.RMSNorm(16)
        self.up, self.down = col_nn.Linear(16, 64), col_nn.Linear(64, 16)
        self.drop, self.path = col_nn.Dropout(0.1), col_nn.DropPath(0.1)
        self.head = col_nn.Classifier(16, 50, weight=self.embed.weight)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.path(self.drop(self.down(nn.functional.gelu(self.up(self.norm(x))))))
        return self.head(self.rms(x))


class Native(Block):
    def __init__(self, other: Block) -> None:
        super().__init__()
        self.embed, self.norm, self.rms = nn.Embedding(50, 16), nn.LayerNorm(16), nn.RMSNorm(16)
        self.up, self.down, self.head = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 50)
        self.head.weight = self.embed.weight
        self.load_state_dict(other.state_dict())


def test_equal_to_torch_bit_for_bit() -> None:
    ours = Block().eval()
    theirs = Native(ours).eval()
    ids = torch.randint(50, (4, 6))
    assert torch.equal(ours(ids), theirs(ids))
    loss, expected = (
        col_nn.CrossEntropyLoss()(ours(ids), ids),
        nn.CrossEntropyLoss()(theirs(ids).flatten(0, 1), ids.flatten()),
    )
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    for (name, p), (other, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(p.grad, q.grad)
    assert type(ours.up.weight) is nn.Parameter
    assert all(type(p) is nn.Parameter for p in ours.parameters())


def test_one_graph() -> None:
    model = Block()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(torch.randint(50, (4, 6))).sum().backward()
    assert model.up.weight.grad is not None


def test_dropout_draws_from_torch_unless_asked_otherwise() -> None:
    x, layer = torch.ones(1000), col_nn.Dropout(0.3)
    torch.manual_seed(0)
    got = layer(x)
    torch.manual_seed(0)
    assert torch.equal(got, nn.functional.dropout(x, 0.3))
    with col_nn.plan_independent_dropout(1):
        first, second = layer(x), layer(x)
    with col_nn.plan_independent_dropout(1):
        assert torch.equal(layer(x), first)
    assert not torch.equal(first, second)
    assert 0.2 < (first == 0).float().mean() < 0.4
    assert torch.equal(layer.eval()(x), x)
    path = col_nn.DropPath(0.5)
    with col_nn.plan_independent_dropout(2):
        kept = path(torch.ones(200, 3, 2))
    assert 50 < (kept[:, 0, 0] == 0).sum() < 150
    assert ((kept == 0).all((1, 2)) | (kept == 2).all((1, 2))).all()


class Checkpointed(utils.CheckpointModule):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.drop = 0, col_nn.Dropout(0.5)
        self.scales: list[float] = []

    def _forward(self, x: Tensor, *, scale: float) -> Tensor:
        self.calls += 1
        self.scales.append(scale)
        return self.drop(x * scale).sin()


def test_checkpoint_module_runs_again_with_the_same_numbers() -> None:
    module = Checkpointed()
    x = torch.randn(100, requires_grad=True)
    with col_nn.plan_independent_dropout(4):
        y = module(x, scale=2.0)
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert len(module.scales) == 2
    assert module.calls == 1  # in one forward pass
    kept = y != 0
    torch.testing.assert_close(grad[kept], 4 * torch.cos(4 * x[kept]))
    assert (grad[~kept] == 0).all()


def test_marks_of_pieces() -> None:
    p = nn.Parameter(torch.zeros(2, 3))
    col_nn.set_tensor_parallel_attribute_by_size(p, 24)
    assert (p.is_tensor_parallel, p.num_partitions) == (True, 4)
    col_nn.set_tensor_parallel_attribute_by_partition(p, 1)
    assert (p.is_tensor_parallel, p.num_partitions) == (False, 1)
    assert col_nn.get_tensor_parallel_mode() is None
    assert col_nn.to_2tuple(3) == (3, 3)


def test_initializers() -> None:
    init = col_nn.init
    torch.manual_seed(0)
    t = torch.empty(400, 300)
    for make, std in (
        (init.kaiming_normal_(nonlinearity="relu"), (2 / 300) ** 0.5),
        (init.kaiming_uniform_(mode="fan_out", nonlinearity="relu"), (2 / 400) ** 0.5),
        (init.xavier_uniform_(), (2 / 700) ** 0.5),
        (init.xavier_normal_(), (2 / 700) ** 0.5),
        (init.lecun_uniform_(), (1 / 300) ** 0.5),
        (init.lecun_normal_(), (1 / 300) ** 0.5),
        (init.trunc_normal_(std=0.5, a=-0.5, b=0.5), 0.5 * 0.5396),
        (init.normal_(1.0, 3.0), 3.0),
        (init.uniform_(2.0, 5.0), 3 / 12**0.5),
        (init.ones_(), 0.0),
    ):
        make(t)
        assert float(t.std()) == pytest.approx(std, rel=0.02), make
    assert float(init.zeros_()(t).abs().max()) == 0
    bias = torch.empty(1000)
    assert float(init.BIAS(bias, fan_in=16).abs().max()) <= 0.25
    with pytest.raises(ValueError, match="needs fan_in for a tensor of fewer than two dims"):
        init.kaiming_uniform_()(bias)
    with pytest.raises(ValueError, match="mode must be 'fan_in' or 'fan_out', got 'in'"):
        init.kaiming_uniform_(mode="in")
    with pytest.raises(ValueError, match="needs low < high"):
        init.trunc_normal_(a=1, b=0)
