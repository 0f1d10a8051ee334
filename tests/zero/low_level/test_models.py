"""The models of transformers that page 16 says may not be supported: they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin
from colossalai.testing import spawn
from tests.zero.low_level.problems import close, launch

pytest.importorskip("transformers", reason="needs `pip install transformers`")

SIZES = {"vocab_size": 32, "hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 2}
CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ALBERT = {**SIZES, **CALM, "embedding_size": 8, "num_hidden_layers": 2, "classifier_dropout_prob": 0.0}
BERT = {**SIZES, **CALM, "num_hidden_layers": 2}
GPT2 = {"vocab_size": 32, "n_embd": 12, "n_head": 2, "n_layer": 2, "n_positions": 16}
GPT2_CALM = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "AlbertModel": ALBERT,
    "AlbertForPreTraining": ALBERT,
    "BertModel": BERT,
    "BertForPreTraining": BERT,
    "GPT2DoubleHeadsModel": {**GPT2, **GPT2_CALM, "num_labels": 1},
}


def build(name: str) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    torch.manual_seed(0)
    return kind(kind.config_class(**MODELS[name]))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The first output alone, so that other heads of the model are not used."""
    return model(input_ids=tokens)[0].float().square().mean()


def check_models(rank: int, world_size: int, port: int) -> None:
    launch()
    for name in MODELS:
        for stage in (1, 2):
            serial, model = build(name), build(name)
            plain, raw = (torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (serial, model))
            booster = Booster(device="cpu", plugin=LowLevelZeroPlugin(stage=stage, precision="fp32"))
            boosted, optimizer, *_ = booster.boost(model, raw)
            tokens = torch.arange(4 * 6).view(4, 6) % 32
            for _ in range(2):
                loss_of(serial, tokens).backward()
                booster.backward(loss_of(boosted, tokens.chunk(world_size)[dist.get_rank()]), optimizer)
                plain.step()
                optimizer.step()
                plain.zero_grad()
                optimizer.zero_grad()
            for (key, p), q in zip(boosted.named_parameters(), serial.parameters(), strict=True):
                close(f"{name}, stage {stage}: {key}", p.detach(), q.detach(), 1e-4)


def test_models_with_heads_that_are_not_used() -> None:
    spawn(check_models, 2, timeout=120)
