"""The models that habits are tried on, small and built alike on every rank, with the way to cut each of
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.nn.policies import Cut, Depth, Policy

IN, WIDTH, CLASSES, WORDS = 6, 8, 3, 13


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """An entry, two blocks in a list, a head; ``hidden=True`` stops before the head, and ``features`` is no
    forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, hidden: bool = False) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x if hidden else self.head(x)

    def features(self, x: Tensor) -> Tensor:
        return self.forward(x, hidden=True)


class Counting(Net):
    """A network that counts its forward passes in a buffer."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, hidden: bool = False) -> Tensor:
        self.steps += 1
        return super().forward(x, hidden)


class Branching(Net):
    """A network with a branch beside the first block that a caller may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, hidden: bool = False, branch: bool = True) -> Tensor:
        x = self.layers[0](self.first(x))
        if branch:
            x = x + self.branch(x)
        x = self.layers[1](x)
        return x if hidden else self.head(x)


class Frozen(Net):
    """A network whose entry and first block are frozen before it is boosted."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.layers[0].requires_grad_(False)


class Dropping(Net):
    """A network with dropout before its head."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, hidden: bool = False) -> Tensor:
        return self.head(self.drop(super().forward(x, hidden=True)))


class Normalized(Net):
    """A network with a batch norm before its head."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, hidden: bool = False) -> Tensor:
        return self.head(self.bn(super().forward(x, hidden=True)))


class Losing(Net):
    """A network that returns its loss in a dict where it is given labels, as many scripts write it."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        scores = super().forward(x)
        return scores if labels is None else {"loss": nn.functional.cross_entropy(scores, labels)}


class Noting(Block):
    """A block that appends an auxiliary loss to a list."""

    def forward(self, x: Tensor, notes: list[Tensor]) -> Tensor:  # type: ignore[override]
        x = super().forward(x)
        notes.append(x.square().mean())
        return x


class Hidden:
    """A loss in an object that is neither a tuple, nor a list, nor a dict."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Collecting(Net):
    """A network whose losses leave it in several ways: in a list that it is given, an attribute, or an
    object.
    """

    loss: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Noting() for _ in range(2))

    def forward(self, x: Tensor, notes: list[Tensor], labels: Tensor, way: str) -> Any:  # type: ignore[override]
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, notes)
        loss = nn.functional.cross_entropy(self.head(x), labels)
        if way == "list":
            notes.append(loss)
        elif way == "attribute":
            self.loss = loss
        elif way == "object":
            return Hidden(loss)
        return loss if way == "output" else None


class Flat(Net):
    """A network without a list of blocks, whose loss leaves it as an attribute or in an object."""

    loss: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.Sequential(*self.layers)

    def forward(self, x: Tensor, labels: Tensor, way: str) -> Any:  # type: ignore[override]
        loss = nn.functional.cross_entropy(super().forward(x), labels)
        self.loss = loss if way == "attribute" else None
        return Hidden(loss) if way == "object" else None


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": WORDS, "n_positions": 6}
    return GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "counting": Counting,
    "branching": Branching,
    "frozen": Frozen,
    "dropping": Dropping,
    "normalized": Normalized,
    "losing": Losing,
    "collecting": Collecting,
    "flat": Flat,
    "gpt2": gpt2,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def policy_of(name: str) -> Policy | None:
    """How tensor and pipeline parallelism cut the model; None is what its config says."""
    if name == "gpt2":
        return None
    rules = {"layers.*.up": Cut("expand"), "layers.*.down": Cut("contract")}
    return Policy((name,), rules, depth=Depth("layers", entry=("first",)))


def batches_of(name: str, count: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """Global batches, the same on every rank: inputs and classes, or words twice."""
    random = torch.Generator().manual_seed(1)
    if name == "gpt2":
        words = [torch.randint(WORDS, (size, 5), generator=random) for _ in range(count)]
        return [(w, w) for w in words]
    return [
        (torch.randn(size, IN, generator=random), torch.randint(CLASSES, (size,), generator=random))
        for _ in range(count)
    ]
