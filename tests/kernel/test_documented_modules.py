"""The modules and functions of ``colossalai.kernel`` equal compositions of PyTorch, with their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossalai.kernel import AttnMaskType, FusedScaleMaskSoftmax, LayerNorm, MultiHeadAttention, jit

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_each = pytest.mark.parametrize("device", DEVICES)
CLOSE: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.float16: {"rtol": 1e-2, "atol": 5e-3},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
}


def _compare(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], leaves: list[Tensor], dtype: torch.dtype
) -> None:
    """Results and the gradients of ``leaves``."""
    found = []
    for run in (ours, theirs):
        for leaf in leaves:
            leaf.grad = None
        y = run()
        torch.manual_seed(1)
        y.backward(torch.randn(y.shape, dtype=torch.float32).to(y))
        found.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, **CLOSE[dtype])


@on_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_layer_norm(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for weights in (torch.float32, dtype):
        norm = LayerNorm((3, 8), eps=1e-3, dtype=weights, device=device)
        nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
        x = torch.randn(4, 3, 8, device=device, dtype=dtype, requires_grad=True)

        def plain(norm: LayerNorm = norm, x: Tensor = x) -> Tensor:
            wide = F.layer_norm(x.float(), (3, 8), norm.weight.float(), norm.bias.float(), 1e-3)
            return wide.to(norm.weight.dtype)

        _compare(lambda norm=norm, x=x: norm(x), plain, [x, *norm.parameters()], dtype)
    assert LayerNorm(8).normalized_shape == (8,)
    assert list(norm.state_dict()) == ["weight", "bias"]


@on_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [AttnMaskType.padding, AttnMaskType.causal])
@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_softmax(device: str, dtype: torch.dtype, kind: AttnMaskType, fusion: bool, masked: bool) -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 3, 4, 6, device=device, dtype=dtype, requires_grad=True)
    mask = torch.rand(2, 1, 4, 6, device=device) > 0.6
    mask[..., 0] = False
    module = FusedScaleMaskSoftmax(
        dtype is torch.float16,
        dtype is torch.bfloat16,
        kind,
        fusion,
        lambda x, mask: x.masked_fill(mask, torch.finfo(x.dtype).min),
        True,
        0.3,
    )

    def plain() -> Tensor:
        hidden = mask if masked else torch.zeros_like(mask)
        if kind is AttnMaskType.causal:  # the last query sees all keys
            hidden = hidden | torch.ones(4, 6, device=device).triu(3).bool()
        return (scores.float() * 0.3).masked_fill(hidden, -math.inf).softmax(-1).to(dtype)

    _compare(lambda: module(scores, mask if masked else None), plain, [scores], dtype)


def test_softmax_refuses_what_it_cannot_do() -> None:
    padding = AttnMaskType.padding
    with pytest.raises(ValueError, match="takes scores of one dtype"):
        FusedScaleMaskSoftmax(True, True, padding, True, None, True, None)
    with pytest.raises(ValueError, match=r"scale=0\.5 needs softmax_in_fp32=True"):
        FusedScaleMaskSoftmax(True, False, padding, True, None, False, 0.5)
    with pytest.raises(TypeError, match=r"attn_mask_type is one of AttnMaskType.padding, .*, got 'causal'"):
        FusedScaleMaskSoftmax(True, False, "causal", True, None, True, None)  # type: ignore[arg-type]
    softmax = FusedScaleMaskSoftmax(True, False, padding, True, None, True, None)
    with pytest.raises(TypeError, match=r"built for scores of torch.float16, got torch.float32"):
        softmax(torch.ones(1, 1, 2, 2))
    with pytest.raises(ValueError, match=r"scores are \(batch, heads, queries, keys\), got \(2, 2\)"):
        softmax(torch.ones(2, 2, dtype=torch.float16))


@on_each
@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mask", ["none", "bool", "added"])
def test_attention(device: str, fp16: bool, norm_first: bool, mask: str) -> None:
    torch.manual_seed(0)
    dtype = torch.float16 if fp16 else torch.float32
    module = MultiHeadAttention(12, 3, 4, 8, norm_first=norm_first, fp16=fp16).to(device)
    nn.init.normal_(module.norm.weight), nn.init.normal_(module.qkv.bias)
    x = torch.randn(2, 5, 12, device=device, dtype=dtype, requires_grad=True)
    padding = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]], device=device).bool()
    passed = {"none": None, "bool": padding, "added": padding.to(dtype) * -1e4}[mask]
    params = {name: p.float() for name, p in module.named_parameters()}

    def plain() -> Tensor:
        params = {name: p.float() for name, p in module.named_parameters()}
        norm = (params["norm.weight"], params["norm.bias"])
        wide = x.float()
        h = F.layer_norm(wide, (12,), *norm) if norm_first else wide
        y, _ = F.multi_head_attention_forward(
            h.transpose(0, 1),
            h.transpose(0, 1),
            h.transpose(0, 1),
            12,
            3,
            params["qkv.weight"],
            params["qkv.bias"],
            None,
            None,
            False,
            0.0,
            params["out.weight"],
            params["out.bias"],
            key_padding_mask=None if mask == "none" else padding,
            need_weights=False,
        )
        y = wide + y.transpose(0, 1)
        return (y if norm_first else F.layer_norm(y, (12,), *norm)).to(dtype)

    assert params
    _compare(lambda: module(x, passed), plain, [x, *module.parameters()], dtype)


def test_attention_drops_while_training_and_keeps_its_limits() -> None:
    torch.manual_seed(0)
    module = MultiHeadAttention(8, 2, 2, 4, dropout=0.5, fp16=False)
    x = torch.randn(2, 4, 8)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    assert next(MultiHeadAttention(8, 2, 2, 4).parameters()).dtype is torch.float16
    with pytest.raises(ValueError, match=r"up to 2 x 4, got \(3, 4, 8\); raise batch_size or max_seq_len"):
        module(torch.ones(3, 4, 8))
    with pytest.raises(ValueError, match=r"up to 2 x 4, got \(1, 5, 8\)"):
        module(torch.ones(1, 5, 8))
    with pytest.raises(TypeError, match=r"weights of torch.float32, got input of torch.float16"):
        module(x.half())
    with pytest.raises(ValueError, match="hidden_size 8 is not a multiple of nhead 3"):
        MultiHeadAttention(8, 3, 2, 4)


@pytest.fixture(params=[False, True], ids=["eager", "fused"])
def fusion(request: pytest.FixtureRequest) -> Iterator[bool]:
    if request.param:
        jit.set_jit_fusion_options()
    yield request.param
    jit._fuses = False


@on_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_jit(device: str, dtype: torch.dtype, fusion: bool) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": device, "dtype": dtype, "requires_grad": True}
    x, bias, residual = (
        torch.randn(5, 2, 8, **options),
        torch.randn(8, **options),
        torch.randn(5, 2, 8, **options),
    )

    def gelu() -> Tensor:
        y = (x + bias).float()
        return (0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))).to(dtype)

    _compare(lambda: jit.bias_gelu_impl(x, bias), gelu, [x, bias], dtype)
    leaves = [x, bias, residual]
    for prob in (0.0, 0.5):
        _compare(
            lambda prob=prob: jit.bias_dropout_add_fused_inference(x, bias, residual, prob),
            lambda: residual + x + bias,
            leaves,
            dtype,
        )
    _compare(
        lambda: jit.bias_dropout_add_fused_train(x, bias, residual, 0.0),
        lambda: residual + x + bias,
        leaves,
        dtype,
    )
    dropped = jit.bias_dropout_add_fused_train(x, bias, torch.zeros_like(x), 0.5).detach()
    kept = dropped != 0
    assert 0 < kept.sum() < x.numel()
    torch.testing.assert_close(dropped[kept], 2 * (x + bias).detach()[kept], **CLOSE[dtype])
    if not fusion:  # the same random numbers as PyTorch's composition
        torch.manual_seed(3)
        expected = residual + F.dropout(x + bias, 0.5)
        torch.manual_seed(3)
        assert torch.equal(jit.bias_dropout_add_fused_train(x, bias, residual, 0.5), expected)


def test_warming_up_changes_no_random_state(fusion: bool) -> None:
    before = torch.get_rng_state()
    jit.warmup_jit_fusion(2, 8, seq_length=4, dtype=torch.float32)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.long, torch.float32, torch.float16])
def test_a_padding_mask_of_any_dtype_hides_keys(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = MultiHeadAttention(8, 2, 2, 5, fp16=False)
    reference = nn.MultiheadAttention(8, 2, batch_first=True)
    reference.in_proj_weight, reference.in_proj_bias = module.qkv.weight, module.qkv.bias
    reference.out_proj.weight, reference.out_proj.bias = module.out.weight, module.out.bias
    x, mask = torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    expected = module.norm(x + reference(x, x, x, key_padding_mask=mask)[0])
    torch.testing.assert_close(module(x, mask.to(dtype)), expected)


def test_an_integer_mask_that_is_no_padding_mask_is_refused() -> None:
    module = MultiHeadAttention(8, 2, 2, 5, fp16=False)
    with pytest.raises(ValueError, match=r"has 1 for keys that do not count .* values from -10000 to 0"):
        module(torch.randn(2, 5, 8), torch.tensor([[0, 0, 0, 0, -10000]] * 2))


@pytest.mark.parametrize("fusion", [True, False])
def test_softmax_of_low_scores_and_of_float64(fusion: bool) -> None:
    def hide(x: Tensor, mask: Tensor) -> Tensor:
        return x.masked_fill(mask, torch.finfo(x.dtype).min)

    softmax = FusedScaleMaskSoftmax(False, False, AttnMaskType.padding, fusion, hide, True, None)
    mask = torch.tensor([[False, True], [True, True]]).view(1, 1, 2, 2)
    weights = softmax(torch.full((1, 1, 2, 2), -30000.0), mask)
    assert weights.flatten().tolist() == [1, 0, 0.5, 0.5]  # the last query has no keys, and no nan
    scores = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(softmax(scores), scores.softmax(-1), rtol=1e-12, atol=0)
