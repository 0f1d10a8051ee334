"""A model that is built without memory gets, in part or whole, the values it would have had."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from colossalai.mesh.weights.deferred import Deferred, _Scratch, recording_of
from colossalai.nn import init
from titans.model.gpt import GPT
from titans.model.resnet import resnet18
from titans.model.vit import VisionTransformer


class Odd(nn.Module):
    """A constructor that does all sorts of things to its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 5)]
        self.positions = nn.Parameter(nn.init.trunc_normal_(torch.zeros(1, 5, 8), std=0.02))
        self.scaled = nn.Parameter(torch.randn(7, 8) * 0.1)
        self.inner = nn.Linear(8, 8).double()
        nn.init.orthogonal_(self.inner.weight)
        self.register_buffer("mask", torch.tril(torch.ones(6, 6)))
        self.table = torch.arange(20)
        with torch.no_grad():
            self.scaled[2:3].fill_(4.0)
            self.scaled[:, 1] = 1
            self.positions.copy_(torch.rand(8, 5).t())
            if self.scaled.max() > 3:  # a decision that needs values
                self.inner.bias.zero_()


def _weight(make: Callable[[], Tensor]) -> Callable[[], nn.Module]:
    return lambda: nn.ParameterList([nn.Parameter(make())])


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(10, 10),
    "padding": lambda: nn.Embedding(100, 16, padding_idx=3),
    "torch": lambda: nn.Sequential(nn.TransformerEncoderLayer(16, 2), nn.LSTM(16, 16)),
    "odd": Odd,
    "half": lambda: Odd().half(),
    "sparse": _weight(lambda: nn.init.sparse_(torch.empty(10, 10), 0.5)),
    "dirac": _weight(lambda: nn.init.dirac_(torch.empty(5, 5, 3))),
    "permutation": _weight(lambda: torch.randperm(40).float()),
    "transposed": _weight(lambda: torch.randn_like(torch.empty(30, 20).t())),
    "resnet": resnet18,
    "gpt": lambda: GPT(64, 8, 16, 2, 2, padding_idx=3),
    "vit": lambda: VisionTransformer(8, 4, 3, 10, 2, 2, 16, init_method="jax", representation_size=8),
    "own": _weight(lambda: init.lecun_normal_()(torch.empty(8, 9))),
}


@pytest.mark.parametrize("large", [1, 100, 10**9])
@pytest.mark.parametrize("name", BUILDERS)
def test_values_and_generator_are_as_without(name: str, large: int) -> None:
    torch.manual_seed(0)
    expected, drawn_after = BUILDERS[name](), torch.rand(3)
    torch.manual_seed(0)
    with Deferred(large) as recording:
        model = BUILDERS[name]()
        assert all(not t.is_meta and t.device.type == "cpu" for t in model.state_dict().values())
    assert torch.equal(torch.rand(3), drawn_after)
    deferred = [n for n, t in model.state_dict().items() if recording_of(t) is not None]
    assert bool(deferred) == (large <= max(t.numel() for t in expected.state_dict().values()))
    state = torch.get_rng_state()
    assert recording.materialize(model) is model
    assert torch.equal(torch.get_rng_state(), state)
    assert list(model.state_dict()) == list(expected.state_dict())
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=0, atol=0, equal_nan=True)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in expected.parameters()]
    if isinstance(model, Odd):
        assert (model.rates, model.table.tolist()) == (expected.rates, expected.table.tolist())


def test_a_part_alone_and_what_is_tied() -> None:
    torch.manual_seed(0)
    expected = GPT(64, 8, 16, 2, 3)
    torch.manual_seed(0)
    with Deferred(1) as recording:
        model = GPT(64, 8, 16, 2, 3)
    part = nn.ModuleList([model.blocks[1], model.head, model.embed])
    recording.materialize(part)
    assert model.head.dense.weight is model.embed.word_embeddings.weight
    assert {n for n, p in model.named_parameters() if recording_of(p) is None} == {
        n for n, _ in model.named_parameters() if n.startswith(("blocks.1.", "head.", "embed."))
    }
    serial = dict(expected.named_parameters())
    for name, p in model.named_parameters():
        assert torch.equal(p, serial[name])  # computed and forgotten, where the layer has no memory


def test_a_source_that_has_changed_is_noticed() -> None:
    source = torch.ones(80, 80)  # a smaller one is copied
    with Deferred(1) as recording:
        layer = nn.Linear(80, 80)
        with torch.no_grad():
            layer.weight.copy_(source)
    source.add_(1)
    with pytest.raises(
        RuntimeError, match=r"a tensor of shape \(80, 80\) .* has changed since; give the model a clone"
    ):
        recording.materialize(layer)


def test_what_cannot_be_postponed_is_named() -> None:
    with (
        Deferred(4),
        pytest.raises(RuntimeError, match=r"calls aten\._foreach_zero_.*, which cannot be postponed"),
    ):
        torch._foreach_zero_([torch.ones(2), torch.empty(8)])


def test_recording_of_a_tensor() -> None:
    assert recording_of(torch.empty(8, device="meta")) is None
    with Deferred(1) as recording:
        weight = torch.empty(8)
        assert recording_of(weight) is recording
        assert recording_of(torch.tensor(1.0)) is None
    assert recording_of(weight) is recording  # until it has memory
    for shape in (weight.to("meta"), torch.empty_like(weight, device="meta")):
        assert shape.is_meta
        assert recording_of(shape) is None
    recording.fill([weight])
    assert recording_of(weight) is None


def test_numbers_that_are_thrown_away_take_the_same_memory() -> None:
    scratch, cpu = _Scratch(), torch.device("cpu")
    shapes = [torch.empty(4, 6).t(), torch.empty(3, dtype=torch.float64)]
    one, other = scratch.like(shapes, cpu)
    assert one.stride() == (1, 6)
    assert other.dtype is torch.float64
    assert [t.data_ptr() for t in scratch.like(shapes, cpu)] == [one.data_ptr(), other.data_ptr()]
    assert scratch.like([torch.empty(2, 2)], cpu)[0].data_ptr() == one.data_ptr()
    assert scratch.like([torch.empty(9, 9)], cpu)[0].untyped_storage().nbytes() == 9 * 9 * 4
