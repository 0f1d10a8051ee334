"""GPT against what its definition says, written out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, relu, silu

from titans.layer.attention import GPTSelfAttention
from titans.layer.block import GPTBlock
from titans.layer.embedding import GPTEmbedding
from titans.layer.head import GPTLMHead
from titans.layer.mlp import TransformerMLP
from titans.model.gpt import GPT, gpt2_8B, gpt2_large, gpt2_medium, gpt2_small, gpt2_xl, gpt3


def tiny(**changes: Any) -> GPT:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "max_position_embeddings": 16, "hidden_size": 24, "num_heads": 3, "depth": 2}
    model = GPT(**{**sizes, "dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0, **changes})
    for p in model.parameters():  # the initial values are too small to make mistakes visible
        torch.nn.init.normal_(p, std=0.3)
    return model


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(1))


def reference_block(block: GPTBlock, x: Tensor, activation: Callable[[Tensor], Tensor], post: bool) -> Tensor:
    """One sequence at a time, one head at a time, one query at a time."""
    p = dict(block.named_parameters())
    hidden, heads = x.shape[-1], block.attn.num_heads
    d = hidden // heads
    outputs = []
    for row in x:  # (seq, hidden)
        n = layer_norm(row, (hidden,), p["norm1.weight"], p["norm1.bias"])
        q, k, v = (n @ p["attn.query_key_value.weight"].T + p["attn.query_key_value.bias"]).split(
            hidden, dim=1
        )
        mixed = torch.zeros_like(row)
        for h in range(heads):
            part = slice(h * d, (h + 1) * d)
            for t in range(len(row)):
                scores = torch.stack([q[t, part] @ k[s, part] / math.sqrt(d) for s in range(t + 1)])
                weights = scores.exp() / scores.exp().sum()
                mixed[t, part] = sum(w * v[s, part] for s, w in enumerate(weights))
        row = (n if post else row) + mixed @ p["attn.dense.weight"].T + p["attn.dense.bias"]
        n = layer_norm(row, (hidden,), p["norm2.weight"], p["norm2.bias"])
        inner = activation(n @ p["mlp.dense_1.weight"].T + p["mlp.dense_1.bias"])
        outputs.append((n if post else row) + inner @ p["mlp.dense_2.weight"].T + p["mlp.dense_2.bias"])
    return torch.stack(outputs)


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("activation", [gelu, relu])
def test_block_equals_its_definition(activation: Callable[[Tensor], Tensor], post: bool) -> None:
    block = tiny(activation=activation, apply_post_layernorm=post, mlp_ratio=2.5).double().blocks[0]
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    y, mask = block(x)
    assert mask is None
    torch.testing.assert_close(y, reference_block(block, x, activation, post))


def test_model_is_embedding_blocks_norm_and_tied_head() -> None:
    model = tiny().double()
    tokens = ids(2, 5)
    words, positions = model.embed.word_embeddings.weight, model.embed.position_embeddings.weight
    x = words[tokens] + positions[:5]
    for block in model.blocks:
        x = reference_block(block, x, gelu, post=False)
    x = layer_norm(x, (24,), model.norm.weight, model.norm.bias)
    torch.testing.assert_close(model(tokens), x @ words.T)


def test_the_past_does_not_see_the_future() -> None:
    model, tokens = tiny(), ids(2, 12)
    changed = tokens.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 50
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8], rtol=0, atol=0)
    assert not torch.allclose(before[:, 8:], after[:, 8:])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_padding_changes_no_real_token(side: str, dtype: torch.dtype) -> None:
    model, tokens = tiny().double(), ids(3, 10)
    lengths = (10, 6, 1)
    mask = torch.zeros(3, 10, dtype=dtype)
    real = [slice(0, n) if side == "right" else slice(10 - n, 10) for n in lengths]
    for row, part in enumerate(real):
        mask[row, part] = 1
    logits = model(tokens, attention_mask=mask)
    logits.sum().backward()
    for row, part in enumerate(real):
        torch.testing.assert_close(logits[row, part], model(tokens[row : row + 1, part])[0])
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    noise = torch.where(mask.bool(), tokens, ids(3, 10).flip(1))
    torch.testing.assert_close(model(noise, mask)[mask.bool()], logits[mask.bool()])
    # without the mask, left padding does change them: the test above can fail
    assert side == "right" or not torch.allclose(model(tokens)[1, real[1]], logits[1, real[1]])


def test_block_accepts_an_additive_mask() -> None:
    block = tiny().double().blocks[0]
    x = torch.randn(2, 6, 24, dtype=torch.float64)
    keep = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()[:, None, None, :]
    additive = (1.0 - keep.double()) * -10000.0
    y, returned = block(x, additive)
    assert returned is additive
    real = keep[:, 0, 0]
    torch.testing.assert_close(y[real], block(x, keep)[0][real])


def test_head_and_embedding_are_one_parameter() -> None:
    model = tiny()
    assert model.head.dense.weight is model.embed.word_embeddings.weight
    assert "head.dense.weight" not in dict(model.named_parameters())
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    assert model.head.dense.weight.data_ptr() == model.embed.word_embeddings.weight.data_ptr()


def gradients(model: GPT, seed: int) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    model(ids(2, 9), ids(2, 9) > 10).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("offload", [False, True])
def test_checkpointing_changes_memory_not_gradients(offload: bool) -> None:
    dropout = {"dropout": 0.2, "embedding_dropout": 0.2, "attention_dropout": 0.2}
    calls = []
    plain, saving = tiny(**dropout), tiny(**dropout, checkpoint=True, activation_offload=offload)
    saving.blocks[0].norm1.register_forward_hook(lambda *_: calls.append(1))
    for mine, other in zip(gradients(saving, 3), gradients(plain, 3), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
    assert len(calls) == 2, "the block was not computed again in the backward pass"
    saving.eval()
    saving(ids(1, 4))
    assert len(calls) == 3


def test_selective_checkpointing_changes_no_gradient() -> None:
    dropout = {"dropout": 0.2, "embedding_dropout": 0.2, "attention_dropout": 0.2}
    plain, saving = tiny(**dropout), tiny(**dropout, checkpoint="selective")
    for mine, other in zip(gradients(saving, 3), gradients(plain, 3), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_dropout_is_off_in_eval_and_on_in_training() -> None:
    for name in ("dropout", "embedding_dropout", "attention_dropout"):
        model = tiny(**{name: 0.5})
        assert not torch.equal(model(ids(1, 8)), model(ids(1, 8))), name
        model.eval()
        assert torch.equal(model(ids(1, 8)), model(ids(1, 8))), name


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch tells why each of its kernels does not fit
def test_fused_attention_is_the_same_or_refused() -> None:
    model, fused = tiny(), tiny(fuse_scale_mask_softmax=True)
    torch.testing.assert_close(fused(ids(2, 8)), model(ids(2, 8)))
    refused = tiny(fuse_scale_mask_softmax=True, attention_dropout=0.1)
    with pytest.raises(RuntimeError, match=r"no fused attention kernel .* on cpu .* dropout 0\.1; .*=False"):
        refused(ids(2, 8))


def test_initial_weights_are_gpt2s() -> None:
    torch.manual_seed(0)
    model = GPT(vocab_size=512, hidden_size=256, num_heads=4, depth=8)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert p.eq(0).all(), name
        elif "norm" in name:
            assert p.eq(1).all(), name
        else:
            narrow = name.endswith(("attn.dense.weight", "mlp.dense_2.weight"))
            assert p.std().item() == pytest.approx(0.02 / 4 if narrow else 0.02, rel=0.03), name
            assert abs(p.mean().item()) < 1e-3, name


def test_options_reach_the_weights() -> None:
    model = GPT(32, 8, 16, 2, 1, bias=False, dtype=torch.bfloat16, padding_idx=3)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any("dense" in n and n.endswith("bias") for n, _ in model.named_parameters())
    assert model.embed.word_embeddings.weight[3].eq(0).all()
    assert model(ids(1, 4) % 32).dtype == torch.bfloat16
    assert tiny(activation=silu).blocks[1].mlp.activation is silu


def count(model: GPT) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("build", "hidden", "depth", "positions", "billions"),
    [
        (gpt2_small, 768, 12, 1024, 0.124),
        (gpt2_medium, 1024, 24, 1024, 0.355),
        (gpt2_large, 1280, 36, 1024, 0.774),
        (gpt2_xl, 1600, 48, 1024, 1.558),
        (gpt2_8B, 3072, 72, 1024, 8.3),
        (gpt3, 12288, 96, 2048, 175),
    ],
)
def test_named_sizes(
    build: Callable[..., GPT], hidden: int, depth: int, positions: int, billions: float
) -> None:
    with torch.device("meta"):
        model = build()
    block = 12 * hidden**2 + 13 * hidden
    assert count(model) == 50304 * hidden + positions * hidden + depth * block + 2 * hidden
    assert count(model) / 1e9 == pytest.approx(billions, rel=0.01)


def test_named_sizes_take_changes() -> None:
    model = gpt2_small(depth=1, vocab_size=10, checkpoint=True)
    assert len(model.blocks) == 1
    assert model.vocab_size == 10
    assert model.blocks[0].checkpoint


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GPT(hidden_size=100, num_heads=12), r"hidden_size=100 is not divisible by num_heads=12"),
        (lambda: GPTSelfAttention(8, 0), r"hidden_size=8 is not divisible by num_heads=0"),
        (lambda: GPT(depth=0), r"at least one block, got depth=0"),
        (lambda: GPT(padding_idx=60000, depth=1), r"padding_idx is 60000, .* from 0 to 50303"),
        (lambda: GPT(activation_offload=True), r"activation_offload=True .* set checkpoint=True"),
        (lambda: GPT(checkpoint="some"), r"checkpoint is True, False or 'selective', got 'some'"),
        (lambda: TransformerMLP(8, mlp_ratio=0.0), r"mlp_ratio=0\.0 leaves no features"),
        (
            lambda: GPTLMHead(8, 10, weight=torch.nn.Parameter(torch.zeros(8, 10))),
            r"\(vocab_size, dim\) = \(10, 8\), got a Parameter of shape \(8, 10\)",
        ),
        (lambda: tiny()(ids(1, 17)), r"17 tokens per row, .* max_position_embeddings=16"),
        (lambda: tiny()(ids(1, 4) + 50), r"values from \d+ to \d+, but vocab_size=50 allows 0 to 49"),
        (lambda: tiny()(ids(1, 4) - 50), r"values from -\d+ to -\d+, but vocab_size=50"),
        (lambda: tiny()(ids(4)), r"shape \(batch, sequence\), got torch.int64 of shape \(4,\)"),
        (lambda: tiny()(ids(1, 4).float()), r"got torch.float32 of shape \(1, 4\)"),
        (lambda: tiny()(ids(2, 4), torch.ones(2, 5).bool()), r"shape of input_ids, \(2, 4\), .* \(2, 5\)"),
        (lambda: tiny()(ids(2, 4), torch.ones(2, 4)), r"bool or integer tensor .* got torch.float32"),
    ],
)
def test_wrong_sizes_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_embedding_with_given_positions() -> None:
    layer = GPTEmbedding(4, 10, 6)
    tokens = torch.tensor([[1, 2]])
    expected = layer.word_embeddings.weight[[1, 2]] + layer.position_embeddings.weight[[5, 0]]
    torch.testing.assert_close(layer(tokens, torch.tensor([[5, 0]]))[0], expected)


def test_compiles_without_graph_breaks() -> None:
    model = tiny()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids(2, 8)), model(ids(2, 8)))
