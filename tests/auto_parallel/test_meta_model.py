"""A plan leaves no trace in a model, and says so where it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.auto_parallel.checkpoint import auto_checkpoint

ROWS = torch.ones(64, 16)


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.inner(x)
        return found


class Net(nn.Module):
    """Three blocks of a kind."""

    def __init__(self, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Positions:
    """Keeps what it has computed, as rotary embeddings do."""

    def __init__(self) -> None:
        self.calls = 0
        self.scale = torch.ones(16)
        self.table: Tensor | None = None
        self.known: dict[int, Tensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.table is None:
            self.table = torch.arange(16, device=x.device) / 16
            self.known[16] = self.table * 2
        return x * self.scale + self.table + self.known[16]


class WithPositions(Block):
    """Holds an object that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.positions(x))


def test_objects_of_modules_keep_nothing_of_the_play() -> None:
    model: Any = Net(WithPositions)
    plan = auto_checkpoint(model, ROWS, "10 MiB")
    assert not plan.notes  # it was played on the meta device
    for layer in model.layers:
        positions = layer.positions
        assert positions.calls == 0
        assert positions.table is None
        assert not positions.known
    model(ROWS).sum().backward()


CACHE: dict[Any, Any] = {}


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    yield
    CACHE.clear()


class WithCache(Block):
    """Keeps what it has computed outside of the model."""

    def forward(self, x: Tensor) -> Tensor:
        if 16 not in CACHE:
            CACHE[16] = torch.arange(16, device=x.device) / 16
        return super().forward(x + CACHE[16])


class WithClassCache(Block):
    """Keeps it on the class."""

    cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if WithClassCache.cache is None:
            WithClassCache.cache = torch.arange(16, device=x.device) / 16
        return super().forward(x + WithClassCache.cache)


class FailsWithCache(WithCache):
    """Needs values, too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[: int((x > 0).nonzero().shape[0])]


@pytest.mark.parametrize("kind", [WithCache, FailsWithCache])
def test_caches_outside_of_the_model(kind: type[nn.Module]) -> None:
    model = Net(kind)
    with pytest.raises(
        ValueError, match=r"shape \(16,\), and lies in CACHE of .*test_meta_model.*run one step"
    ):
        auto_checkpoint(model, ROWS, "10 MiB")
    assert all(type(layer) is kind for layer in model.layers)
    CACHE.clear()
    model(ROWS)
    auto_checkpoint(model, ROWS, "10 MiB")
    model(ROWS).sum().backward()


def test_caches_on_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WithClassCache, "cache", None)  # afterwards, it is again
    with pytest.raises(ValueError, match=r"lies in WithClassCache\.cache of"):
        auto_checkpoint(Net(WithClassCache), ROWS, "10 MiB")


def table(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A table, of which a test makes one that is computed once."""
    return torch.arange(width, device=device) / width, torch.ones(width, device=device)


class WithCachesThatAreForgotten(Block):
    """Uses caches that can be put back, or that know which device they are for."""

    def forward(self, x: Tensor) -> Tensor:
        offset, scale = table(16, torch.device("cpu") if x.is_cpu else x.device)
        key = ("mask", x.device)
        if key not in CACHE:
            CACHE[key] = [torch.zeros(16, device=x.device)]
        return super().forward(x * scale + offset + CACHE[key][0])


def test_caches_that_do_without_the_play(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = lru_cache(maxsize=4)(table)  # not one that was there when our conftest froze all there was
    monkeypatch.setitem(globals(), "table", cached)
    CACHE["other"] = "stays"
    own = torch.ones(3, device="meta")
    CACHE["own", own.device] = own  # was there before
    model = Net(WithCachesThatAreForgotten)
    auto_checkpoint(model, ROWS, "10 MiB")
    assert list(CACHE) == ["other", ("own", own.device)]
    assert cached.cache_info().currsize == 0
    model(ROWS).sum().backward()


def test_a_model_on_the_meta_device_may_be_planned() -> None:
    with torch.device("meta"):
        model = Net()
    auto_checkpoint(model, ROWS, "10 MiB")
    assert all(p.is_meta for p in model.parameters())


class Criterion:
    """Keeps the last loss."""

    last: Tensor | None = None

    def __call__(self, output: Tensor, label: Tensor) -> Tensor:
        self.last = (output - label).square().mean()
        return self.last


def test_criteria_are_put_back() -> None:
    criterion = Criterion()
    auto_checkpoint(Net(), (ROWS, ROWS), "10 MiB", criterion=criterion)
    assert criterion.last is None


class Changes(Block):
    """Changes itself and what it is trained with, and has shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.history, self.mean = 0, list[Tensor](), torch.zeros(16)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(x.detach())
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        inner: Any = self.inner
        with torch.no_grad():
            inner[1].weight.mul_(0.9)
            inner[3].weight.data = inner[3].weight.data * 0.9
        rows = (x[:, 0].detach() < float("inf")).nonzero().squeeze(1)
        return super().forward(self.norm(x[rows]))


def test_real_steps_on_a_cpu_leave_no_trace() -> None:
    model: Any = Net(Changes)
    model.eval()
    model.layers[0].inner[1].weight.grad = torch.ones(64, 16)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    places = [p.data_ptr() for p in model.parameters()]
    plan = auto_checkpoint(model, ROWS, "10 MiB")
    assert "steps were run on cpu" in plan.notes[0]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [p.data_ptr() for p in model.parameters()] == places
    for layer in model.layers:
        assert (layer.calls, layer.history, layer.training) == (0, [], False)
        assert not layer.mean.any()
    assert model.layers[0].inner[1].weight.grad.sum() == 64 * 16
    assert model.layers[1].inner[1].weight.grad is None
