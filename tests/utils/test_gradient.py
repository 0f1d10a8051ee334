"""Norms and counts over gradients that are cut over ranks."""

from __future__ import annotations

import pytest
import torch

import colossalai
from colossalai.core import global_context as gpc
from colossalai.mesh import Layout, parameter, shard
from colossalai.testing import assert_close, spawn
from colossalai.utils import clip_grad_norm_fp32, count_zeros_fp32

WEIGHT = torch.arange(12.0).view(4, 3)  # its gradient, too
BIAS = torch.tensor([0.0, 2.0])


def check_cut(rank: int, world_size: int, port: int) -> None:
    config = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
    colossalai.launch(config, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    cut = Layout((("tp",), ()))
    weight, bias = parameter(WEIGHT, cut, gpc.mesh), torch.nn.Parameter(BIAS.clone())
    weight.grad, bias.grad = shard(WEIGHT, cut, gpc.mesh).clone(), BIAS.clone()
    whole = torch.cat([WEIGHT.flatten(), BIAS])
    assert count_zeros_fp32([weight, bias]) == 2
    norm = clip_grad_norm_fp32([weight, bias], max_norm=1.0)
    assert norm == pytest.approx(float(whole.norm()))
    assert_close(bias.grad, BIAS / norm, rtol=1e-4, atol=1e-5)
    assert clip_grad_norm_fp32([weight, bias], 10.0, norm_type=float("inf")) == pytest.approx(
        11 / norm, rel=1e-4
    )


def test_pieces_are_added_up_and_copies_counted_once() -> None:
    spawn(check_cut, 2)


def test_without_a_launch() -> None:
    p = torch.nn.Parameter(torch.zeros(2))
    assert count_zeros_fp32(p) == 0
    p.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_fp32(p, 1.0) == pytest.approx(5.0)
    assert_close(p.grad, torch.tensor([0.6, 0.8]))
    assert count_zeros_fp32([p]) == 0
