"""What steps need on the CPU is what their plans say: every tensor of a real step is counted."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves
from transformers import (
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    SwinConfig,
    SwinForImageClassification,
)

from colossalai.auto_parallel.checkpoint import CheckpointPlan, CheckpointPlanner
from colossalai.auto_parallel.checkpoint.timeline import TrainingStep
from colossalai.utils.memory.live_bytes import LiveBytes
from tests.auto_parallel.models import IDS, SIZES, gpt2, unusual
from tests.auto_parallel.models import MODELS as COMMON


class Recurrent(nn.Module):
    """Layers of an LSTM or its like, one after the other."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inside = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(kind(32, 32, batch_first=True) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.inside(ids)
        for layer in self.layers:
            x, _ = layer(x)
        result: Tensor = x
        return result


class Attends(nn.Module):
    """Attention of torch, with a mask of truth values, fewer keys than queries, or dropout."""

    def __init__(self, dropout: float, heads: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 16 * heads)
        self.dropout, self.heads = dropout, heads

    def forward(self, x: Tensor) -> Tensor:
        query, key = (t.unflatten(-1, (-1, 16)).transpose(1, 2) for t in (self.query(x), self.key(x)))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        out = scaled_dot_product_attention(query, key, key, mask, self.dropout, enable_gqa=self.heads == 1)
        return x + out.transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class State:
    """What blocks may pass on, and pytree does not know."""

    hidden: Tensor
    layer: int = 0


class PassesState(nn.Module):
    """Blocks that take a dataclass and return one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor | State) -> State:
        state = x if isinstance(x, State) else State(x)
        return State(state.hidden + self.inner(state.hidden), state.layer + 1)


class TakesState(nn.Module):
    """A head behind such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 32)

    def forward(self, state: State) -> Tensor:
        return self.head(state.hidden)  # type: ignore[no-any-return]


def _passes_state() -> nn.Module:
    parts = [
        nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(8)
    ]
    return nn.Sequential(nn.Sequential(*map(PassesState, parts)), TakesState())


class Losses(nn.Module):
    """Losses of large outputs, which torch reduces in the memory of their terms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Sequential(nn.Linear(32, 64), nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        found = self.layers(x)
        near, far = torch.zeros_like(found), torch.ones_like(found)
        return (
            nn.functional.mse_loss(found, near)
            * nn.functional.smooth_l1_loss(found, far)
            * nn.functional.soft_margin_loss(found, far)
            * nn.functional.binary_cross_entropy(found.sigmoid(), far)
        )


class IndexedByLists(nn.Module):
    """Takes parts by lists of numbers, as Falcon does with its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inner(x).view(len(x), 4, 8)
        return x + (parts[:, [1]] * parts[:, [-1]] * parts[:, :2].repeat(1, 2, 1)).flatten(1)


