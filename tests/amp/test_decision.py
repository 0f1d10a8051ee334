"""Ranks that hold different parts of one model step together or not at all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai
from colossalai.amp import AMP_TYPE, convert_to_amp
from colossalai.amp.naive_amp import ConstantGradScaler, DynamicGradScaler, FP16Optimizer, NaiveAMPModel
from colossalai.amp.torch_amp import GradScaler, TorchAMPOptimizer
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.mesh import Layout, place
from colossalai.testing import spawn


def _launch(rank: int, world_size: int, port: int, tensor: int = 1) -> None:
    config = {"parallel": {"tensor": {"size": tensor, "mode": "1d"}}} if tensor > 1 else {}
    colossalai.launch(config, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)


def _step_with_overflow_on_rank_1(mode: AMP_TYPE) -> tuple[list[bool], list[float]]:
    """On each rank: whether its part of the model moved, and its next loss scale."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone().half()
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    amp_model, optimizer, _ = convert_to_amp(
        model,
        raw,
        None,
        mode,
        {} if mode is AMP_TYPE.TORCH else {"verbosity": 0} if mode is AMP_TYPE.APEX else {"hysteresis": 1},
    )
    x = torch.ones(2, 4) * (float("inf") if rank == 1 else 1.0)
    optimizer.backward(amp_model(x).float().mean())  # type: ignore[union-attr]
    optimizer.step()  # type: ignore[union-attr]
    mine = (not torch.equal(model.weight.half(), before), optimizer.loss_scale)  # type: ignore[union-attr]
    all_ranks: list[tuple[bool, float]] = [mine] * dist.get_world_size()
    dist.all_gather_object(all_ranks, mine)
    return [moved for moved, _ in all_ranks], [scale for _, scale in all_ranks]


def _together(rank: int, world_size: int, port: int) -> None:
    _launch(rank, world_size, port, tensor=world_size)
    for mode in AMP_TYPE:
        moved, scales = _step_with_overflow_on_rank_1(mode)
        assert moved == [False, False], mode
        assert scales == [2**15, 2**15], mode


def _alone(rank: int, world_size: int, port: int) -> None:
    """The same without a model-parallel group: the check above can fail."""
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    for mode in AMP_TYPE:
        moved, scales = _step_with_overflow_on_rank_1(mode)
        assert moved == [True, False], mode
        assert scales == [2**16, 2**15], mode


def test_all_ranks_of_a_model_skip_together() -> None:
    spawn(_together, 2)


def test_without_the_common_decision_the_parts_would_drift_apart() -> None:
    spawn(_alone, 2)


def _given_groups(rank: int, world_size: int, port: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    for role in ("dp_process_group", "mp_process_group"):
        weight = nn.Parameter(torch.ones(2).half())
        optimizer = FP16Optimizer(
            torch.optim.SGD([weight], lr=1.0), DynamicGradScaler(4, hysteresis=1), **{role: dist.group.WORLD}
        )
        if rank == 1:  # rank 0 has no gradient at all, and takes part nevertheless
            optimizer.backward(weight.sum() * float("nan"))
        optimizer.step()
        assert optimizer.step_was_skipped
        assert optimizer.loss_scale == 2
    weight = nn.Parameter(torch.ones(2))
    scaler = GradScaler(4.0, device="cpu", process_group=dist.group.WORLD)
    torch_optimizer = TorchAMPOptimizer(torch.optim.SGD([weight], lr=1.0), scaler)
    if rank == 1:
        torch_optimizer.backward(weight.sum() * float("nan"))
    torch_optimizer.step()
    assert torch_optimizer.step_was_skipped
    assert torch_optimizer.loss_scale == 2


def test_groups_may_be_given() -> None:
    spawn(_given_groups, 2)


def _norm(rank: int, world_size: int, port: int) -> None:
    _launch(rank, world_size, port, tensor=world_size)
    for by_layout in (True, False):
        _check_norm(rank, world_size, by_layout)


def _check_norm(rank: int, world_size: int, by_layout: bool) -> None:
    torch.manual_seed(0)
    cut, whole = torch.randn(4, 3), torch.randn(5)
    piece = nn.Parameter(cut.chunk(world_size)[rank].half())
    if by_layout:
        place(piece, Layout((("tp",), ())), cut.shape)
    else:  # the documented marks
        piece.is_tensor_parallel, piece.num_partitions = True, world_size  # type: ignore[attr-defined]
    copy = nn.Parameter(whole.half())
    optimizer = FP16Optimizer(
        torch.optim.SGD([piece, copy], lr=1.0),
        ConstantGradScaler(2.0),
        clip_grad_norm=0.5,
        log_num_zeros_in_grad=True,
    )
    gradient_cut, gradient_whole = torch.arange(12.0).view(4, 3), torch.arange(5.0)

    def loss() -> Tensor:
        return (piece * gradient_cut.chunk(world_size)[rank]).sum() + (copy * gradient_whole).sum()

    serial = torch.cat([gradient_cut.flatten(), gradient_whole])
    for norm_type in (2.0, 1.0, float("inf")):
        optimizer.zero_grad()
        optimizer.backward(loss())
        norm = optimizer.clip_grad_by_norm(1e9, norm_type)
        torch.testing.assert_close(norm, torch.linalg.vector_norm(serial, norm_type))
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, torch.linalg.vector_norm(serial))
    assert optimizer.num_zeros_in_grad == 2
    expected = whole.half().float() - 0.5 * gradient_whole / serial.norm()
    torch.testing.assert_close(copy.detach().float(), expected, rtol=1e-3, atol=1e-3)


def test_norms_and_counts_are_those_of_the_whole_model() -> None:
    spawn(_norm, 2)


def _buffers(rank: int, world_size: int, port: int) -> None:
    _launch(rank, world_size, port)
    assert gpc.get_world_size(ParallelMode.DATA) == world_size
    for sync in (True, False):
        norm = nn.BatchNorm1d(3)
        norm.running_mean.fill_(rank)  # type: ignore[operator, union-attr]
        model = NaiveAMPModel(norm, sync_buffer=sync, parallel_mode=[ParallelMode.DATA])
        model.eval()
        model(torch.zeros(4, 3))
        assert norm.running_mean.mean() == rank  # type: ignore[operator, union-attr]
        model.train()
        model(torch.zeros(4, 3))  # 0.9 times the mean over the ranks, or this rank's own
        expected = 0.9 * (0.5 if sync else rank)
        assert norm.running_mean.mean().item() == pytest.approx(expected, rel=1e-3)  # type: ignore[operator, union-attr]


def test_buffers_are_averaged_over_data_parallel_ranks() -> None:
    spawn(_buffers, 2)
