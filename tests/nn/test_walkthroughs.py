"""The MLP of the documents (pages 28 to 31) on 2, 4, 8 and 8 processes: the printed shapes, and parity with
the serial MLP.
"""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from torch import Tensor, nn

import colossalai
import colossalai.nn as col_nn
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.mesh import grad_norm
from colossalai.nn.modes import current, stream_position
from colossalai.testing import spawn
from colossalai.utils import clip_grad_norm_fp32, get_current_device, print_rank_0


class MLP(torch.nn.Module):
    def __init__(self, dim: int = 256, transposed: bool = False) -> None:
        super().__init__()
        intermediate_dim = dim * 4
        shown = (
            (lambda w: w.transpose(0, 1)) if transposed else (lambda w: w)
        )  # page 28 prints 1D's like this
        self.dense_1 = col_nn.Linear(dim, intermediate_dim)
        print_rank_0(f"Weight of the first linear layer: {shown(self.dense_1.weight).shape}")
        self.activation = torch.nn.GELU()
        self.dense_2 = col_nn.Linear(intermediate_dim, dim)
        print_rank_0(f"Weight of the second linear layer: {shown(self.dense_2.weight).shape}")
        self.dropout = col_nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense_1(x)
        print_rank_0(f"Output of the first linear layer: {x.shape}")
        x = self.activation(x)
        x = self.dense_2(x)
        print_rank_0(f"Output of the second linear layer: {x.shape}")
        return self.dropout(x)


class SerialMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense_1, self.dense_2 = col_nn.VanillaLinear(256, 1024), col_nn.VanillaLinear(1024, 256)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, stream) -> Tensor:
        return stream.dropout(self.dense_2(nn.functional.gelu(self.dense_1(x))), 0.1)


P = ParallelMode
# tensor config, (dim, parallel mode) of the documents' chunks of the input, printed lines
CASES = {
    "1d": (
        {"size": 2, "mode": "1d"},
        [],
        ["[256, 512]", "[512, 256]", "[16, 512]", "[16, 256]"],
    ),
    "2d": (
        {"size": 4, "mode": "2d"},
        [(0, P.PARALLEL_2D_COL), (-1, P.PARALLEL_2D_ROW)],
        ["[128, 512]", "[512, 128]", "[8, 128]", "[8, 512]", "[8, 128]"],
    ),
    "2.5d": (
        {"size": 8, "mode": "2.5d", "depth": 2},
        [(0, P.PARALLEL_2P5D_DEP), (0, P.PARALLEL_2P5D_COL), (-1, P.PARALLEL_2P5D_ROW)],
        ["[128, 512]", "[512, 128]", "[4, 128]", "[4, 512]", "[4, 128]"],
    ),
    "3d": (
        {"size": 8, "mode": "3d"},
        [(0, P.PARALLEL_3D_WEIGHT), (0, P.PARALLEL_3D_INPUT), (-1, P.PARALLEL_3D_OUTPUT)],
        ["[128, 256]", "[512, 64]", "[4, 128]", "[4, 512]", "[4, 128]"],
    ),
}
LINES = (
    "Weight of the first linear layer",
    "Weight of the second linear layer",
    "Input",
    "Output of the first linear layer",
    "Output of the second linear layer",
)


def chunk(x: Tensor, cuts: list[tuple[int, ParallelMode]]) -> Tensor:
    for dim, mode in cuts:
        x = torch.chunk(x, 2, dim=dim)[gpc.get_local_rank(mode)]
    return x


def _walk(rank: int, world_size: int, port: int, name: str) -> None:
    tensor, cuts, shapes = CASES[name]
    config = {"parallel": {"data": 1, "pipeline": 1, "tensor": tensor}}
    colossalai.launch(config, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        torch.manual_seed(5)
        m = MLP(transposed=name == "1d")
        x = torch.randn((16, 256), device=get_current_device())
        torch.distributed.broadcast(x, src=0)
        mine = chunk(x, cuts)
        if cuts:
            print_rank_0(f"Input: {mine.shape}")
        with col_nn.plan_independent_dropout(3):
            y = m(mine)
    expected = [line for line in LINES if cuts or line != "Input"]
    if rank == 0:
        assert printed.getvalue().splitlines() == [
            f"{line}: torch.Size({shape})" for line, shape in zip(expected, shapes, strict=True)
        ]
    assert stream_position(gpc.mesh) == "hidden"
    _same_as_serial(m, mine, y, x, cuts)


def _same_as_serial(m: MLP, mine: Tensor, y: Tensor, x: Tensor, cuts: list[tuple[int, ParallelMode]]) -> None:
    torch.manual_seed(5)
    serial = SerialMLP()
    for name, whole in _whole(m).items():
        assert torch.equal(whole, serial.get_parameter(name)), f"initial {name} is not bit-equal"
    with col_nn.plan_independent_dropout(3) as stream:
        expected = serial(x, stream)
    torch.testing.assert_close(y, chunk(expected, cuts), rtol=1e-5, atol=1e-5)
    ours = torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-4)
    theirs = torch.optim.Adam(serial.parameters(), lr=1e-2, eps=1e-4)
    target = torch.linspace(-1, 1, x.numel()).view_as(x)
    (expected - target).square().sum().backward()
    (y - chunk(target, cuts)).square().sum().backward()
    norm = grad_norm(m.parameters(), gpc.mesh)
    expected_norm = nn.utils.get_total_norm([p.grad for p in serial.parameters()])
    torch.testing.assert_close(norm, expected_norm, rtol=1e-5, atol=0)
    assert clip_grad_norm_fp32(m.parameters(), 1.0) == pytest.approx(float(norm))
    nn.utils.clip_grad_norm_(serial.parameters(), 1.0)
    for p in m.parameters():
        p.data, p.grad = p.grad, p.data  # global_state_dict joins values: here those of the gradients
    for name, whole in _whole(m).items():
        torch.testing.assert_close(whole, serial.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
    for p in m.parameters():
        p.data, p.grad = p.grad, p.data
    ours.step()
    theirs.step()
    for name, whole in _whole(m).items():
        torch.testing.assert_close(whole, serial.get_parameter(name), rtol=1e-4, atol=1e-5)


def _whole(m: MLP) -> dict[str, Tensor]:
    return {**m.dense_1.global_state_dict("dense_1."), **m.dense_2.global_state_dict("dense_2.")}


@pytest.mark.parametrize("name", CASES)
def test_documented_mlp(name: str) -> None:
    spawn(_walk, CASES[name][0]["size"], name=name)


def _sequence_parallel(rank: int, world_size: int, port: int) -> None:
    tensor = {"size": 2, "mode": "1d", "sequence_parallel": True}
    colossalai.launch_from_torch({"parallel": {"tensor": tensor}}, backend="gloo", verbose=False)
    assert current().tp.hidden.dims == ((), ("tp",), ())
    m = col_nn.Linear(8, 16)
    assert m(torch.zeros(2, 3, 8)).shape == (2, 6, 8)


def test_sequence_parallelism_is_a_word_of_the_config() -> None:
    spawn(_sequence_parallel, 2)


def test_without_a_launch_the_layers_are_serial() -> None:
    tp, mesh = current()
    assert (tp.mode, tp.size, mesh) == (None, 1, None)
    m = col_nn.Linear(3, 4)
    assert m.plain
    assert m.weight.shape == (4, 3)
    x = torch.randn(2, 3)
    torch.testing.assert_close(m(x), nn.functional.linear(x, m.weight, m.bias))
    assert type(m.weight) is nn.Parameter