class Codes(nn.Module):
    """Changes a frozen parameter where versions do not count it, and puts another in the place of one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.codes = nn.Parameter(torch.rand(256, 32), requires_grad=False)
        self.steps = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        hidden = torch.tanh(hidden[0] if isinstance(hidden, tuple) else hidden)
        self.codes.data.mul_(0.9).add_(hidden.detach(), alpha=0.1)
        self.steps = nn.Parameter(self.steps + 1, requires_grad=False)
        return x + hidden * self.codes.clone() * self.steps


def _codes(inner: Callable[[], nn.Module]) -> tuple[nn.Module, Any]:
    return nn.Sequential(*(Codes(inner()) for _ in range(3))), torch.rand(256, 32)


def _swin() -> nn.Module:
    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2]}
    return SwinForImageClassification(SwinConfig(**sizes, num_heads=[2, 2], window_size=4))


def _neox() -> nn.Module:
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=64, intermediate_size=64, **SIZES))


def _deberta() -> nn.Module:
    options = {**SIZES, "num_hidden_layers": 2, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
    return DebertaV2ForMaskedLM(DebertaV2Config(vocab_size=64, intermediate_size=64, **options))


def _attention(dropout: float, heads: int) -> tuple[nn.Module, Any]:
    return nn.Sequential(*(Attends(dropout, heads) for _ in range(3))), torch.rand(2, 32, 32)


class SparseWeights(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.words = kind(600, 32, sparse=True)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(3))
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers(self.words(ids))  # type: ignore[no-any-return]


class SparseGraph(SparseWeights):
    """Multiplies with a sparse matrix in each step."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding)
        self.graph = torch.rand(64, 64).relu().to_sparse()

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers(torch.sparse.mm(self.graph, self.words(ids)))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "lstm": lambda: (Recurrent(nn.LSTM), IDS),
    "gru": lambda: (Recurrent(nn.GRU), IDS),
    "rnn": lambda: (Recurrent(nn.RNN), IDS),
    "swin": lambda: (_swin(), {"pixel_values": torch.rand(2, 3, 32, 32), "labels": torch.tensor([0, 1])}),
    "neox": lambda: (_neox(), {"input_ids": IDS, "labels": IDS}),  # queries lie in memory as they are cut
    "deberta": lambda: (_deberta(), {"input_ids": IDS, "labels": IDS}),  # makes scalars on the CPU
    "losses": lambda: (Losses(), torch.rand(64, 32)),
    "writes": lambda: (unusual(True), torch.rand(64, 32)),
    "codes": lambda: _codes(lambda: nn.Linear(32, 32)),
    "lstm codes": lambda: _codes(lambda: nn.LSTM(32, 32)),
    "passes a dataclass": lambda: (_passes_state(), torch.rand(64, 32)),
    "sparse embedding": lambda: (SparseWeights(nn.Embedding), IDS.repeat(1, 8)),
    "sparse bag": lambda: (SparseWeights(nn.EmbeddingBag), IDS.repeat(32, 1)),
    "sparse graph": lambda: (SparseGraph(), torch.arange(64)),
    "lists as indices": lambda: (nn.Sequential(*(IndexedByLists() for _ in range(6))), torch.rand(16, 32)),
    "masked": lambda: _attention(0.0, 2),
    "dropping": lambda: _attention(0.1, 2),
    "grouped": lambda: _attention(0.0, 1),
}


def real_peak(step: TrainingStep, gradients: bool = False) -> int:
    """The bytes of all tensors at the worst moment of a step."""
    model = step.model
    model.zero_grad()
    for p in model.parameters() if gradients else ():
        p.grad = torch.zeros_like(p)
    batch = [leaf for leaf in tree_leaves(step.batch) if isinstance(leaf, Tensor)]
    with LiveBytes(block=512) as memory:
        memory.hold((*model.parameters(), *model.buffers(), *batch))
        memory.hold(p.grad for p in model.parameters() if p.grad is not None)
        with step.autocasts("cpu"):
            loss = step.loss(model, step.batch)
        loss.backward()
    model.zero_grad()
    return memory.peak


