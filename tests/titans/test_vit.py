"""ViT against what its definition says, and the published sizes."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm

from colossalai.context.fake_launch import fake_launch
from titans.layer.attention import GPTSelfAttention, ViTSelfAttention
from titans.layer.block import GPTBlock, ViTBlock
from titans.layer.drop_path import DropPath
from titans.layer.mlp import ViTMLP
from titans.model import vit
from titans.model.vit.vit import _create_vit_model


def tiny(**changes: Any) -> vit.VisionTransformer:
    torch.manual_seed(0)
    sizes = {"img_size": 8, "patch_size": 4, "hidden_size": 24, "num_heads": 3, "depth": 2, "num_classes": 5}
    model = _create_vit_model(**{**sizes, "dropout": 0.0, **changes})
    for p in model.parameters():  # the initial values are too small to make mistakes visible
        nn.init.normal_(p, std=0.3)
    return model


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def attention(x: Tensor, qkv: nn.Linear, dense: nn.Linear, heads: int) -> Tensor:
    """One head at a time, with the scores written out; every token looks at all."""
    q, k, v = (x @ qkv.weight.T + qkv.bias).chunk(3, dim=-1)
    d = x.shape[-1] // heads
    mixed = []
    for h in range(heads):
        part = slice(h * d, (h + 1) * d)
        scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(d)
        mixed.append((scores.exp() / scores.exp().sum(-1, keepdim=True)) @ v[..., part])
    return torch.cat(mixed, dim=-1) @ dense.weight.T + dense.bias


def test_attention_equals_its_definition() -> None:
    layer = tiny().double().blocks[0].attn
    x = images(2, 7, 24).double()
    torch.testing.assert_close(layer(x), attention(x, layer.query_key_value, layer.dense, 3))


def test_one_attention_serves_both_and_only_gpt_is_causal() -> None:
    torch.manual_seed(0)
    causal, free = GPTSelfAttention(24, 3), ViTSelfAttention(24, 3)
    free.load_state_dict(causal.state_dict())
    x = images(2, 7, 24)
    torch.testing.assert_close(causal(x)[:, -1], free(x)[:, -1])  # the last token sees everything in both
    later = x.clone()
    later[:, -1] += 1
    assert torch.equal(causal(x)[:, 0], causal(later)[:, 0])
    assert not torch.allclose(free(x)[:, 0], free(later)[:, 0], atol=1e-4)
    mask = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    mask[..., -1] = False
    torch.testing.assert_close(free(x, mask)[:, :6], free(later, mask)[:, :6])
    assert GPTBlock(24, 3).state_dict().keys() == ViTBlock(24, 3).state_dict().keys()
    assert isinstance(ViTBlock(24, 3).mlp, ViTMLP)


def test_model_is_patches_blocks_norm_and_head() -> None:
    model = tiny(representation_size=6).double()
    x = images(2, 3, 8, 8).double()
    cells = [x[:, :, i : i + 4, j : j + 4].flatten(1) for i in (0, 4) for j in (0, 4)]
    project = model.embed.patch_embed
    tokens = torch.stack(cells, dim=1) @ project.weight.flatten(1).T + project.bias
    y = torch.cat([project.cls_token.expand(2, 1, 24), tokens], dim=1) + project.pos_embed
    for block in model.blocks:
        normed = layer_norm(y, (24,), block.norm1.weight, block.norm1.bias, 1e-6)
        y = y + attention(normed, block.attn.query_key_value, block.attn.dense, 3)
        normed = layer_norm(y, (24,), block.norm2.weight, block.norm2.bias, 1e-6)
        y = y + block.mlp.dense_2(gelu(block.mlp.dense_1(normed)))
    first = layer_norm(y, (24,), model.norm.weight, model.norm.bias, 1e-6)[:, 0]
    expected = model.head.dense(torch.tanh(model.head.representation(first)))
    torch.testing.assert_close(model(x), expected)


def parameters(h: int, depth: int, patch: int, size: int, classes: int, ratio: int) -> int:
    patches = (size // patch) ** 2
    block = 4 * h * h + 4 * h + 2 * ratio * h * h + (ratio + 1) * h + 4 * h
    return (3 * patch**2 + 1) * h + (patches + 2) * h + depth * block + 2 * h + (h + 1) * classes


SIZES = {"tiny": (192, 12), "small": (384, 12), "base": (768, 12), "large": (1024, 24)}
EXPECTED = {
    f"vit_{name}_patch{patch}_{size}": parameters(*SIZES[name], patch, size, 1000, 4)
    for name in SIZES
    for patch in (16, 32)
    for size in (224, 384)
} | {
    "vit_lite_depth7_patch4_32": parameters(256, 7, 4, 32, 10, 2),
    "vit_tiny_patch4_32": parameters(512, 6, 4, 32, 10, 1),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_named_sizes(name: str) -> None:
    with torch.device("meta"):
        model = getattr(vit, name)()
    assert sum(p.numel() for p in model.parameters()) == EXPECTED[name]


def test_published_counts_and_exports() -> None:
    assert EXPECTED["vit_base_patch16_224"] == 86_567_656
    assert EXPECTED["vit_large_patch16_224"] == 304_326_632
    assert set(vit.__all__) == {"VisionTransformer", *EXPECTED}


def test_the_tiny_one_for_small_images_can_be_cut_among_two_ranks() -> None:
    config = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
    with fake_launch(config, 1, 2):
        model = vit.vit_tiny_patch4_32(depth=1)
        model(images(2, 3, 32, 32)).sum().backward()
    assert model.blocks[0].attn.query_key_value.weight.shape == (3 * 256, 512)
    assert model.blocks[0].mlp.dense_1.weight.shape == (256, 512)


def test_arguments_of_a_named_size_take_precedence() -> None:
    build = pickle.loads(pickle.dumps(vit.vit_lite_depth7_patch4_32))
    model = build(num_classes=3, depth=1, in_chans=1)
    assert model(images(2, 1, 32, 32)).shape == (2, 3)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_gradients_reach_every_weight(checkpoint: bool) -> None:
    model = tiny(checkpoint=checkpoint, drop_path=0.1, representation_size=6).train()
    model(images(4, 3, 8, 8)).square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().sum() > 0, name
    plain = tiny(representation_size=6)
    x = images(4, 3, 8, 8)
    torch.testing.assert_close(model.eval()(x), plain.eval()(x))


def test_drop_path_skips_whole_samples_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    layer = DropPath(0.25).train()
    y = layer(torch.ones(4000, 3, 2))
    kept = y[:, 0, 0] > 0
    assert torch.equal(y, kept[:, None, None] * torch.full((1, 3, 2), 4 / 3))
    assert y.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(layer.eval()(y), y)
    assert [block.drop_path.drop_prob for block in tiny(drop_path=0.2, depth=3).blocks] == [0, 0.1, 0.2]


def test_initial_values() -> None:
    jax = vit.VisionTransformer(32, 8, hidden_size=64, num_heads=2, depth=1, num_classes=4, init_method="jax")
    assert not jax.head.dense.weight.any()
    bound = math.sqrt(6 / (64 + 192))
    assert 0.9 * bound < jax.blocks[0].attn.query_key_value.weight.abs().max() <= bound
    default = vit.VisionTransformer(32, 8, hidden_size=64, num_heads=2, depth=1, num_classes=4)
    assert 0.9 / 8 < default.blocks[0].attn.query_key_value.weight.abs().max() <= 1 / 8
    assert default.embed.patch_embed.pos_embed.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"img_size": 10}, "img_size=10 is not a multiple of patch_size=4"),
        ({"depth": 0}, "at least one block and one class, got depth=0"),
        ({"init_method": "keras"}, "init_method must be one of torch, jax, got 'keras'"),
        ({"num_heads": 5}, "hidden_size=24 is not divisible by num_heads=5"),
        ({"drop_path": 1.0}, "drop_path must be at least 0 and less than 1, got 1.0"),
    ],
)
def test_what_cannot_be_built(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"needs images of shape \(batch, 3, 8, 8\), got \(2, 3, 16, 16\)"):
        tiny()(images(2, 3, 16, 16))
