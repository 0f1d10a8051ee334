"""A plan on CUDA: two gloo ranks share one GPU, where gloo adds up and does nothing else."""

from __future__ import annotations

import copy

import pytest
import torch

import colossalai
from colossalai.auto_parallel.tensor_shard.initialize import initialize_device_mesh, initialize_model
from colossalai.testing import spawn
from tests.auto_parallel.tensor_shard.random_plans import check_equal, links
from tests.auto_parallel.tensor_shard.small_models import small_problem

pytestmark = pytest.mark.gpu


def _on_cuda(rank: int, world_size: int, port: int) -> None:
    torch.cuda.set_device(0)
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    problem = small_problem("gpt2")
    batch = {name: tensor.cuda() for name, tensor in problem.batches[0].items()}
    link = links((1, 2))["1"]
    pair = (link.alpha, link.beta)
    device_mesh = initialize_device_mesh(
        alpha_beta_dict={(i, j): pair for i in range(2) for j in range(2) if i != j},
        logical_mesh_shape=(1, 2),
    )
    model = problem.build().float().cuda()
    serial = copy.deepcopy(model)
    for module in (model, serial):
        module.eval()
    model = initialize_model(model, batch, device_mesh, solver_preference="dp")
    for _ in range(2):
        for module in (model, serial):
            module(**batch).loss.backward()
    check_equal(model, serial, gradients=True, rtol=1e-4)
    # with dropout: what is whole is alike on both ranks, whatever their seeds
    torch.manual_seed(rank)
    trained = initialize_model(
        problem.build().float().cuda(), batch, device_mesh, solver_preference="dp", memory_budget=-1
    )
    loss = trained(**batch).loss
    loss.backward()
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    assert torch.equal(mean / 2, loss.detach())


def test_data_parallel_plans_on_a_gpu() -> None:
    pytest.importorskip("transformers")
    spawn(_on_cuda, 2, timeout=240)
