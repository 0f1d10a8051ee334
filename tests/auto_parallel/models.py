"""Small models of several kinds, as transformers and torch have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

IDS = torch.arange(2 * 16).view(2, 16) % 60
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}


class Bottleneck(nn.Module):
    """A residual block that writes in place, as those of torchvision do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width // 2, 1, bias=False), nn.BatchNorm2d(width // 2)
        self.conv2, self.bn2 = nn.Conv2d(width // 2, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x
        result: Tensor = self.relu(out)
        return result


class SmallResNet(nn.Module):
    """A stem, two sequences of blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.layer1 = nn.Sequential(*(Bottleneck(16) for _ in range(3)))
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.layer2 = nn.Sequential(*(Bottleneck(32) for _ in range(3)))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layer2(self.down(self.layer1(self.stem(x)))).mean((2, 3)))
        return scores


class Reused(nn.Module):
    """One block that is called again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.other = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block(x)
        return self.other(x).square().mean()


class Unusual(nn.Module):
    """A block that writes into its input, or computes a gradient itself."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            return x.add_(1) + self.inner(x)  # type: ignore[no-any-return]
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.inner(leaf).square().sum(), leaf)
        return self.inner(x + gradient) + x  # type: ignore[no-any-return]


def unusual(writes: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.Sequential(*(Unusual(writes) for _ in range(9))))


def gpt2(layers: int = 4, width: int = 64, dropout: float = 0.1) -> GPT2LMHeadModel:
    sizes: dict[str, int] = {"n_layer": layers, "n_embd": width, "n_head": 2, "n_positions": 64}
    drops = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=0, **sizes, **drops))


def _tokens() -> dict[str, Tensor]:
    return {"input_ids": IDS, "labels": IDS}


def _image() -> dict[str, Tensor]:
    return {"pixel_values": torch.rand(2, 3, 32, 32), "labels": torch.tensor([0, 1])}


MODELS: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    "gpt2": lambda: (gpt2(), _tokens(), None),
    "bert": lambda: (
        BertForMaskedLM(BertConfig(vocab_size=64, intermediate_size=64, **SIZES)),
        {**_tokens(), "attention_mask": torch.ones_like(IDS)},
        None,
    ),
    "vit": lambda: (
        ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, intermediate_size=64, **SIZES)),
        _image(),
        None,
    ),
    "llama": lambda: (
        LlamaForCausalLM(LlamaConfig(vocab_size=64, intermediate_size=64, **SIZES)),
        _tokens(),
        None,
    ),
    "t5": lambda: (
        T5ForConditionalGeneration(
            T5Config(
                vocab_size=64,
                d_model=32,
                d_kv=16,
                d_ff=64,
                num_layers=3,
                num_heads=2,
                decoder_start_token_id=0,
            )
        ),
        _tokens(),
        None,
    ),
    "resnet": lambda: (
        SmallResNet(),
        (torch.rand(4, 3, 16, 16), torch.tensor([0, 1, 2, 3])),
        nn.CrossEntropyLoss(),
    ),
    "transformer": lambda: (
        nn.Transformer(32, 2, 2, 2, 64, batch_first=True),
        (torch.rand(2, 16, 32), torch.rand(2, 16, 32)),
        None,
    ),
    "reused": lambda: (Reused(), torch.rand(2, 16, 32), None),
    "layers": lambda: (
        nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(4))),
        (torch.rand(64, 32),),
        None,
    ),
    "computes gradients": lambda: (unusual(False), torch.rand(64, 32), None),
    "one layer": lambda: (nn.Linear(32, 8), torch.rand(4, 32), None),
}