def plans(planner: CheckpointPlanner) -> list[CheckpointPlan]:
    low, high = planner.least[2], planner.whole
    return [planner.plan(low + (high - low) * part // 4) for part in range(5)]


@pytest.mark.parametrize("name", MODELS)
def test_peaks_of_real_steps(name: str) -> None:
    """Kernels of the CPU that the meta device does not have, too."""
    torch.manual_seed(0)
    planner = CheckpointPlanner(*MODELS[name](), device="cpu")
    for plan in plans(planner):
        planner.apply(plan)
        real = real_peak(planner.step)
        assert 0.99 * plan.peak <= real <= plan.peak <= plan.budget


class ManyKinds(nn.Module):
    """Operations that autocast on a CPU treats otherwise than on a GPU, beside some that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.group = nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(16, 16)
        self.weight, self.layer = nn.Parameter(torch.rand(4, 4)), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        found = self.group(self.conv(x)).relu()
        rows = self.layer(torch.einsum("bchw,wv->bchv", found, self.weight)).flatten(0, 1)
        found = torch.bmm(torch.bmm(rows, rows.transpose(1, 2)).softmax(-1), rows).view_as(x)
        return torch.cat([found, x], 1)[:, ::2] + torch.stack([found, x]).sum(0).exp().log1p()


def _many_kinds() -> tuple[nn.Module, Any, Any]:
    blocks = nn.Sequential(*(ManyKinds() for _ in range(6)))
    model = nn.Sequential(blocks, nn.Flatten(), nn.Linear(256, 10))
    return model, (torch.rand(32, 16, 4, 4), torch.arange(32) % 10), nn.CrossEntropyLoss()


AUTOCAST: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    **{name: COMMON[name] for name in ("bert", "resnet")},
    "gpt2": lambda: (gpt2(2), {"input_ids": IDS.repeat(4, 2), "labels": IDS.repeat(4, 2)}, None),
    "many kinds": _many_kinds,
}


@pytest.mark.parametrize("name", AUTOCAST)
def test_peaks_of_real_steps_under_autocast(name: str) -> None:
    """What is in half precision is what autocast on a CPU has so."""
    torch.manual_seed(0)
    model, batch, criterion = AUTOCAST[name]()
    planner = CheckpointPlanner(model, batch, criterion=criterion, device="cpu", autocast=torch.bfloat16)
    for plan in plans(planner):
        planner.apply(plan)
        assert 0.97 * plan.peak <= real_peak(planner.step) <= plan.peak <= plan.budget


@pytest.mark.parametrize("name", ["codes", "lstm codes"])
def test_a_plan_changes_no_parameter(name: str) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    before = [(p, p.clone()) for p in model.parameters()]
    planner = CheckpointPlanner(model, batch, device="cpu")
    plans(planner)
    for p, (same, value) in zip(model.parameters(), before, strict=True):
        assert p is same
        assert torch.equal(p, value)


def test_gradients_that_stay_are_counted() -> None:
    """A batch whose gradients are added to those of others needs more, and that is what a plan says."""
    model, batch = gpt2(4, 64, dropout=0.0), {"input_ids": IDS, "labels": IDS}
    alone = CheckpointPlanner(model, batch, device="cpu").least[2]
    planner = CheckpointPlanner(model, batch, device="cpu", accumulates=True)
    assert planner.least[2] > 1.1 * alone
    for plan in plans(planner):
        planner.apply(plan)
        assert 0.99 * plan.peak <= real_peak(planner.step, gradients=True) <= plan.peak


class LeavesOut(nn.Module):
    """Leaves out blocks at random, as models of transformers with a rate do, and with Python's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layerdrop = 0.5
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(6)
        )
        self.head = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not (torch.rand([]) < self.layerdrop and self.training):
                x = layer(x) * random.random() + float(np.random.rand())
        return self.head(x)  # type: ignore[no-any-return]


def test_layers_that_are_left_out_at_random() -> None:
    """The plan has all of them; the rate, and all random numbers, are afterwards what they were."""
    model, x = LeavesOut(), torch.rand(64, 32)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    planner = CheckpointPlanner(model, x, device="cpu")
    found = plans(planner)
    assert all(len(plan.modes) == 6 for plan in found)
    assert type(model.layerdrop) is float
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()
    for plan in found:
        planner.apply(plan)
        assert max(real_peak(planner.step) for _ in range(8)) <= plan.peak


class Sometimes(LeavesOut):
    """Leaves out blocks in a way of its own."""

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number < 2 or not self.training:
                x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def test_blocks_that_are_not_called_are_named() -> None:
    planner = CheckpointPlanner(Sometimes(), torch.rand(8, 32))
    assert any("4 blocks, such as 'layers.2', were not called" in note for note in planner.notes)


class Noisy(nn.Module):
    """Draws from Python and NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * random.random()) * float(np.random.rand())


def test_numbers_of_python_and_numpy_are_repeated() -> None:
    model, x = nn.Sequential(*(Noisy() for _ in range(3))), torch.rand(64, 32)
    found = []
    for planned in (False, True):
        if planned:
            planner = CheckpointPlanner(model, x, device="cpu", blocks=["0", "1", "2"])
            planner.apply(planner.plan(planner.least[2]))
            assert planner.least[2] < planner.whole
        random.seed(1)
        np.random.seed(1)
        model.zero_grad()
        model(x).sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]
