"""Small models of several families with their batches, in float64, each of which computes its loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.testing.parity import Problem

Batch = dict[str, Tensor]
_STEPS = 3


class MLP(nn.Module):
    """Norms of both kinds, dropout, an operation in place, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 16, padding_idx=1)
        self.norm = nn.BatchNorm1d(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.drop = nn.Dropout(0.25)
        self.layer_norm = nn.LayerNorm(16)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(self.embed(x))
        hidden = hidden + self.down(self.drop(self.up(hidden).relu_()))
        scores = nn.functional.linear(self.layer_norm(hidden), self.embed.weight)
        return {"loss": nn.functional.cross_entropy(scores, labels, ignore_index=0), "scores": scores}


class Classifier(nn.Module):
    """A torchvision-like ResNet with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.layer1, self.layer2 = Block(8, 8, 1), Block(8, 16, 2)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 8)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.layer2(self.layer1(self.stem(images)))
        scores = self.fc(torch.flatten(self.pool(x), 1))
        return {"loss": nn.functional.cross_entropy(scores, labels), "scores": scores}


class Block(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=True)
        self.bn2 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        result: Tensor = self.relu(out)
        return result


def _numbers(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def _ids(step: int, vocabulary: int = 64, length: int = 8, batch: int = 8) -> Tensor:
    return torch.randint(2, vocabulary, (batch, length), generator=_numbers(step))


def _text(step: int) -> Batch:
    ids = _ids(step)
    return {"input_ids": ids, "labels": ids}


def _masked_text(step: int) -> Batch:
    mask = torch.ones(8, 8, dtype=torch.long)
    mask[0, 5:] = 0
    return {**_text(step), "attention_mask": mask}


def _images(step: int, size: int = 8, classes: int = 8) -> Batch:
    images = torch.randn(8, 3, size, size, dtype=torch.float64, generator=_numbers(step))
    return {"images": images, "labels": torch.randint(classes, (8,), generator=_numbers(step + 9))}


def _mlp(step: int) -> Batch:
    x = torch.randint(8, (8,), generator=_numbers(step))
    return {"x": x, "labels": torch.randint(8, (8,), generator=_numbers(step + 9))}


def _vit(step: int) -> Batch:
    found = _images(step)
    return {"pixel_values": found["images"], "labels": found["labels"]}


def _transformer(name: str) -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    if name == "gpt2":
        config: Any = transformers.GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=2, n_head=4)
        return transformers.GPT2LMHeadModel(config)
    if name == "bert":
        config = transformers.BertConfig(**sizes, intermediate_size=32, max_position_embeddings=8)
        return transformers.BertForMaskedLM(config)
    if name == "opt":
        sizes |= {"ffn_dim": 32, "word_embed_proj_dim": 16, "max_position_embeddings": 8}
        return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes))
    if name == "vit":
        sizes |= {"intermediate_size": 32, "image_size": 8, "patch_size": 4, "num_labels": 8}
        del sizes["vocab_size"]
        config = transformers.ViTConfig(**sizes, hidden_dropout_prob=0.1)
        return transformers.ViTForImageClassification(config)
    if name == "t5":
        config = transformers.T5Config(
            vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
        return transformers.T5ForConditionalGeneration(config)
    config = transformers.LlamaConfig(
        **sizes, intermediate_size=32, num_key_value_heads=2, max_position_embeddings=8
    )
    return transformers.LlamaForCausalLM(config)


def _plain(name: str) -> nn.Module:
    return MLP() if name == "mlp" else Classifier()


def _build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = _plain(name) if name in ("mlp", "resnet") else _transformer(name)
    return model.double().train()


_BATCHES: dict[str, Callable[[int], Batch]] = {
    "mlp": _mlp,
    "resnet": _images,
    "gpt2": _text,
    "bert": _masked_text,
    "opt": _text,
    "vit": _vit,
    "t5": _text,
    "llama": _text,
}
FAMILIES = tuple(_BATCHES)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    output = model(**batch)
    loss: Tensor = output["loss"] if isinstance(output, dict) else output.loss
    return loss


def small_problem(name: str) -> Problem:
    """The training task of a family."""
    batches = [_BATCHES[name](step) for step in range(_STEPS)]
    return Problem(build=partial(_build, name), batches=batches, loss=loss_of)
