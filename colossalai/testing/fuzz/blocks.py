"""The layers that random models are made of: each is small, and each does something that plans have to get
right.

A block maps activations of width ``d`` to activations of width ``d``, so any of them can be left out.  The
generated script of a failure prints the source of those that it uses.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Words(nn.Module):
    """An embedding of token ids."""

    def __init__(self, words: int, d: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, d)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class InputLayer(nn.Module):
    """A linear layer from the input to the stream."""

    def __init__(self, inputs: int, d: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class OutputLayer(nn.Module):
    """A linear layer from the stream to the scores; its weight may be tied to an embedding."""

    def __init__(self, d: int, classes: int) -> None:
        super().__init__()
        self.proj = nn.Linear(d, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class Mlp(nn.Module):
    """Two linear layers around an activation, with a residual; tensor parallelism can cut it."""

    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class NormLayer(nn.Module):
    """LayerNorm."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Batch(nn.Module):
    """BatchNorm, whose statistics are those of a replica's part of the batch."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(d)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, -2)).view_as(x)


class InPlace(nn.Module):
    """An activation in place on the output of a linear layer."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.proj, self.act = nn.Linear(d, d), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.proj(x))


class InPlaceView(nn.Module):
    """A division in place of a view of the output of a linear layer."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.proj = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        q = self.proj(x).unflatten(-1, (1, -1)).transpose(-1, -2)
        q /= 2
        return x + q.squeeze(-1).tanh()


class AttentionLayer(nn.Module):
    """Self-attention with a fused projection."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class TorchAttention(nn.Module):
    """``nn.MultiheadAttention``, which reads the weight of its output layer without calling it."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(d, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    """A GRU or an LSTM."""

    def __init__(self, d: int, kind: str) -> None:
        super().__init__()
        self.cells = getattr(nn, kind)(d, d, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cells(x)[0]


class Convolution(nn.Module):
    """A convolution along the sequence."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(d, d, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x.transpose(1, 2)).transpose(1, 2).tanh()


class Scale(nn.Module):
    """A parameter without dims, one of a single element, and buffers that a checkpoint holds and does not
    hold.
    """

    factor: Tensor
    passing: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.shift = nn.Parameter(torch.full((1,), 0.1))
        self.register_buffer("factor", torch.tensor(1.25))
        self.register_buffer("passing", torch.tensor([0.75]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.factor + self.shift * self.passing


class Unused(nn.Module):
    """A layer that no forward pass uses."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(d, d), nn.Linear(d, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.used(x).tanh()


class Branch(nn.Module):
    """A branch that follows from the data, so ranks may take different ones."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.left(x) if x.sum() > 0 else self.right(x)).tanh()


class Twice(nn.Module):
    """One layer under two names, used twice in a pass."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.first = nn.Linear(d, d)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).tanh())


class Borrowed(nn.Module):
    """A weight that is read outside of the forward of the module that holds it."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.owner = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.owner.weight, self.owner.bias).tanh()


class Own(nn.Module):
    """Parameters that belong to no layer of torch, one of them not contiguous."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(d, d).mul_(0.2).t())
        self.parts = nn.ParameterList([torch.zeros(d), torch.ones(1, d)])

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.matrix + self.parts[0]).tanh() * self.parts[1]


class Recomputed(nn.Module):
    """An activation checkpoint."""

    def __init__(self, d: int, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner = nn.Sequential(nn.Linear(d, d), nn.Tanh(), nn.Linear(d, d))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Normed(nn.Module):
    """A layer whose weight is computed by a parametrization of torch."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.proj = nn.utils.parametrizations.weight_norm(nn.Linear(d, d))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj(x).tanh()


class Drop(nn.Module):
    """Dropout that drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x)


class Net(nn.Module):
    """Blocks in a list, and a parameter of the root itself."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.gain
