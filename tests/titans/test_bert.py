"""BERT against Hugging Face's, and what it refuses."""

from __future__ import annotations

import pytest
import torch

import colossalai.nn as col_nn
from titans.model.bert import BERT, bert_base, bert_large

# ours -> Hugging Face's
NAMES = {
    "embed.word_embeddings": "bert.embeddings.word_embeddings",
    "embed.position_embeddings": "bert.embeddings.position_embeddings",
    "embed.token_type_embeddings": "bert.embeddings.token_type_embeddings",
    "embed.norm": "bert.embeddings.LayerNorm",
    "head.transform": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
}
BLOCK = {
    "attn.dense": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "mlp.dense_1": "intermediate.dense",
    "mlp.dense_2": "output.dense",
    "norm2": "output.LayerNorm",
}


def test_equals_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=96,
        max_position_embeddings=10,
    )
    torch.manual_seed(0)
    theirs = transformers.BertForMaskedLM(config).eval()
    state = theirs.state_dict()
    ours = BERT(40, 10, 24, 3, 2).eval()
    names = {**NAMES}
    for i in range(2):
        names |= {f"blocks.{i}.{a}": f"bert.encoder.layer.{i}.{b}" for a, b in BLOCK.items()}
    mine = {}
    for a, b in names.items():
        for kind in ("weight", "bias"):
            if f"{b}.{kind}" in state:
                mine[f"{a}.{kind}"] = state[f"{b}.{kind}"]
    for i in range(2):
        for kind in ("weight", "bias"):
            parts = [
                state[f"bert.encoder.layer.{i}.attention.self.{x}.{kind}"] for x in ("query", "key", "value")
            ]
            mine[f"blocks.{i}.attn.query_key_value.{kind}"] = torch.cat(parts)
    mine["head.dense.weight"] = state["bert.embeddings.word_embeddings.weight"]
    mine["head.dense.bias"] = state["cls.predictions.bias"] + 0.5
    with torch.no_grad():
        theirs.cls.predictions.bias += 0.5
    ours.load_state_dict(mine)
    ids, types = torch.randint(40, (3, 8)), torch.randint(2, (3, 8))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    with torch.no_grad():
        expected = theirs(ids, mask, types).logits
        torch.testing.assert_close(
            ours(ids, mask, types)[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)


def test_published_sizes_and_training() -> None:
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in build().parameters()) for build in (bert_base, bert_large)]
    h, v = 768, 30522
    assert sizes[0] == (v + 512 + 2) * h + 2 * h + 12 * (12 * h * h + 13 * h) + h * h + 3 * h + v
    assert sizes[1] == pytest.approx(335e6, rel=0.01)
    model = BERT(40, 10, 24, 3, 2, checkpoint=True)
    assert model.head.dense.weight is model.embed.word_embeddings.weight
    assert BERT(40, 10, 24, 3, 1, tied=False).head.dense.weight.shape == (40, 24)
    ids = torch.randint(40, (4, 10))
    labels = torch.where(torch.rand(ids.shape) < 0.3, ids, -100)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = col_nn.CrossEntropyLoss()(model.train()(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


def test_refusals() -> None:
    with pytest.raises(ValueError, match="a BERT needs at least one block, got depth=0"):
        BERT(depth=0)
    with pytest.raises(ValueError, match="attention_mask must be a bool or integer tensor"):
        BERT(40, 10, 24, 3, 1)(torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 3))
