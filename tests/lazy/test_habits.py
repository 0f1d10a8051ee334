"""What scripts do to a model between its constructor and ``boost`` has the same effect without memory."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.booster import Booster
from colossalai.lazy import LazyInitContext, materialize
from colossalai.mesh.weights.deferred import recording_in, recording_of
from colossalai.pipeline import split_model
from colossalai.pipeline.stage import Placement

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")


def _gpt2() -> Any:
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=67, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def _initialize(model: Any) -> None:
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.xavier_uniform_(p)
    model.transformer.wte.weight.data.normal_(0, 3)
    with torch.no_grad():
        model.transformer.wpe.weight[3] = 0
        model.transformer.wpe.weight[:, 1].mul_(2)


def _look(model: Any) -> None:
    model.transformer.h[0].requires_grad_(False)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in _gpt2().parameters())
    assert "wte" in str(model)
    assert str(model.transformer.wte.weight)


def _load(model: Any) -> None:
    torch.manual_seed(5)
    model.load_state_dict(_gpt2().state_dict())


def _assign(model: Any) -> None:
    torch.manual_seed(5)
    model.load_state_dict(_gpt2().state_dict(), assign=True)
    model.tie_weights()


def _read(model: Any) -> None:
    weight = model.transformer.wte.weight.detach()
    total = weight.sum().item() + float(weight[0, 0]) + weight.numpy().sum() + weight[1].tolist()[0]
    model.transformer.wpe.weight.data.mul_(total)


def _new_weights(model: Any) -> None:
    model.transformer.wte.weight = nn.Parameter(model.transformer.wte.weight * 2)
    model.transformer.ln_f.weight.data = torch.full((16,), 3.0)
    model.tie_weights()
    torch.nn.utils.parameters_to_vector(model.parameters())


HABITS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: None,
    "half": lambda model: model.half(),
    "to float64": lambda model: model.to("cpu", torch.float64),
    "initializers": _initialize,
    "tie_weights": lambda model: model.tie_weights(),
    "resize": lambda model: model.resize_token_embeddings(80),
    "look and freeze": _look,
    "deepcopy": copy.deepcopy,
    "load_state_dict": _load,
    "load_state_dict assign": _assign,
    "apply": lambda model: model.apply(
        lambda m: nn.init.constant_(m.weight, 2.0) if isinstance(m, nn.LayerNorm) else None
    ),
    "read": _read,
    "new weights": _new_weights,
}


def _after(habit: Callable[[Any], Any], *, lazy: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if lazy:
        with LazyInitContext(large=1):
            model = _gpt2()
        assert recording_in(model) is not None
    else:
        model = _gpt2()
    result = habit(model)
    model = result if isinstance(result, type(model)) else model
    before = list(model.parameters())
    materialize(model)
    assert recording_in(model) is None
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    return model, torch.rand(2)


@pytest.mark.parametrize("name", HABITS)
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_a_habit_before_boost(name: str) -> None:
    (serial, drawn), (model, also) = (_after(HABITS[name], lazy=lazy) for lazy in (False, True))
    assert torch.equal(drawn, also)
    assert model.lm_head.weight is model.transformer.wte.weight
    for one, other in (
        (serial.named_parameters(), model.named_parameters()),
        (serial.named_buffers(), model.named_buffers()),
    ):
        for (name_a, a), (name_b, b) in zip(one, other, strict=True):
            assert name_a == name_b
            assert (type(a), a.dtype, a.requires_grad) == (type(b), b.dtype, b.requires_grad)
            assert torch.equal(a, b), name_a


def test_an_optimizer_that_was_built_before_trains_the_model() -> None:
    with LazyInitContext(large=1):
        model = nn.Linear(4, 4)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)  # with states from the beginning
    boosted, optimizer, *_ = Booster(device="cpu").boost(model, optimizer)
    before = model.weight.detach().clone()
    boosted(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_values_can_be_saved_and_looked_at() -> None:
    torch.manual_seed(0)
    with LazyInitContext(large=1):
        model = _gpt2()
    weight = model.transformer.wte.weight
    assert repr(weight) == "Parameter(without memory yet, shape=(67, 16), dtype=torch.float32, device='cpu')"
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    stored = torch.load(file)
    assert recording_of(weight) is not None
    materialize(model)
    assert all(torch.equal(stored[name], value) for name, value in model.state_dict().items())


def test_refusals() -> None:
    with LazyInitContext(large=1) as context:
        model = _gpt2()
        with pytest.raises(RuntimeError, match="this LazyInitContext is open already"):
            context.__enter__()
    with pytest.raises(RuntimeError, match=r"embedding\(\) needs the weights .* call booster.boost"):
        model(input_ids=torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(RuntimeError, match=r"register_hook\(\) on a weight .* after booster.boost"):
        model.lm_head.weight.register_hook(print)
    with pytest.raises(RuntimeError, match=r"data_ptr\(\) needs the weights"):
        model.lm_head.weight.data_ptr()
    with pytest.raises(ValueError, match=r"large=...\) is a number of elements, got 'all'"):
        LazyInitContext(large="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="name the device where the weights will lie"):
        LazyInitContext("meta")


def test_two_models_in_two_blocks() -> None:
    torch.manual_seed(0)
    with LazyInitContext(large=1):
        teacher = _gpt2()
    with LazyInitContext(large=1):
        student = _gpt2()
        with torch.no_grad():
            student.transformer.wpe.weight.add_(teacher.transformer.wpe.weight)
    student.transformer.wte.load_state_dict(teacher.transformer.wte.state_dict())
    torch.manual_seed(0)
    expected, other = _gpt2(), _gpt2()
    materialize(student)
    assert torch.equal(student.transformer.wte.weight, expected.transformer.wte.weight)
    both = other.transformer.wpe.weight + expected.transformer.wpe.weight
    assert torch.equal(student.transformer.wpe.weight, both)
    assert recording_in(teacher) is not None


class _Norm(nn.Module):
    """It has weights, and nothing says which."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


