from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.nn import functional as F

from colossalai.amp.fp8 import (
    BACKWARD,
    FORWARD,
    Float8Linear,
    check_device,
    fp8_linear,
    quantize,
    swap_linears,
)
from colossalai.booster import Booster
from colossalai.booster.mixed_precision import FP8MixedPrecision
from titans.model.gpt import GPT

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# of the norm: roundings to 3 and to 2 bits of mantissa are about 2.6% and 5%, and each product has two
RELATIVE = {"out": 0.05, "x": 0.08, "weight": 0.08, "bias": 0.01}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    eye = torch.eye(16, device=request.param).to(FORWARD)
    one = torch.ones((), device=request.param)
    try:
        torch._scaled_mm(eye, eye.t(), one, one, out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"torch {torch.__version__} has no fp8 product on {request.param}: {error}")
    return request.param


def _gpt(**options: Any) -> GPT:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "max_position_embeddings": 16, "hidden_size": 32, "num_heads": 2, "depth": 2}
    return GPT(**{**sizes, **options}, dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0)


@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_rounding_uses_the_whole_range_of_the_format(dtype: torch.dtype, size: float) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * size
    x8, factor = quantize(x, dtype)
    limit = torch.finfo(dtype).max
    assert limit / 2 < x8.float().abs().max() <= limit
    assert factor.log2() == factor.log2().round()
    error = (x8.float() * factor - x).norm() / x.norm()
    assert error < (0.04 if dtype is FORWARD else 0.07)


def test_rounding_of_odd_values() -> None:
    x8, factor = quantize(torch.zeros(4), FORWARD)
    assert torch.equal(x8.float() * factor, torch.zeros(4))
    for bad in (float("inf"), float("nan")):
        x8, factor = quantize(torch.tensor([1.0, bad]), FORWARD)
        assert (x8.float() * factor).isnan().all()  # never a number that looks healthy


@pytest.mark.parametrize("shape", [(32, 48), (3, 7, 48), (48,)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_close_to_fp32(
    device: str, shape: tuple[int, ...], bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 64, bias=bias).to(device)
    x = torch.randn(*shape, device=device).requires_grad_()
    grad = torch.randn(*shape[:-1], 64, device=device)

    def run(product: Any) -> dict[str, Tensor]:
        out = product(x.to(dtype), linear.weight, linear.bias)
        tensors = {"x": x, **dict(linear.named_parameters())}
        grads = torch.autograd.grad(out, list(tensors.values()), grad.to(out.dtype))
        return {"out": out, **dict(zip(tensors, grads, strict=True))}

    got = run(fp8_linear)
    assert got["out"].dtype is dtype
    assert got["weight"].dtype is torch.float32
    expected = run(lambda x, w, b: F.linear(x.float(), w, b))
    for name, value in expected.items():
        assert got[name].shape == value.shape
        error = (got[name].float() - value).norm() / value.norm()
        assert error < RELATIVE[name], name
        if name != "bias":
            assert error > 1e-3, name  # it was fp8


def test_under_autocast_the_result_has_its_dtype(device: str) -> None:
    linear = Float8Linear(16, 16).to(device)
    with torch.autocast(device, torch.bfloat16):
        assert linear(torch.ones(4, 16, device=device)).dtype is torch.bfloat16
        assert linear(torch.ones(0, 16, device=device)).shape == (0, 16)


def test_frozen_parts_get_no_gradient(device: str) -> None:
    linear = Float8Linear(16, 16).to(device)
    linear.weight.requires_grad_(False)
    x = torch.ones(4, 16, device=device, requires_grad=True)
    linear(x).sum().backward()
    assert x.grad is not None
    assert linear.weight.grad is None
    assert torch.equal(linear.bias.grad, torch.full((16,), 4.0, device=device))


def test_layers_are_swapped_in_place() -> None:
    model = _gpt()
    state = copy.deepcopy(model.state_dict())
    parameters = dict(model.named_parameters())
    names = swap_linears(model)
    assert len(names) == 8  # four in each block
    assert all(name.startswith("blocks.") for name in names)
    assert dict(model.named_parameters()) == parameters
    assert list(model.state_dict()) == list(state)
    assert all(isinstance(model.get_submodule(name), Float8Linear) for name in names)
    other = _gpt()
    other.load_state_dict(model.state_dict())
    assert type(copy.deepcopy(model).get_submodule(names[0])) is Float8Linear


def test_what_is_left_alone() -> None:
    class Own(nn.Linear):
        pass

    layers = {
        "odd": nn.Linear(16, 17),
        "own": Own(16, 16),
        "plain": nn.Linear(16, 32),
        "lm_head": nn.Linear(16, 16),
        "words": nn.Embedding(32, 16),
        "attention": nn.MultiheadAttention(16, 2),
    }
    model = nn.ModuleDict(layers)
    tied = nn.Linear(16, 32)
    tied.weight = layers["words"].weight
    model["tied"] = tied
    assert swap_linears(model) == ["plain"]
    assert swap_linears(model, lambda name, linear: True) == ["lm_head"]


def test_nothing_to_do_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"fp8 finds nothing to do in Sequential: of its 2 nn.Linear layers, 1 have"
    ):
        swap_linears(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 3)), lambda name, linear: False)


def test_the_cpu_is_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"'fp8' needs a GPU with fp8 matrix products .*the model is on the CPU"
    ):
        Booster(device="cpu", mixed_precision="fp8").boost(nn.Linear(16, 16))


def test_old_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(RuntimeError, match=r"NVIDIA A100 has 8\.0\. Use 'bf16' here"):
        check_device(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_device(torch.device("cuda"))


def _losses(precision: Any, device: str, steps: int = 20, lr: float = 3e-3, **options: Any) -> Tensor:
    """Of a GPT that learns sequences of period 4."""
    model = _gpt(**options)
    raw = torch.optim.AdamW(model.parameters(), lr=lr)
    booster = Booster(device=device, mixed_precision=precision)
    boosted, optimizer, *_ = booster.boost(model, raw)
    losses = []
    for step in range(steps):
        words = torch.randint(64, (8, 4), generator=torch.Generator().manual_seed(step))
        tokens = words.repeat(1, 4).to(device)
        optimizer.zero_grad()
        logits = boosted(tokens)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        booster.backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.detach().cpu())
    return torch.stack(losses)


def _check_losses(device: str, **options: Any) -> None:
    reference = _losses("bf16", device, **options)
    losses = _losses("fp8", device, **options)
    assert reference[-1] < reference[0] - 0.1
    assert (losses - reference).abs().max() < 0.05
    assert not torch.equal(losses, reference)


def test_the_loss_follows_bf16(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":  # the products work there, only slowly
        monkeypatch.setattr("colossalai.booster.mixed_precision.bf16.check_device", lambda device: None)
    _check_losses(device)


@pytest.mark.gpu
def test_a_wider_model_follows_bf16_also_when_compiled() -> None:
    # a rate at which bf16 itself is steady: at 3e-3 its loss jumps by half between steps
    _check_losses("cuda", hidden_size=512, num_heads=8, lr=3e-4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
    eager, *_ = FP8MixedPrecision().configure(model)
    x = torch.randn(64, 512, device="cuda")
    compiled = torch.compile(eager)(x)
    torch.testing.assert_close(compiled.float(), eager(x).float(), rtol=0.1, atol=0.05)
