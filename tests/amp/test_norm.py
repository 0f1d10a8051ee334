"""One norm for all optimizers: that of the whole model, as a serial run would
have it, however parameters are cut.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai
from colossalai.amp import AMP_TYPE, convert_to_amp
from colossalai.amp.naive_amp import ConstantGradScaler, FP16Optimizer
from colossalai.amp.torch_amp import GradScaler, TorchAMPOptimizer
from colossalai.booster import Booster
from colossalai.core import global_context as gpc
from colossalai.engine import Engine
from colossalai.interface import OptimizerWrapper
from colossalai.mesh import Layout, Mesh, grad_norm, gradient_norm, parameter, placement, shard
from colossalai.testing import spawn

# the pieces of a 1D layer, a parameter cut over the data axis, one cut over both, and a copy
LAYOUTS = {
    "column": Layout((("tp",), ())),
    "row": Layout(((), ("tp",))),
    "data": Layout((("dp",), ())),
    "both": Layout((("dp", "tp"), ())),
    "copy": Layout(((), ())),
}


class Mixed(nn.Module):
    """Its loss is linear, so that the gradients are known: those of a serial model, cut."""

    def __init__(self, mesh: Mesh, device: str = "cpu") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.gradients: dict[str, Tensor] = {}
        for name, layout in LAYOUTS.items():
            weight, gradient = torch.randn(2, 8, 4, generator=generator).to(device)
            setattr(self, name, parameter(nn.Parameter(weight), layout, mesh))
            self.gradients[name] = gradient
        self.own = {n: shard(self.gradients[n], layout, mesh) for n, layout in LAYOUTS.items()}

    def forward(self) -> Tensor:
        return torch.stack([(p * self.own[n].to(p.dtype)).sum() for n, p in self.named_parameters()]).sum()

    def serial_norm(self, norm_type: float) -> Tensor:
        flat = torch.cat([g.flatten() for g in self.gradients.values()])
        return torch.linalg.vector_norm(flat, norm_type)


def _optimizers(model: Mixed, device: str) -> dict[str, Any]:
    """Every optimizer that clips, each over the parameters of ``model``."""

    def raw() -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    scaler = GradScaler(4.0, device=device)
    return {
        "plain": OptimizerWrapper(raw(), gpc.mesh),
        "engine": Engine(model, raw()).optimizer,
        "booster": _boosted(None, device),
        "booster fp16": _boosted("fp16", device),
        "torch": TorchAMPOptimizer(raw(), scaler, mesh=gpc.mesh),
        "naive": FP16Optimizer(raw(), ConstantGradScaler(4.0), mesh=gpc.mesh),
        "apex": convert_to_amp(model, raw(), None, AMP_TYPE.APEX, {"opt_level": "O1"})[1],
    }


def _boosted(precision: str | None, device: str) -> Any:
    model = Mixed(gpc.mesh, device)
    boosted = Booster(device=device, mixed_precision=precision).boost(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    boosted.optimizer.model = model
    return boosted.optimizer


def _norms(rank: int, world_size: int, port: int, device: str = "cpu") -> None:
    handler = {"type": "DataParallelGradientHandler"}  # without one, what data cuts is refused
    config = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}, "gradient_handler": [handler]}
    colossalai.launch(config, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    model = Mixed(gpc.mesh, device)
    for name, optimizer in _optimizers(model, device).items():
        mine = getattr(optimizer, "model", model)
        for norm_type in (2.0, 1.0, math.inf):
            optimizer.zero_grad()
            optimizer.backward(mine())
            expected = model.serial_norm(norm_type)
            torch.testing.assert_close(optimizer.clip_grad_by_norm(0.5, norm_type), expected, msg=name)
            torch.testing.assert_close(
                grad_norm(mine.parameters(), gpc.mesh, norm_type), expected.new_tensor(0.5)
            )
            for key, p in mine.named_parameters():
                clipped = mine.own[key] * 0.5 / expected
                torch.testing.assert_close(p.grad, clipped, msg=f"{name} {key}")
        # the norm of this rank's pieces alone, or of all ranks' tensors, is another one
        optimizer.zero_grad()
        optimizer.backward(mine())
        optimizer.unscale_grad()
        alone = torch.nn.utils.get_total_norm([p.grad for p in mine.parameters()])
        everyone = alone**2
        dist.all_reduce(everyone)
        assert not torch.isclose(alone, model.serial_norm(2.0)), name
        assert not torch.isclose(everyone.sqrt(), model.serial_norm(2.0)), name
    gradient_norm.piece_axes = lambda *_: ()  # a norm that does not look where parameters lie is found out
    optimizer = OptimizerWrapper(torch.optim.SGD(model.parameters(), lr=0.1), gpc.mesh)
    assert not torch.isclose(optimizer.clip_grad_by_norm(1.0), model.serial_norm(2.0))


def test_mixed_layouts_have_the_norm_of_the_serial_model() -> None:
    spawn(_norms, 4)


@pytest.mark.gpu
def test_the_same_on_one_gpu() -> None:
    """All ranks share the GPU and talk over gloo."""
    spawn(_norms, 4, device="cuda")


def _half(rank: int, world_size: int, port: int) -> None:
    """Naive AMP: masters lie where their weights lie.

    A gradient that is nan on one rank is nan in the norm of all.
    """
    config = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
    colossalai.launch(config, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    model = Mixed(gpc.mesh)
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    _, optimizer, _ = convert_to_amp(model, raw, None, AMP_TYPE.NAIVE, {"initial_scale": 4})
    assert [placement(p) for p in optimizer.parameters()] == list(LAYOUTS.values())  # type: ignore[union-attr]
    optimizer.backward(model().float())  # type: ignore[union-attr]
    total = optimizer.clip_grad_by_norm(0.5)  # type: ignore[union-attr]
    torch.testing.assert_close(total, model.serial_norm(2.0), rtol=1e-3, atol=0)
    if rank == 3:
        optimizer.parameters()[3].grad[0, 0] = math.nan  # type: ignore[union-attr, index]
    for norm_type in (2.0, math.inf):
        assert optimizer.clip_grad_by_norm(1.0, norm_type).isnan()  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="norm of all gradients is nan, so they cannot be clipped"):
        optimizer.clip_grad_by_norm(1.0, error_if_nonfinite=True)  # type: ignore[union-attr]


def test_masters_are_counted_where_their_weights_lie() -> None:
    spawn(_half, 4)


def _decision(rank: int, world_size: int, port: int) -> None:
    """Ranks that hold pieces of one parameter decide together, also over the data axis."""
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    weight = parameter(nn.Parameter(torch.ones(4, 2)), Layout((("dp",), ())), gpc.mesh)
    optimizer = TorchAMPOptimizer(torch.optim.SGD([weight], lr=0.1), init_scale=4.0)
    optimizer.backward(weight.sum() * (math.inf if rank == 1 else 1.0))
    optimizer.step()
    assert optimizer.step_was_skipped
    assert torch.equal(weight, torch.ones(2, 2))


def test_pieces_over_the_data_axis_decide_together() -> None:
    spawn(_decision, 2)


def _by_group(rank: int, world_size: int, port: int) -> None:
    """Without a mesh, the documented group says who holds other parts of the model."""
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    weight = nn.Parameter(torch.ones(3).half())
    optimizer = FP16Optimizer(
        torch.optim.SGD([weight], lr=0.1),
        ConstantGradScaler(2.0),
        mp_process_group=dist.group.WORLD,
        log_num_zeros_in_grad=True,
    )
    optimizer.backward((weight * torch.tensor([0.0, 3.0 * rank, 4.0])).sum())
    total = OptimizerWrapper(optimizer).clip_grad_by_norm(100.0)  # a wrapper around it passes on
    torch.testing.assert_close(total, torch.tensor([4.0, 3.0, 4.0]).norm())
    optimizer.step()
    assert optimizer.num_zeros_in_grad == 3


def test_a_group_of_other_parts_may_be_given() -> None:
    spawn(_by_group, 2)


def test_a_piece_without_a_mesh_is_an_error() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.placement = Layout((("tp",),))  # type: ignore[attr-defined]
    weight.grad = torch.ones(2)
    optimizer = OptimizerWrapper(torch.optim.SGD([weight], lr=0.1))
    with pytest.raises(ValueError, match="cut over tp, but no mesh says who holds its other pieces"):
        optimizer.clip_grad_by_norm(1.0)


def _marks(rank: int, world_size: int, port: int) -> None:
    config = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
    colossalai.launch(config, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    for pieces, expected in ((1, 2.0), (2, 4.0)):
        weight.is_tensor_parallel, weight.num_partitions = True, pieces  # type: ignore[attr-defined]
        assert grad_norm([weight], gpc.mesh, 1.0) == expected
    weight.num_partitions = 3  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"num_partitions=3 pieces, but the tensor axes .* have 2 ranks"):
        grad_norm([weight], gpc.mesh)


def test_the_documented_marks_are_understood() -> None:
    spawn(_marks, 2)