def test_a_model_on_the_meta_device_is_drawn_as_it_says() -> None:
    for resize in (False, True):
        with torch.device("meta"):
            model = _gpt2()
        if resize:  # it cannot be built again from its config
            model.transformer.wpe = nn.Embedding(20, 16, device="meta")
        torch.manual_seed(0)
        Booster(device="cpu").boost(model)
        torch.manual_seed(0)
        serial = _gpt2()
        found = {n: torch.equal(p, dict(serial.named_parameters())[n]) for n, p in model.named_parameters()}
        assert all(found.values()) != resize
        assert 0.015 < model.transformer.wte.weight.std() < 0.025  # the model's, not torch's
        assert model.lm_head.weight is model.transformer.wte.weight
    with torch.device("meta"):
        own = nn.Sequential(nn.Linear(4, 4), _Norm())
    with pytest.raises(ValueError, match=r"nothing says how to fill '1.weight' of Sequential"):
        Booster(device="cpu").boost(own)
    with torch.device("meta"):
        own = nn.Sequential(nn.Linear(4, 4))
    torch.manual_seed(0)
    Booster(device="cpu").boost(own)
    torch.manual_seed(0)
    assert torch.equal(own[0].weight, nn.Linear(4, 4).weight)


def test_a_stage_that_was_cut_on_the_meta_device_is_drawn_as_the_model() -> None:
    def stage() -> nn.Module:
        torch.manual_seed(0)
        with torch.device("meta"):
            model = _gpt2()
        return split_model(model, Placement(2), 1)

    torch.manual_seed(0)
    serial = _gpt2().state_dict()
    model, *_ = Booster().boost(stage())
    found = model.state_dict()
    assert {name for name in found if ".h." in name} == {name for name in serial if ".h.1." in name}
    assert all(torch.equal(value, serial[name]) for name, value in found.items())
    with pytest.raises(ValueError, match="was cut on the meta device, and its parameters or buffers"):
        Booster().boost(stage().half())
